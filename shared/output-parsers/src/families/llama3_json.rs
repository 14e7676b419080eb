//! Llama 3 and 4: a bare JSON object, or several with `;` between them, often after `<|python_tag|>`.
//!
//! ```text
//! {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "get_time", "parameters": {}}
//! <|python_tag|>brave_search.call(query="weather in Oslo")
//! ```
//!
//! Without the tag, an object is a call only at the beginning of the text and if it looks like nothing else.

use refrain_protocol::engine::TextForm;

use crate::call_object::{CallObject, Need};
use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, json_call, json_name, unmarked};
use crate::json::Progress;
use crate::python::KeywordArguments;
use crate::sink::{NAME_BYTES_MAX, Sink};

const TAG: &str = "<|python_tag|>";
/// The method of built-in tools.
const METHOD: &str = ".call";

enum State {
    /// Only whitespace has come.
    Start,
    Text,
    /// After the tag.
    Tagged,
    Object(CallObject),
    /// A built-in tool's name.
    Name(String),
    Arguments(KeywordArguments, String),
    After,
    /// After a separator.
    Next,
}

/// See the module's documentation.
pub(crate) struct Llama3Json {
    state: State,
    need: Need,
}

impl Llama3Json {
    pub(crate) fn new() -> Self {
        Llama3Json {
            state: State::Start,
            need: Need::Everything,
        }
    }

    fn leave(&mut self, sink: &mut Sink) {
        let is_satisfied = match &self.state {
            State::Start | State::Text | State::After => return,
            State::Object(object) => object.is_satisfied(),
            State::Arguments(arguments, _) => {
                sink.unwritten(arguments.unwritten());
                false
            }
            _ => false,
        };
        let is_answer = self.need == Need::Everything
            && matches!(&self.state, State::Object(object) if !object.has_name());
        if is_answer {
            sink.cancel();
            self.state = State::Text;
        } else if is_satisfied {
            sink.end();
            self.state = State::After;
        } else {
            sink.fail();
            self.state = State::Text;
        }
    }

    fn take(&mut self, text: &str, state: State, sink: &mut Sink) -> usize {
        sink.record(text);
        self.state = state;
        text.len()
    }
}

impl Family for Llama3Json {
    fn markers(&self) -> &'static [&'static str] {
        &[TAG]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let space = blank(text);
        let first = text.chars().next().unwrap_or_default();
        match &mut self.state {
            State::Start | State::After if space > 0 => {
                sink.plain(&text[..space]);
                return space;
            }
            State::Tagged | State::Next if space > 0 => {
                sink.record(&text[..space]);
                return space;
            }
            State::Start | State::After if first == '{' => {
                sink.open();
                self.state = State::Object(CallObject::new(self.need));
            }
            State::After if first == ';' || first == ',' => {
                sink.open();
                return self.take(&text[..1], State::Next, sink);
            }
            State::Tagged | State::Next if first == '{' => {
                self.state = State::Object(CallObject::new(self.need));
            }
            State::Tagged if first.is_ascii_alphabetic() || first == '_' => {
                self.state = State::Name(String::new());
            }
            State::Start | State::After => self.state = State::Text,
            State::Text => {
                sink.plain(text);
                return text.len();
            }
            State::Object(object) => {
                let (taken, progress) = object.feed(text, sink);
                if progress != Progress::More {
                    self.leave(sink);
                }
                return taken;
            }
            State::Name(name) => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
                if is_name(first) && name.len() < NAME_BYTES_MAX {
                    name.push(first);
                    sink.record(&text[..1]);
                    return 1;
                }
                match name.strip_suffix(METHOD).map(str::to_owned) {
                    Some(tool) if first == '(' && !tool.is_empty() => {
                        let arguments = KeywordArguments::new();
                        return self.take(&text[..1], State::Arguments(arguments, tool), sink);
                    }
                    _ => self.leave(sink),
                }
            }
            State::Arguments(arguments, name) => {
                let (taken, progress) = arguments.feed_call(text, name, sink);
                match progress {
                    Progress::More => {}
                    Progress::Done => {
                        sink.end();
                        self.state = State::After;
                    }
                    Progress::Wrong => self.leave(sink),
                }
                return taken;
            }
            State::Tagged | State::Next => self.leave(sink),
        }
        0
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        let is_in_string = match &self.state {
            State::Object(object) => object.is_in_string(),
            State::Arguments(arguments, _) => arguments.is_in_string(),
            _ => false,
        };
        if marker != TAG || is_in_string {
            return false;
        }
        self.leave(sink);
        self.need = Need::Name;
        sink.open();
        sink.record(marker);
        self.state = State::Tagged;
        true
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.leave(sink);
    }
}

/// The form of calls. Models differ in the key of the arguments.
pub(super) fn form(wanted: &CallsWanted<'_>) -> Result<TextForm, NoForm> {
    let with_key = |key: &str| {
        wanted.calls(["", "; ", ""], |tool| {
            let begin = format!("{{\"name\": {}, \"{key}\": ", json_name(tool));
            Ok(json_call(tool, begin, "}"))
        })
    };
    let mut form = with_key("parameters")?;
    form.calls.append(&mut with_key("arguments")?.calls);
    Ok(unmarked(form, '{'))
}
