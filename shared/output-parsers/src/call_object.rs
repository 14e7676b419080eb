//! Reads a call that is a JSON object with a name and arguments, and passes the arguments on as they arrive.

use crate::family::blank;
use crate::json::{JsonReader, Progress, StringReader};
use crate::sink::{Sink, is_name};

/// The fields that an object needs to be a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A marker said that it is one, so a name is enough.
    Name,
    /// Nothing but its form says so: it has the name of a known tool, arguments, and only keys of calls.
    Everything,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Id,
    Arguments,
    Other,
}

#[derive(Clone, Debug)]
enum State {
    Begin,
    FirstKey,
    Key,
    KeyText(StringReader),
    Colon(Field),
    Value(Field),
    Text(Field, StringReader),
    /// The arguments, or a value that is skipped.
    Json(Field, JsonReader),
    /// Arguments that are JSON inside of a JSON string.
    Encoded(StringReader, JsonReader),
    After,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arguments {
    Missing,
    /// They came before the name, and wait in `early`.
    Early,
    /// They go out as they arrive.
    Flowing,
    Complete,
}

/// One call object. Its text is read once; the arguments before the name are the only ones that are kept.
#[derive(Clone, Debug)]
pub(crate) struct CallObject {
    need: Need,
    state: State,
    /// The key or string that is being read.
    text: String,
    name: Option<String>,
    id: Option<String>,
    early: String,
    arguments: Arguments,
    is_broken: bool,
}

impl CallObject {
    /// An object that begins at its brace.
    pub(crate) fn new(need: Need) -> Self {
        CallObject {
            need,
            state: State::Begin,
            text: String::new(),
            name: None,
            id: None,
            early: String::new(),
            arguments: Arguments::Missing,
            is_broken: false,
        }
    }

    /// Whether a marker at this place is text within a string.
    pub(crate) fn is_in_string(&self) -> bool {
        match &self.state {
            State::KeyText(_) | State::Text(..) | State::Encoded(..) => true,
            State::Json(_, reader) => reader.is_in_string(),
            _ => false,
        }
    }

    /// Whether all of the call is known, whatever still follows in the object.
    pub(crate) fn is_satisfied(&self) -> bool {
        self.name.is_some() && self.arguments == Arguments::Complete && !self.is_broken
    }

    /// Whether it names a tool. An object that names none may be an answer in JSON.
    pub(crate) fn has_name(&self) -> bool {
        self.name.is_some()
    }

    /// Reads on, and records what it takes. The call starts when its name is known and its arguments have begun.
    pub(crate) fn feed(&mut self, text: &str, sink: &mut Sink) -> (usize, Progress) {
        let mut at = 0;
        loop {
            if matches!(self.state, State::Done) {
                return (at, self.verdict(sink));
            }
            if at == text.len() {
                return (at, Progress::More);
            }
            let (taken, progress) = self.step(&text[at..], sink);
            sink.record(&text[at..at + taken]);
            at += taken;
            if progress == Progress::Wrong {
                return (at, Progress::Wrong);
            }
        }
    }

    fn verdict(&mut self, sink: &mut Sink) -> Progress {
        if self.arguments == Arguments::Missing && self.need == Need::Name {
            self.early = "{}".to_owned();
            self.arguments = Arguments::Early;
            self.begin(sink);
        }
        match self.is_satisfied() {
            true => Progress::Done,
            false => Progress::Wrong,
        }
    }

