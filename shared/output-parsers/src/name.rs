//! Reads a name, and arguments that follow one.

use crate::json::{JsonReader, Progress};
use crate::sink::{NAME_BYTES_MAX, Sink, is_name};

/// A name with whitespace around it, up to one of some characters.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameReader {
    name: String,
    is_over: bool,
}

impl NameReader {
    /// Reads up to a character of `ends`, which it does not take, and records the text.
    pub(crate) fn feed(&mut self, text: &str, ends: &str, sink: &mut Sink) -> (usize, Progress) {
        for (at, next) in text.char_indices() {
            let progress = if ends.contains(next) && !(next == '\n' && self.name.is_empty()) {
                Progress::Done
            } else if next.is_whitespace() {
                self.is_over = !self.name.is_empty();
                continue;
            } else if self.is_over
                || !is_name(next.encode_utf8(&mut [0; 4]))
                || self.name.len() + next.len_utf8() > NAME_BYTES_MAX
            {
                Progress::Wrong
            } else {
                self.name.push(next);
                continue;
            };
            sink.record(&text[..at]);
            return (at, progress);
        }
        sink.record(text);
        (text.len(), Progress::More)
    }

    /// The name, or nothing if there was none.
    pub(crate) fn get(&self) -> Option<&str> {
        (!self.name.is_empty()).then_some(self.name.as_str())
    }
}

/// Arguments that are a JSON object, and go out as they arrive.
#[derive(Clone, Debug)]
pub(crate) struct ArgumentsReader {
    id: Option<String>,
    name: String,
    reader: JsonReader,
    has_begun: bool,
}

impl ArgumentsReader {
    pub(crate) fn new(id: Option<String>, name: String) -> Self {
        ArgumentsReader {
            id,
            name,
            reader: JsonReader::new(),
            has_begun: false,
        }
    }

    /// Whether the object has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether a marker at this place is text within a string.
    pub(crate) fn is_in_string(&self) -> bool {
        self.reader.is_in_string()
    }

    /// Reads on, and records what it takes. The call starts with the object, which comes first, after whitespace and
    /// the characters of `before`.
    pub(crate) fn feed(&mut self, text: &str, before: &str, sink: &mut Sink) -> (usize, Progress) {
        let mut at = 0;
        if !self.has_begun {
            let is_before = |c: char| c.is_whitespace() || before.contains(c);
            at = text.find(|c| !is_before(c)).unwrap_or(text.len());
            sink.record(&text[..at]);
            match text[at..].chars().next() {
                None => return (at, Progress::More),
                Some('{') => self.begin(sink),
                Some(_) => return (at, Progress::Wrong),
            }
        }
        let taken = self.reader.feed(&text[at..]);
        sink.arguments(&text[at..at + taken]);
        sink.record(&text[at..at + taken]);
        let progress = match self.reader.is_done() {
            true => Progress::Done,
            false => Progress::More,
        };
        (at + taken, progress)
    }

    fn begin(&mut self, sink: &mut Sink) {
        self.has_begun = true;
        sink.start(self.id.take(), &self.name);
    }

    /// Ends a call whose arguments are left out.
    pub(crate) fn end_empty(&mut self, sink: &mut Sink) {
        self.begin(sink);
        sink.arguments("{}");
        sink.end();
    }

    /// Ends the call at the end of its object, or fails it. Returns whether it came out as text.
    pub(crate) fn conclude(&self, sink: &mut Sink) -> bool {
        if self.reader.is_done() && self.reader.is_valid() {
            sink.end();
            return false;
        }
        sink.fail()
    }
}
