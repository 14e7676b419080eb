//! DeepSeek V3 and V3.1, Kimi K2: a section of calls, each with a head and a JSON object, all between markers.
//!
//! ```text
//! V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
//!       ```json
//!       {"city": "Oslo"}
//!       ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>…
//! Kimi: <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{…}…
//! ```

use refrain_protocol::engine::{ArgumentsForm, CallForm, FormPart, TextForm};

use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, bare_name, json_call, object_schema};
use crate::json::Progress;
use crate::name::{ArgumentsReader, NameReader};
use crate::sink::Sink;

/// The words of a format.
pub(crate) struct Format {
    /// The markers: call begin, call end, and the one between head and arguments, then begin and end of a section in
    /// each of its spellings.
    markers: &'static [&'static str],
    head: Head,
}

/// The content of a call's head.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Head {
    /// A type in the head, and the name on a line of its own after it.
    TypeThenName,
    Name,
    /// `functions.name:0`, which is also the id.
    Id,
}

const DEEPSEEK_MARKERS: &[&str] = &[
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
];
pub(crate) const DEEPSEEK_V3: Format = Format {
    markers: DEEPSEEK_MARKERS,
    head: Head::TypeThenName,
};
pub(crate) const DEEPSEEK_V31: Format = Format {
    markers: DEEPSEEK_MARKERS,
    head: Head::Name,
};
pub(crate) const KIMI_K2: Format = Format {
    markers: &[
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        // The model spells the section in the singular now and then.
        "<|tool_call_section_begin|>",
        "<|tool_call_section_end|>",
    ],
    head: Head::Id,
};

/// The meaning of a marker.
enum Marker {
    CallBegin,
    CallEnd,
    /// Between head and arguments.
    Separator,
    SectionBegin,
    SectionEnd,
}

impl Format {
    fn marker(&self, marker: &str) -> Option<Marker> {
        let place = self.markers.iter().position(|known| *known == marker)?;
        Some(match place {
            0 => Marker::CallBegin,
            1 => Marker::CallEnd,
            2 => Marker::Separator,
            place if place % 2 == 1 => Marker::SectionBegin,
            _ => Marker::SectionEnd,
        })
    }
}

/// Characters of a fence before the arguments of V3.
const FENCE: &str = "`json";

enum State {
    Text,
    /// A section has begun, and no call yet.
    Section,
    Head(NameReader),
    /// The name's line, in V3.
    Line(NameReader),
    Arguments(ArgumentsReader),
    /// After the arguments, until the call's closing marker.
    AfterArguments,
    /// After a call.
    Between,
}

/// See the module's documentation.
pub(crate) struct DeepSeekKimi {
    format: &'static Format,
    state: State,
}

impl DeepSeekKimi {
    pub(crate) fn new(format: &'static Format) -> Self {
        DeepSeekKimi {
            format,
            state: State::Text,
        }
    }

    fn fail(&mut self, sink: &mut Sink) {
        self.state = match sink.fail() {
            true => State::Text,
            false => State::Between,
        };
    }

    /// Leaves a call before the place where it should have ended.
    fn leave(&mut self, sink: &mut Sink) {
        match &self.state {
            State::Text | State::AfterArguments | State::Between => {}
            _ => self.fail(sink),
        }
    }

    /// The marker between head and arguments.
    fn separator(&mut self, sink: &mut Sink) -> bool {
        let State::Head(head) = &self.state else {
            return false;
        };
        let Some(head) = head.get() else {
            self.fail(sink);
            return false;
        };
        self.state = match self.format.head {
            Head::TypeThenName => State::Line(NameReader::default()),
            Head::Name => State::Arguments(ArgumentsReader::new(None, head.to_owned())),
            Head::Id => {
                let (name, number) = head.rsplit_once(':').unwrap_or((head, ""));
                let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
                let name = if is_number { name } else { head };
                let name = name.strip_prefix("functions.").unwrap_or(name);
                let id = is_number.then(|| head.to_owned());
                State::Arguments(ArgumentsReader::new(id, name.to_owned()))
            }
        };
        true
    }