    /// One part of the object.
    fn step(&mut self, text: &str, sink: &mut Sink) -> (usize, Progress) {
        let space = blank(text);
        let is_between = matches!(
            self.state,
            State::Begin
                | State::FirstKey
                | State::Key
                | State::Colon(_)
                | State::Value(_)
                | State::After
        );
        if is_between && space > 0 {
            return (space, Progress::More);
        }
        let first = text.as_bytes().first().copied().unwrap_or_default();
        match (&mut self.state, first) {
            (State::Begin, b'{') => self.go(State::FirstKey),
            (State::FirstKey | State::Key, b'"') => {
                self.text.clear();
                self.go(State::KeyText(StringReader::default()))
            }
            (State::FirstKey | State::After, b'}') => self.go(State::Done),
            (State::After, b',') => self.go(State::Key),
            (State::KeyText(reader), _) => {
                let (taken, progress) = reader.feed(text, &mut self.text);
                if progress != Progress::Done {
                    return (taken, progress);
                }
                let Some(field) = self.field() else {
                    return (taken, Progress::Wrong);
                };
                self.state = State::Colon(field);
                (taken, Progress::More)
            }
            (State::Colon(field), b':') => {
                let field = *field;
                self.go(State::Value(field))
            }
            (State::Value(field), _) => {
                let field = *field;
                self.value(field, first, sink)
            }
            (State::Text(field, reader), _) => {
                let field = *field;
                let (taken, progress) = reader.feed(text, &mut self.text);
                match progress {
                    Progress::Done => (taken, self.string(field, sink)),
                    progress => (taken, progress),
                }
            }
            (State::Json(Field::Arguments, reader), _) => {
                let taken = reader.feed(text);
                let (is_done, is_valid) = (reader.is_done(), reader.is_valid());
                self.argument_text(&text[..taken], is_done, is_valid, sink);
                (taken, Progress::More)
            }
            (State::Json(_, reader), _) => {
                let taken = reader.feed(text);
                if reader.is_done() {
                    self.state = State::After;
                } else if taken < text.len() {
                    return (taken, Progress::Wrong);
                }
                (taken, Progress::More)
            }
            (State::Encoded(outer, inner), _) => {
                // One character at a time, so that a mistake is found at the same place in every chunking.
                let next = text.chars().next().map_or(0, char::len_utf8);
                let mut decoded = String::new();
                let (taken, progress) = outer.feed(&text[..next], &mut decoded);
                if self.text.is_empty() && !decoded.trim_start().is_empty() {
                    if !decoded.trim_start().starts_with('{') {
                        return (0, Progress::Wrong);
                    }
                    self.text.push('{');
                }
                if !self.text.is_empty() && inner.feed(&decoded) < decoded.trim_end().len() {
                    self.is_broken = true;
                }
                let is_done = progress == Progress::Done;
                let is_valid = !is_done || inner.is_whole();
                match progress {
                    Progress::Wrong => (0, Progress::Wrong),
                    _ => {
                        self.argument_text(&decoded, is_done, is_valid, sink);
                        (taken, Progress::More)
                    }
                }
            }
            _ => (0, Progress::Wrong),
        }
    }

    fn go(&mut self, state: State) -> (usize, Progress) {
        self.state = state;
        (1, Progress::More)
    }

    /// The meaning of the key that was read.
    fn field(&self) -> Option<Field> {
        match (self.text.as_str(), self.need) {
            ("name", _) if self.name.is_none() => Some(Field::Name),
            ("arguments" | "parameters", _) if self.arguments == Arguments::Missing => {
                Some(Field::Arguments)
            }
            ("id", _) => Some(Field::Id),
            ("type", _) | (_, Need::Name) => Some(Field::Other),
            (_, Need::Everything) => None,
        }
    }

    fn value(&mut self, field: Field, first: u8, sink: &mut Sink) -> (usize, Progress) {
        self.text.clear();
        match (field, first) {
            (Field::Name | Field::Id, b'"') => self.go(State::Text(field, StringReader::default())),
            (Field::Name, _) => (0, Progress::Wrong),
            (Field::Arguments, b'{' | b'n') => {
                self.arguments = Arguments::Early;
                match first {
                    b'{' => self.state = State::Json(field, JsonReader::new()),
                    _ => {
                        self.early = "{}".to_owned();
                        self.state = State::Json(Field::Other, JsonReader::new());
                    }
                }
                self.begin(sink);
                (0, Progress::More)
            }
            (Field::Arguments, b'"') => {
                self.arguments = Arguments::Early;
                self.begin(sink);
                self.go(State::Encoded(StringReader::default(), JsonReader::new()))
            }
            (Field::Arguments, _) => (0, Progress::Wrong),
            (Field::Id | Field::Other, _) => {
                self.state = State::Json(Field::Other, JsonReader::new());
                (0, Progress::More)
            }
        }
    }

    /// A string has ended, which is the name or the id.
    fn string(&mut self, field: Field, sink: &mut Sink) -> Progress {
        self.state = State::After;
        let text = std::mem::take(&mut self.text);
        if field == Field::Id {
            self.id = Some(text);
            return Progress::More;
        }
        if !is_name(&text) || (self.need == Need::Everything && !sink.knows(&text)) {
            return Progress::Wrong;
        }
        self.name = Some(text);
        self.begin(sink);
        Progress::More
    }

    /// Starts the call if its name is known and its arguments have begun.
    fn begin(&mut self, sink: &mut Sink) {
        let Some(name) = &self.name else { return };
        if self.arguments != Arguments::Early {
            return;
        }
        sink.start(self.id.take(), name);
        let early = std::mem::take(&mut self.early);
        sink.arguments(&early);
        let is_flowing = matches!(
            self.state,
            State::Json(Field::Arguments, _) | State::Value(_) | State::Encoded(..)
        );
        self.arguments = match is_flowing && early.is_empty() {
            true => Arguments::Flowing,
            false => Arguments::Complete,
        };
    }

    fn argument_text(&mut self, text: &str, is_done: bool, is_valid: bool, sink: &mut Sink) {
        self.is_broken |= !is_valid;
        match self.arguments {
            Arguments::Flowing => sink.arguments(text),
            _ => self.early.push_str(text),
        }
        if is_done {
            self.state = State::After;
            if self.arguments == Arguments::Flowing {
                self.arguments = Arguments::Complete;
            }
        }
    }
}
