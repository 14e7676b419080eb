//! Mistral: a marker, then a JSON array of calls, or a name and a JSON object.
//!
//! ```text
//! [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "Xy3aBc9dE"}]
//! [TOOL_CALLS]get_weather[CALL_ID]Xy3aBc9dE[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{}
//! ```

use refrain_protocol::engine::TextForm;

use crate::call_object::{CallObject, Need};
use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, bare_name, json_call, json_name};
use crate::json::Progress;
use crate::name::{ArgumentsReader, NameReader};
use crate::sink::Sink;

const CALLS: &str = "[TOOL_CALLS]";
const ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

enum State {
    Text,
    /// After the marker.
    Opened,
    /// In the array, before an object.
    Item,
    Object(CallObject),
    /// After an object.
    After,
    Name(NameReader),
    Id(String, NameReader),
    Arguments(ArgumentsReader),
}

/// See the module's documentation.
pub(crate) struct Mistral {
    state: State,
    in_array: bool,
}

impl Mistral {
    pub(crate) fn new() -> Self {
        Mistral {
            state: State::Text,
            in_array: false,
        }
    }

    /// Leaves a call before the place where it should have ended.
    fn leave(&mut self, sink: &mut Sink) {
        let is_satisfied = match &self.state {
            State::Text | State::After => return,
            State::Object(object) => object.is_satisfied(),
            _ => false,
        };
        self.state = if is_satisfied {
            sink.end();
            State::After
        } else if sink.fail() {
            State::Text
        } else {
            State::After
        };
    }

    fn record(&mut self, text: &str, state: State, sink: &mut Sink) -> usize {
        sink.record(text);
        self.state = state;
        text.len()
    }
}

impl Family for Mistral {
    fn markers(&self) -> &'static [&'static str] {
        &[CALLS, ID, ARGUMENTS]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let space = blank(text);
        let first = text.chars().next().unwrap_or_default();
        match &mut self.state {
            State::Text => {
                sink.plain(text);
                return text.len();
            }
            State::Opened | State::Item if space > 0 => {
                sink.record(&text[..space]);
                return space;
            }
            State::After if space > 0 => {
                sink.plain(&text[..space]);
                return space;
            }
            State::Opened if first == '[' => {
                self.in_array = true;
                return self.record(&text[..1], State::Item, sink);
            }
            State::Opened | State::Item if first == '{' => {
                self.state = State::Object(CallObject::new(Need::Name));
            }
            State::Opened => self.state = State::Name(NameReader::default()),
            State::Item => self.leave(sink),
            State::After if self.in_array && first == ',' => {
                sink.open();
                return self.record(&text[..1], State::Item, sink);
            }
            State::After if self.in_array && first == ']' => {
                sink.forget_whitespace();
                self.in_array = false;
                return 1;
            }
            State::After => self.state = State::Text,
            State::Object(object) => {
                let (taken, progress) = object.feed(text, sink);
                if progress != Progress::More {
                    self.leave(sink);
                }
                return taken;
            }
            State::Name(reader) => {
                let (taken, progress) = reader.feed(text, "{", sink);
                match (progress, reader.get()) {
                    (Progress::More, _) => {}
                    (Progress::Done, Some(name)) => {
                        let arguments = ArgumentsReader::new(None, name.to_owned());
                        self.state = State::Arguments(arguments);
                    }
                    _ => self.leave(sink),
                }
                return taken;
            }
            State::Id(_, reader) => {
                let (taken, progress) = reader.feed(text, "", sink);
                if progress == Progress::Wrong {
                    self.leave(sink);
                }
                return taken;
            }
            State::Arguments(arguments) => {
                let (taken, progress) = arguments.feed(text, "", sink);
                if progress == Progress::Done {
                    let is_text = arguments.conclude(sink);
                    self.state = if is_text { State::Text } else { State::After };
                } else if progress == Progress::Wrong {
                    self.leave(sink);
                }
                return taken;
            }
        }
        0
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        match (&self.state, marker) {
            (State::Object(object), _) if object.is_in_string() => return false,
            (State::Arguments(arguments), _) if arguments.is_in_string() => return false,
            (_, CALLS) => {
                self.leave(sink);
                self.in_array = false;
                sink.open();
                self.record(marker, State::Opened, sink);
            }
            (State::Name(reader), ID | ARGUMENTS) if reader.get().is_some() => {
                let name = reader.get().unwrap_or_default().to_owned();
                let state = match marker {
                    ID => State::Id(name, NameReader::default()),
                    _ => State::Arguments(ArgumentsReader::new(None, name)),
                };
                self.record(marker, state, sink);
            }
            (State::Id(name, reader), ARGUMENTS) => {
                let id = reader.get().map(str::to_owned);
                let arguments = ArgumentsReader::new(id, name.clone());
                self.record(marker, State::Arguments(arguments), sink);
            }
            (State::Text, _) => return false,
            _ => {
                self.leave(sink);
                self.state = State::Text;
                return false;
            }
        }
        true
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.leave(sink);
    }
}

/// The form of calls: models whose tokenizer has the marker before arguments write names, all others an array.
pub(super) fn form(
    wanted: &CallsWanted<'_>,
    is_token: &dyn Fn(&str) -> bool,
) -> Result<TextForm, NoForm> {
    let calls = match is_token(ARGUMENTS) {
        true => wanted.calls(["", "", ""], |tool| {
            let begin = format!("{CALLS}{}{ARGUMENTS}", bare_name(tool, &tool.name)?);
            Ok(json_call(tool, begin, ""))
        }),
        false => wanted.calls([&format!("{CALLS}["), ", ", "]"], |tool| {
            let begin = format!("{{\"name\": {}, \"arguments\": ", json_name(tool));
            Ok(json_call(tool, begin, "}"))
        }),
    };
    Ok(TextForm::Calls(calls?))
}
