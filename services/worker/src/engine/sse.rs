//! A parser of server-sent events. The bytes may arrive in any split, with CRLF or LF, with comments, and with or
//! without a space after `data:`.
//!
//! It is hand-written because it is on the path of every token: the data of an event is a slice of the bytes as they
//! arrived, unless they were split within it, and each byte is scanned once.

use bytes::{Buf, Bytes};

/// Longest event, bytes. An event holds a few tokens with their log-probabilities, but the last event of some engines
/// repeats the prompt.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Splits a stream of bytes into the data of events. Engines send such streams, and the gateway does.
#[derive(Debug, Default)]
pub struct SseParser {
    /// Bytes that arrived last.
    arrived: Bytes,
    /// The beginning of a line whose end has not arrived.
    partial: Vec<u8>,
    /// The data of the event that is being read.
    data: Data,
}

#[derive(Debug, Default)]
enum Data {
    #[default]
    None,
    Line(Bytes),
    Lines(Vec<u8>),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::None => 0,
            Data::Line(line) => line.len(),
            Data::Lines(lines) => lines.len(),
        }
    }

    /// Adds a line.
    fn push(&mut self, line: Bytes) {
        *self = match std::mem::take(self) {
            Data::None => Data::Line(line),
            Data::Line(first) => Data::Lines([&first[..], b"\n", &line].concat()),
            Data::Lines(mut lines) => {
                lines.push(b'\n');
                lines.extend_from_slice(&line);
                Data::Lines(lines)
            }
        };
    }
}

/// An event is longer than any engine sends.
#[derive(Debug, PartialEq, Eq)]
pub struct TooLong;

impl SseParser {
    /// Adds bytes as they arrived, once [`next_event`](Self::next_event) has returned `None` for those before.
    pub fn push(&mut self, bytes: Bytes) {
        self.partial.extend_from_slice(&self.arrived);
        self.arrived = bytes;
    }

    /// Returns the data of the next complete event, or `None` until more bytes arrive.
    ///
    /// # Errors
    /// The event is longer than any engine sends.
    pub fn next_event(&mut self) -> Result<Option<Bytes>, TooLong> {
        while let Some(at) = memchr::memchr(b'\n', &self.arrived) {
            let is_blank = match (self.partial.is_empty(), &self.arrived[..at]) {
                (true, b"" | b"\r") => true,
                (true, _) => {
                    let line = self.arrived.slice(..at);
                    self.line(&line);
                    false
                }
                (false, end) => {
                    self.partial.extend_from_slice(end);
                    let line = Bytes::from(std::mem::take(&mut self.partial));
                    let is_blank = matches!(&line[..], b"" | b"\r");
                    if !is_blank {
                        self.line(&line);
                    }
                    is_blank
                }
            };
            self.arrived.advance(at + 1);
            if is_blank {
                match std::mem::take(&mut self.data) {
                    Data::None => {}
                    Data::Line(data) => return Ok(Some(data)),
                    Data::Lines(data) => return Ok(Some(data.into())),
                }
            }
            if self.data.len() > EVENT_BYTES_MAX {
                return Err(TooLong);
            }
        }
        let rest = std::mem::take(&mut self.arrived);
        self.partial.extend_from_slice(&rest);
        if self.partial.len() > EVENT_BYTES_MAX {
            return Err(TooLong);
        }
        Ok(None)
    }

    /// Reads a line that is not blank.
    fn line(&mut self, line: &Bytes) {
        let end = line.strip_suffix(b"\r").unwrap_or(line).len();
        if let Some(value) = line[..end].strip_prefix(b"data:") {
            let start = end - value.strip_prefix(b" ").unwrap_or(value).len();
            self.data.push(line.slice(start..end));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn events(parser: &mut SseParser) -> Vec<String> {
        let next = || Some(String::from_utf8(parser.next_event().unwrap()?.to_vec()).unwrap());
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
                parser.push(Bytes::copy_from_slice(piece));
                seen.extend(events(&mut parser));
            }
            assert_eq!(seen, whole, "in pieces of {size}");
        }
    }

    #[test]
    fn an_event_without_end_is_an_error() {
        let mut parser = SseParser::default();
        parser.push(vec![b'x'; EVENT_BYTES_MAX + 1].into());
        assert_eq!(parser.next_event(), Err(TooLong));
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
                        parser.push(Bytes::copy_from_slice(piece));
                        while let Some(data) = parser.next_event().expect("a short event") {
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
