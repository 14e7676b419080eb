//! GLM 4.5 to 4.7: a name, then keys and values between markers.
//!
//! ```text
//! <tool_call>get_weather
//! <arg_key>city</arg_key>
//! <arg_value>Oslo</arg_value>
//! </tool_call>
//! ```
//!
//! A value whose schema says `string` is a string. Any other is JSON, a Python literal, or else a string.

use refrain_protocol::engine::{ArgumentsForm, CallForm, TextForm};

use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, TaggedParameters, bare_name};
use crate::json::{Progress, quoted};
use crate::name::NameReader;
use crate::schema::{Shape, ValueWriter, shape};
use crate::sink::{NAME_BYTES_MAX, Sink};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

enum State {
    Text,
    Name(NameReader),
    /// Before a key or the closing marker.
    Between,
    Key(String),
    AfterKey(String),
    Value(ValueWriter),
}

/// See the module's documentation.
pub(crate) struct Glm45 {
    state: State,
    name: String,
    has_arguments: bool,
}

impl Glm45 {
    pub(crate) fn new() -> Self {
        Glm45 {
            state: State::Text,
            name: String::new(),
            has_arguments: false,
        }
    }

    fn fail(&mut self, sink: &mut Sink) {
        match &self.state {
            State::Key(key) | State::AfterKey(key) => sink.unwritten(key),
            State::Value(writer) => sink.unwritten(&writer.unwritten()),
            _ => {}
        }
        sink.fail();
        self.state = State::Text;
    }

    /// Ends the name, if one was read.
    fn take_name(&mut self) {
        if let State::Name(reader) = &self.state
            && let Some(name) = reader.get()
        {
            self.name = name.to_owned();
            self.has_arguments = false;
            self.state = State::Between;
        }
    }

    fn end(&mut self, sink: &mut Sink) {
        if !self.has_arguments {
            sink.start(None, &self.name);
            sink.arguments("{");
        }
        sink.arguments("}");
        sink.end();
        self.state = State::Text;
    }

    /// The key is known, and its value follows.
    fn value_begins(&mut self, key: &str, sink: &mut Sink) {
        let is_first = !std::mem::replace(&mut self.has_arguments, true);
        if is_first {
            sink.start(None, &self.name);
        }
        sink.arguments(if is_first { "{" } else { ", " });
        sink.arguments(&quoted(key));
        sink.arguments(": ");
        let shape = shape(&sink.tools, &self.name, key, Shape::Any);
        let shape = if shape.is_text() { shape } else { Shape::Any };
        let writer = ValueWriter::new(shape, false, sink.limits.value_bytes);
        self.state = State::Value(writer);
    }
}

impl Family for Glm45 {
    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        match &mut self.state {
            State::Text => {
                sink.plain(text);
                text.len()
            }
            State::Name(reader) => {
                let (taken, progress) = reader.feed(text, "\n", sink);
                match progress {
                    Progress::More => {}
                    Progress::Done => self.take_name(),
                    Progress::Wrong => self.fail(sink),
                }
                taken
            }
            State::Between | State::AfterKey(_) if blank(text) > 0 => {
                sink.record(&text[..blank(text)]);
                blank(text)
            }
            State::Between | State::AfterKey(_) => {
                self.fail(sink);
                0
            }
            State::Key(key) => {
                let next = text.chars().next().map_or(0, char::len_utf8);
                if key.len() + next > NAME_BYTES_MAX {
                    self.fail(sink);
                    return 0;
                }
                key.push_str(&text[..next]);
                sink.record(&text[..next]);
                next
            }
            State::Value(writer) => {
                let mut out = String::new();
                writer.push(text, &mut out);
                sink.arguments(&out);
                sink.record(text);
                text.len()
            }
        }
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        if marker == KEY || marker == CLOSE {
            self.take_name();
        }
        match (&mut self.state, marker) {
            (State::Value(writer), VALUE_END) => {
                let mut out = String::new();
                writer.finish(&mut out);
                sink.arguments(&out);
                sink.record(marker);
                self.state = State::Between;
            }
            (State::Value(_), _) => return false,
            (_, OPEN) => {
                self.fail(sink);
                sink.open();
                sink.record(marker);
                self.state = State::Name(NameReader::default());
            }
            (State::Text, _) => return false,
            (State::Between, KEY) => {
                sink.record(marker);
                self.state = State::Key(String::new());
            }
            (State::Between, CLOSE) => self.end(sink),
            (State::Key(key), KEY_END) => {
                let key = key.trim().to_owned();
                sink.record(marker);
                self.state = State::AfterKey(key);
            }
            (State::AfterKey(key), VALUE) => {
                let key = std::mem::take(key);
                self.value_begins(&key, sink);
                sink.record(marker);
            }
            _ => {
                sink.record(marker);
                self.fail(sink);
            }
        }
        true
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.fail(sink);
    }
}

/// The form of calls.
pub(super) fn form(wanted: &CallsWanted<'_>) -> Result<TextForm, NoForm> {
    let tags = TaggedParameters {
        name_begin: KEY,
        name_end: &format!("{KEY_END}\n{VALUE}"),
        value_end: &format!("{VALUE_END}\n"),
        ends: &[VALUE_END],
        unknown: Shape::Any,
    };
    let calls = wanted.calls(["", "\n", ""], |tool| {
        Ok(CallForm {
            begin: format!("{OPEN}{}\n", bare_name(tool, &tool.name)?),
            arguments: ArgumentsForm::Parts(tags.parts(tool)?),
            end: CLOSE.into(),
        })
    });
    Ok(TextForm::Calls(calls?))
}
