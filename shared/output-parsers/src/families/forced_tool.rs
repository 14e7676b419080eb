//! A tool that must be called: the output is the JSON object of its arguments.

use crate::family::{Family, blank};
use crate::json::Progress;
use crate::name::ArgumentsReader;
use crate::sink::Sink;

enum State {
    /// Only whitespace has come.
    Start,
    Arguments(ArgumentsReader),
    Text,
    /// The output does not begin with an object, so the model's own format decides.
    Family,
}

/// See the module's documentation.
pub(crate) struct ForcedTool {
    tool: String,
    family: Box<dyn Family>,
    state: State,
}

impl ForcedTool {
    pub(crate) fn new(tool: String, family: Box<dyn Family>) -> Self {
        ForcedTool {
            tool,
            family,
            state: State::Start,
        }
    }
}

impl Family for ForcedTool {
    fn markers(&self) -> &'static [&'static str] {
        self.family.markers()
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        match &mut self.state {
            State::Start if blank(text) > 0 => {
                sink.plain(&text[..blank(text)]);
                blank(text)
            }
            State::Start if text.starts_with('{') => {
                sink.open();
                let name = std::mem::take(&mut self.tool);
                self.state = State::Arguments(ArgumentsReader::new(None, name));
                0
            }
            State::Start => {
                self.state = State::Family;
                0
            }
            State::Arguments(arguments) => {
                let (taken, progress) = arguments.feed(text, "", sink);
                if progress != Progress::More {
                    arguments.conclude(sink);
                    self.state = State::Text;
                }
                taken
            }
            State::Text => {
                sink.plain(text);
                text.len()
            }
            State::Family => self.family.text(text, sink),
        }
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        match &self.state {
            State::Start | State::Family => {
                self.state = State::Family;
                self.family.marker(marker, sink)
            }
            State::Arguments(arguments) if !arguments.is_in_string() => {
                arguments.conclude(sink);
                self.state = State::Text;
                false
            }
            _ => false,
        }
    }

    fn is_reasoning(&self) -> bool {
        self.family.is_reasoning()
    }

    fn give_up(&mut self) {
        match self.state {
            State::Family => self.family.give_up(),
            _ => self.state = State::Text,
        }
    }

    fn finish(&mut self, sink: &mut Sink) {
        if let State::Family = self.state {
            self.family.finish(sink);
        }
    }
}
