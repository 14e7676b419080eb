//! Server-sent events, as bytes come: any split, CRLF or LF, comments, `data:` with or without a space.

use bytes::{Buf, BytesMut};

/// Longest event, bytes. An event holds a few tokens with their log-probabilities; the last one of some engines
/// repeats the prompt.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// A stream of bytes, cut into the data of events.
#[derive(Debug, Default)]
pub(super) struct SseParser {
    buffer: BytesMut,
    /// How much of the buffer is known to hold no end of a line.
    scanned: usize,
    /// The event that is being read, or was read last.
    data: Vec<u8>,
    has_data: bool,
}

/// An event without an end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

impl SseParser {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The data of the next whole event.
    ///
    /// # Errors
    /// The event is longer than any engine's.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TooLong> {
        while let Some(at) = self.buffer[self.scanned..]
            .iter()
            .position(|byte| *byte == b'\n')
        {
            let end = self.scanned + at;
            let event = self.line(end);
            self.buffer.advance(end + 1);
            self.scanned = 0;
            if event {
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

    /// Takes the line that ends at `end`. Returns whether it ends an event with data.
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
}
