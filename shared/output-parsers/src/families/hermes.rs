//! Hermes, Qwen 2.5 and Qwen 3: a JSON object between two markers.
//!
//! ```text
//! <tool_call>
//! {"name": "get_weather", "arguments": {"city": "Oslo"}}
//! </tool_call>
//! ```

use refrain_protocol::engine::TextForm;

use crate::call_object::{CallObject, Need};
use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, json_call, json_name};
use crate::json::Progress;
use crate::sink::Sink;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

enum State {
    Text,
    Object(Box<CallObject>),
    /// After an object, where the closing marker or another object may stand.
    After,
}

/// See the module's documentation.
pub(crate) struct Hermes {
    state: State,
}

impl Hermes {
    pub(crate) fn new() -> Self {
        Hermes { state: State::Text }
    }

    fn object(&mut self) {
        self.state = State::Object(Box::new(CallObject::new(Need::Name)));
    }

    /// Leaves an object before the place where it should have ended.
    fn leave(&mut self, sink: &mut Sink) {
        if let State::Object(object) = &self.state {
            let is_text = !object.is_satisfied() && sink.fail();
            if !is_text {
                sink.end_if_started();
            }
            self.state = if is_text { State::Text } else { State::After };
        }
    }
}

impl Family for Hermes {
    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, CLOSE]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        match &mut self.state {
            State::Text => {
                sink.plain(text);
                text.len()
            }
            State::Object(object) => {
                let (taken, progress) = object.feed(text, sink);
                if progress != Progress::More {
                    self.leave(sink);
                }
                taken
            }
            State::After if blank(text) > 0 => {
                sink.plain(&text[..blank(text)]);
                blank(text)
            }
            State::After if text.starts_with('{') => {
                sink.open();
                self.object();
                0
            }
            State::After => {
                self.state = State::Text;
                0
            }
        }
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        if matches!(&self.state, State::Object(object) if object.is_in_string()) {
            return false;
        }
        if marker == OPEN {
            self.leave(sink);
            sink.open();
            sink.record(marker);
            self.object();
            return true;
        }
        if marker != CLOSE || matches!(self.state, State::Text) {
            return false;
        }
        sink.record(marker);
        self.leave(sink);
        sink.forget_whitespace();
        self.state = State::Text;
        true
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, sink: &mut Sink) {
        self.leave(sink);
    }
}

/// The form of calls.
pub(super) fn form(wanted: &CallsWanted<'_>) -> Result<TextForm, NoForm> {
    let calls = wanted.calls(["", "\n", ""], |tool| {
        let name = json_name(tool);
        let begin = format!("{OPEN}\n{{\"name\": {name}, \"arguments\": ");
        Ok(json_call(tool, begin, &format!("}}\n{CLOSE}")))
    });
    Ok(TextForm::Calls(calls?))
}
