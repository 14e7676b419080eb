//! Copies of requests and answers that pass through.

use std::io::Read;

use refrain_service_kit::http::ContentEncoding;
use serde_json::Value;

/// The longest body that is written down, bytes, before and after it is decompressed.
const BODY_BYTES_MAX: usize = 32 << 20;

/// A copy of a body. A body that is too long passes through, and is not kept.
#[derive(Debug, Default)]
pub(super) struct BodyCopy {
    bytes: Vec<u8>,
    is_cut: bool,
    /// `None` for an encoding that nobody here can read.
    encoding: Option<ContentEncoding>,
    /// Whether it is a stream of server-sent events.
    is_stream: bool,
}

impl BodyCopy {
    /// A copy of a body with these heads, `content-encoding` and `content-type`.
    pub(super) fn new(encoding: &str, kind: &str) -> Self {
        BodyCopy {
            encoding: ContentEncoding::named(encoding).ok(),
            is_stream: kind.starts_with("text/event-stream"),
            ..BodyCopy::default()
        }
    }

    pub(super) fn add(&mut self, piece: &[u8]) {
        if self.is_cut || self.bytes.len() + piece.len() > BODY_BYTES_MAX {
            self.is_cut = true;
            self.bytes = Vec::new();
        } else {
            self.bytes.extend_from_slice(piece);
        }
    }

    pub(super) fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Bytes in memory.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The body as one JSON value. A stream of events becomes the list of their data.
    ///
    /// # Errors
    /// The reason for which the body cannot be written down.
    pub(super) fn json(&self) -> Result<Value, &'static str> {
        const TOO_LONG: &str = "a body of more than 32 MiB";
        const UNREADABLE: &str = "a body that cannot be decompressed";
        if self.is_cut {
            return Err(TOO_LONG);
        }
        let encoding = self.encoding.ok_or(UNREADABLE)?;
        let mut plain = Vec::new();
        let body = match encoding.reader(&self.bytes).map_err(|_| UNREADABLE)? {
            None => &self.bytes,
            Some(reader) => {
                let mut reader = reader.take(BODY_BYTES_MAX as u64 + 1);
                reader.read_to_end(&mut plain).map_err(|_| UNREADABLE)?;
                &plain
            }
        };
        if body.len() > BODY_BYTES_MAX {
            return Err(TOO_LONG);
        }
        match self.is_stream {
            true => Ok(Value::Array(events(body))),
            false => serde_json::from_slice(body).map_err(|_| "a body that is not JSON"),
        }
    }
}

/// The data of server-sent events. Data that are no JSON, as the mark of the end, are left out.
fn events(body: &[u8]) -> Vec<Value> {
    let lines = body.split(|byte| *byte == b'\n');
    let data = lines.filter_map(|line| line.strip_prefix(b"data:"));
    data.filter_map(|data| serde_json::from_slice(data.trim_ascii()).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    fn copy(encoding: &str, kind: &str, body: &[u8]) -> BodyCopy {
        let mut copy = BodyCopy::new(encoding, kind);
        let (one, other) = body.split_at(body.len() / 2);
        copy.add(one);
        copy.add(other);
        copy
    }

    #[test]
    fn whole_answers_and_streams_become_values() {
        let read = |kind, body| copy("", kind, body).json();
        assert_eq!(read("application/json", b"{\"a\": 1}"), Ok(json!({"a": 1})));
        let stream = b"event: x\r\ndata: {\"a\": 1}\r\n\r\n: ping\n\ndata:[2]\n\ndata: [DONE]\n\n";
        let kind = "text/event-stream; charset=utf-8";
        assert_eq!(read(kind, stream), Ok(json!([{"a": 1}, [2]])));
        assert_eq!(read("", b"no"), Err("a body that is not JSON"));
    }

    #[test]
    fn compressed_bodies_are_read_within_the_limit() {
        let gzip = |text: &[u8]| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        };
        assert_eq!(copy("gzip", "", &gzip(b"[1]")).json(), Ok(json!([1])));
        let bomb = gzip(&vec![b' '; BODY_BYTES_MAX + 1]);
        let read = copy("gzip", "", &bomb).json();
        assert_eq!(read, Err("a body of more than 32 MiB"));
        for encoding in ["gzip", "odd"] {
            let read = copy(encoding, "", b"[1]").json();
            assert_eq!(
                read,
                Err("a body that cannot be decompressed"),
                "{encoding}"
            );
        }
    }

    #[test]
    fn a_long_body_is_not_kept() {
        let mut copy = copy("", "", b"[]");
        copy.add(&vec![b' '; BODY_BYTES_MAX]);
        assert_eq!(copy.len(), 0);
        copy.add(b"[]");
        assert_eq!(copy.json(), Err("a body of more than 32 MiB"));
    }
}