    /// A marker at the end of a call or a section.
    fn ending(&mut self, marker: &str, is_section: bool, sink: &mut Sink) -> bool {
        let after = if is_section {
            State::Text
        } else {
            State::Between
        };
        match &mut self.state {
            State::Text => return false,
            State::Arguments(arguments) if !arguments.has_begun() => {
                arguments.end_empty(sink);
                self.state = after;
            }
            State::Section | State::Head(_) | State::Line(_) | State::Arguments(_) => {
                sink.record(marker);
                self.fail(sink);
                if is_section {
                    self.state = State::Text;
                }
            }
            State::AfterArguments | State::Between => {
                sink.forget_whitespace();
                self.state = after;
            }
        }
        true
    }
}

impl Family for DeepSeekKimi {
    fn markers(&self) -> &'static [&'static str] {
        self.format.markers
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let is_v3 = self.format.head == Head::TypeThenName;
        match &mut self.state {
            State::Text | State::Between => {
                sink.plain(text);
                return text.len();
            }
            State::Section if blank(text) > 0 => {
                sink.record(&text[..blank(text)]);
                return blank(text);
            }
            State::Section => self.fail(sink),
            State::Head(head) => {
                let (taken, progress) = head.feed(text, "", sink);
                if progress == Progress::Wrong {
                    self.fail(sink);
                }
                return taken;
            }
            State::Line(line) => {
                let (taken, progress) = line.feed(text, "\n", sink);
                match (progress, line.get()) {
                    (Progress::Done, Some(name)) => {
                        let arguments = ArgumentsReader::new(None, name.to_owned());
                        self.state = State::Arguments(arguments);
                    }
                    (Progress::More, _) => {}
                    _ => self.fail(sink),
                }
                return taken;
            }
            State::Arguments(arguments) => {
                let before = if is_v3 { FENCE } else { "" };
                let (taken, progress) = arguments.feed(text, before, sink);
                match progress {
                    Progress::More => {}
                    Progress::Wrong => self.fail(sink),
                    Progress::Done => {
                        let is_text = arguments.conclude(sink);
                        self.state = match is_text {
                            true => State::Text,
                            false => State::AfterArguments,
                        };
                    }
                }
                return taken;
            }
            State::AfterArguments if blank(text) > 0 => {
                sink.plain(&text[..blank(text)]);
                return blank(text);
            }
            State::AfterArguments if is_v3 && text.starts_with('`') => {
                sink.forget_whitespace();
                return 1;
            }
            State::AfterArguments => self.state = State::Between,
        }
        0
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        if matches!(&self.state, State::Arguments(arguments) if arguments.is_in_string()) {
            return false;
        }
        match self.format.marker(marker) {
            Some(Marker::SectionBegin) => {
                self.leave(sink);
                sink.open();
                sink.record(marker);
                self.state = State::Section;
            }
            Some(Marker::CallBegin) => {
                if !matches!(self.state, State::Section) {
                    self.leave(sink);
                    sink.open();
                }
                sink.record(marker);
                self.state = State::Head(NameReader::default());
            }
            Some(Marker::Separator) => {
                let is_taken = self.separator(sink);
                if is_taken {
                    sink.record(marker);
                }
                return is_taken;
            }
            Some(Marker::CallEnd) => return self.ending(marker, false, sink),
            Some(Marker::SectionEnd) => return self.ending(marker, true, sink),
            None => return false,
        }
        true
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, _sink: &mut Sink) {}
}

/// The form of calls.
pub(super) fn form(format: &Format, wanted: &CallsWanted<'_>) -> Result<TextForm, NoForm> {
    let [call_begin, call_end, separator, section_begin, section_end] =
        std::array::from_fn(|place| format.markers[place]);
    let between = match format.head {
        Head::TypeThenName => "\n",
        Head::Name | Head::Id => "",
    };
    let calls = wanted.calls([section_begin, between, section_end], |tool| {
        let name = bare_name(tool, &tool.name)?;
        Ok(match format.head {
            Head::TypeThenName => {
                let begin = format!("{call_begin}function{separator}{name}\n```json\n");
                json_call(tool, begin, &format!("\n```{call_end}"))
            }
            Head::Name => json_call(tool, format!("{call_begin}{name}{separator}"), call_end),
            Head::Id => CallForm {
                begin: format!("{call_begin}functions.{name}:"),
                // The number of the call, with which the id is unique.
                arguments: ArgumentsForm::Parts(vec![
                    FormPart::Regex("[0-9]{1,4}".into()),
                    FormPart::Text(separator.into()),
                    FormPart::JsonSchema(object_schema(&tool.parameters).to_string()),
                ]),
                end: call_end.into(),
            },
        })
    });
    Ok(TextForm::Calls(calls?))
}
