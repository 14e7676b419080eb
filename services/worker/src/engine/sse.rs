//! A parser of server-sent events. The bytes may arrive in any split, with CRLF or LF, with comments, and with or
//! without a space after `data:`.
//!
//! It is hand-written because it is on the path of every token: it copies only the data of an event, and scans each
//! byte once.

use bytes::{Buf, BytesMut};

/// Longest event, bytes. An event holds a few tokens with their log-probabilities, but the last event of some engines
/// repeats the prompt.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Splits a stream of bytes into the data of events.
#[derive(Debug, Default)]
pub(super) struct SseParser {
    buffer: BytesMut,
    /// Length of the start of the buffer that is known to hold no line end.
    scanned: usize,
    /// The data of the event that is being read, or that was returned last.
    data: Vec<u8>,
    has_data: bool,
}

/// An event is longer than any engine sends.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

impl SseParser {
    /// Appends bytes as they arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the data of the next complete event, or `None` until more bytes arrive.
    ///
    /// # Errors
    /// The event is longer than any engine sends.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TooLong> {
        while let Some(at) = self.buffer[self.scanned..]
            .iter()
            .position(|byte| *byte == b'\n')
        {
            let end = self.scanned + at;
            let ends_event = self.line(end);
            self.buffer.advance(end + 1);
            self.scanned = 0;
            if ends_event {
                self.has_data = false;
                return Ok(Some(&self.data));
            }
            if self.data.len() > EVENT_BYTES_MAX {
                return Err(TooLong);
            }
        }
        self.scanned = self.buffer.len();
        if self.scanned > EVENT_BYTES_MAX {
            return Err(TooLong);
        }
        Ok(None)
    }

    /// Reads the line that ends at `end`. Returns whether it ends an event with data.
    fn line(&mut self, end: usize) -> bool {
        let line = &self.buffer[..end];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return self.has_data;
        }
        if let Some(value) = line.strip_prefix(b"data:") {
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            } else {
                self.data.clear();
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn events(parser: &mut SseParser) -> Vec<String> {
        let next = || Some(String::from_utf8(parser.next().unwrap()?.to_vec()).unwrap());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn every_split_gives_the_same_events() {
        let text = ": hello\r\ndata: {\"a\": \"é\"}\r\n\r\nevent: x\ndata:one\ndata: two\n\n\n\ndata: [DONE]\n\n";
        let whole = ["{\"a\": \"é\"}", "one\ntwo", "[DONE]"];
        for size in 1..=text.len() {
            let mut parser = SseParser::default();
            let mut seen = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                parser.push(piece);
                seen.extend(events(&mut parser));
            }
            assert_eq!(seen, whole, "in pieces of {size}");
        }
    }

    #[test]
    fn an_event_without_end_is_an_error() {
        let mut parser = SseParser::default();
        parser.push(&vec![b'x'; EVENT_BYTES_MAX + 1]);
        assert_eq!(parser.next(), Err(TooLong));
    }

    /// A fuzz target: however the bytes are split, the parser returns the same events and never panics.
    #[test]
    fn arbitrary_bytes_give_the_same_events_in_any_split() {
        bolero::check!()
            .with_type::<(Vec<u8>, Vec<u8>)>()
            .with_test_time(Duration::from_secs(1))
            .for_each(|(noise, sizes)| {
                // Mostly characters with a meaning, so that events come about.
                let alphabet = b"data: \r\n:x\n\n";
                let bytes: Vec<u8> = noise
                    .iter()
                    .map(|byte| match byte {
                        0..192 => alphabet[usize::from(*byte) % alphabet.len()],
                        _ => *byte,
                    })
                    .collect();
                let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
                    let mut parser = SseParser::default();
                    let mut events: Vec<Vec<u8>> = Vec::new();
                    for piece in pieces {
                        parser.push(piece);
                        while let Some(data) = parser.next().expect("a short event") {
                            events.push(data.to_vec());
                        }
                    }
                    events
                };
                let mut rest = &bytes[..];
                let mut sizes = sizes.iter().cycle();
                let mut split = std::iter::from_fn(|| {
                    let size = sizes.next().map_or(1, |size| usize::from(*size).max(1));
                    let (piece, left) = rest.split_at(size.min(rest.len()));
                    rest = left;
                    (!piece.is_empty()).then_some(piece)
                });
                assert_eq!(read(&mut split), read(&mut std::iter::once(&bytes[..])));
            });
    }
}
