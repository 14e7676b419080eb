//! Qwen3 Coder: a function and its parameters in tags.
//!
//! ```text
//! <tool_call>
//! <function=get_weather>
//! <parameter=city>
//! Oslo
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! The schema tells strings from other values; a parameter without a schema is a string. One line break on either
//! side of a value belongs to the format.

use refrain_protocol::engine::{ArgumentsForm, CallForm, TextForm};

use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, TaggedParameters, bare_name};
use crate::json::{Progress, quoted};
use crate::name::NameReader;
use crate::schema::{Shape, ValueWriter, shape};
use crate::sink::Sink;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

enum State {
    Text,
    /// After the opening marker.
    Opened,
    Function(NameReader),
    /// Before a parameter or the function's end.
    Between,
    Parameter(NameReader),
    Value(ValueWriter),
    /// After a function, where the closing marker or another function may stand.
    After,
}

/// See the module's documentation.
pub(crate) struct Qwen3Coder {
    state: State,
    name: String,
    has_arguments: bool,
}

impl Qwen3Coder {
    pub(crate) fn new() -> Self {
        Qwen3Coder {
            state: State::Text,
            name: String::new(),
            has_arguments: false,
        }
    }

    fn fail(&mut self, sink: &mut Sink) {
        match &self.state {
            State::Parameter(name) => sink.unwritten(name.get().unwrap_or_default()),
            State::Value(writer) => sink.unwritten(&writer.unwritten()),
            _ => {}
        }
        self.state = match sink.fail() {
            true => State::Text,
            false => State::After,
        };
    }

    fn end(&mut self, sink: &mut Sink) {
        sink.arguments(if self.has_arguments { "}" } else { "{}" });
        sink.end();
        self.state = State::After;
    }

    fn end_value(&mut self, sink: &mut Sink) {
        if let State::Value(writer) = &mut self.state {
            let mut out = String::new();
            writer.finish(&mut out);
            sink.arguments(&out);
            self.state = State::Between;
        }
    }

    fn begin_value(&mut self, parameter: &str, sink: &mut Sink) {
        let is_first = !std::mem::replace(&mut self.has_arguments, true);
        sink.arguments(if is_first { "{" } else { ", " });
        sink.arguments(&quoted(parameter));
        sink.arguments(": ");
        let shape = shape(&sink.tools, &self.name, parameter, Shape::Text);
        let writer = ValueWriter::new(shape, true, sink.limits.value_bytes);
        self.state = State::Value(writer);
    }

    /// The name of a function or a parameter has ended with a bracket.
    fn named(&mut self, sink: &mut Sink) {
        match &self.state {
            State::Function(reader) => {
                let Some(name) = reader.get() else {
                    return self.fail(sink);
                };
                self.name = name.to_owned();
                self.has_arguments = false;
                sink.start(None, &self.name);
                sink.record(">");
                self.state = State::Between;
            }
            State::Parameter(reader) => {
                let Some(name) = reader.get().map(str::to_owned) else {
                    return self.fail(sink);
                };
                sink.record(">");
                self.begin_value(&name, sink);
            }
            _ => {}
        }
    }
}

impl Family for Qwen3Coder {
    fn markers(&self) -> &'static [&'static str] {
        &[
            OPEN,
            CLOSE,
            FUNCTION,
            FUNCTION_END,
            PARAMETER,
            PARAMETER_END,
        ]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let space = blank(text);
        match &mut self.state {
            State::Text => {
                sink.plain(text);
                return text.len();
            }
            State::Opened | State::Between if space > 0 => {
                sink.record(&text[..space]);
                return space;
            }
            State::After if space > 0 => {
                sink.plain(&text[..space]);
                return space;
            }
            State::Opened | State::Between => self.fail(sink),
            State::After => self.state = State::Text,
            State::Function(reader) | State::Parameter(reader) => {
                let (taken, progress) = reader.feed(text, ">", sink);
                match progress {
                    Progress::More => {}
                    Progress::Wrong => self.fail(sink),
                    Progress::Done if taken == 0 => {
                        let has_name = reader.get().is_some();
                        self.named(sink);
                        return usize::from(has_name);
                    }
                    Progress::Done => {}
                }
                return taken;
            }
            State::Value(writer) => {
                let mut out = String::new();
                writer.push(text, &mut out);
                sink.arguments(&out);
                sink.record(text);
                return text.len();
            }
        }
        0
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        if let State::Value(writer) = &self.state {
            // Models forget the end of a parameter, and then begin the next tag on a new line.
            let is_end = marker == PARAMETER_END
                || writer.is_at_line_begin() && (marker == PARAMETER || marker == FUNCTION_END);
            if !is_end {
                return false;
            }
            self.end_value(sink);
            if marker == PARAMETER_END {
                sink.record(marker);
                return true;
            }
        }
        match (&self.state, marker) {
            (State::Text | State::After, OPEN | FUNCTION) => {
                sink.open();
                sink.record(marker);
                self.state = match marker {
                    OPEN => State::Opened,
                    _ => State::Function(NameReader::default()),
                };
            }
            (State::Text, _) => return false,
            (State::After, CLOSE) => {
                sink.forget_whitespace();
                self.state = State::Text;
            }
            (State::After, _) => {
                self.state = State::Text;
                return false;
            }
            (State::Opened, FUNCTION) => {
                sink.record(marker);
                self.state = State::Function(NameReader::default());
            }
            (State::Between, PARAMETER) => {
                sink.record(marker);
                self.state = State::Parameter(NameReader::default());
            }
            (State::Between, FUNCTION_END) => self.end(sink),
            (State::Between, CLOSE) => {
                self.end(sink);
                self.state = State::Text;
            }
            (_, OPEN) => {
                self.fail(sink);
                sink.open();
                sink.record(marker);
                self.state = State::Opened;
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
        name_begin: PARAMETER,
        name_end: ">\n",
        value_end: &format!("\n{PARAMETER_END}\n"),
        ends: &[PARAMETER_END, PARAMETER, FUNCTION_END],
        unknown: Shape::Text,
    };
    let calls = wanted.calls(["", "\n", ""], |tool| {
        let name = bare_name(tool, &tool.name)?;
        Ok(CallForm {
            begin: format!("{OPEN}\n{FUNCTION}{name}>\n"),
            arguments: ArgumentsForm::Parts(tags.parts(tool)?),
            end: format!("{FUNCTION_END}\n{CLOSE}"),
        })
    });
    Ok(TextForm::Calls(calls?))
}
