//! Llama 3.2, Llama 4, ToolACE: a Python list of function calls.
//!
//! ```text
//! [get_weather(city="Oslo", days=2), get_time()]
//! <|python_start|>[get_weather(city="Oslo")]<|python_end|>
//! ```
//!
//! Without the markers, a list is one of calls only at the beginning of the text and with names of known tools. Many
//! ordinary answers begin with a bracket, so a list counts as a failed call only after the beginning of a known call.

use refrain_protocol::engine::{ArgumentsForm, CallForm, FormPart, TextForm};

use crate::family::{Family, blank};
use crate::form::{CallsWanted, NoForm, Parameter, Parameters, check_bytes, parameters, unmarked};
use crate::json::Progress;
use crate::options::Tool;
use crate::python::KeywordArguments;
use crate::sink::{NAME_BYTES_MAX, Sink};

const OPEN: &str = "<|python_start|>";
const CLOSE: &str = "<|python_end|>";

enum State {
    /// Only whitespace has come.
    Start,
    Text,
    /// After the opening marker.
    Opened,
    /// Before a call's name.
    Item,
    Name(String),
    Arguments(KeywordArguments, String),
    AfterCall,
    AfterList,
}

/// See the module's documentation.
pub(crate) struct Pythonic {
    state: State,
    is_marked: bool,
    /// Whether a call has begun, with the name of a known tool or after a marker.
    has_begun: bool,
}

impl Pythonic {
    pub(crate) fn new() -> Self {
        Pythonic {
            state: State::Start,
            is_marked: false,
            has_begun: false,
        }
    }

    /// Fails an attempt, if there is one.
    fn leave(&mut self, sink: &mut Sink) {
        if let State::Arguments(arguments, _) = &self.state {
            sink.unwritten(arguments.unwritten());
        }
        match self.is_marked || self.has_begun {
            true => {
                sink.fail();
            }
            false => sink.cancel(),
        }
        self.state = State::Text;
    }

    fn take(&mut self, text: &str, state: State, sink: &mut Sink) -> usize {
        sink.record(text);
        self.state = state;
        text.len()
    }
}

impl Family for Pythonic {
    fn markers(&self) -> &'static [&'static str] {
        &[OPEN, CLOSE]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let space = blank(text);
        let first = text.chars().next().unwrap_or_default();
        match &mut self.state {
            State::Start | State::AfterCall | State::AfterList if space > 0 => {
                sink.plain(&text[..space]);
                return space;
            }
            State::Opened | State::Item if space > 0 => {
                sink.record(&text[..space]);
                return space;
            }
            State::Start if first == '[' => {
                sink.open();
                return self.take(&text[..1], State::Item, sink);
            }
            State::Opened if first == '[' => return self.take(&text[..1], State::Item, sink),
            State::Item if first.is_alphabetic() || first == '_' => {
                self.state = State::Name(String::new());
            }
            State::AfterCall if first == ',' => {
                sink.open();
                return self.take(&text[..1], State::Item, sink);
            }
            State::AfterCall if first == ']' => {
                sink.forget_whitespace();
                self.state = State::AfterList;
                return 1;
            }
            State::Start | State::AfterCall | State::AfterList => self.state = State::Text,
            State::Text => {
                sink.plain(text);
                return text.len();
            }
            State::Name(name) => {
                let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
                if is_name(first) && name.len() < NAME_BYTES_MAX {
                    name.push(first);
                    let taken = first.len_utf8();
                    sink.record(&text[..taken]);
                    return taken;
                }
                let name = std::mem::take(name);
                if first == '(' && (self.is_marked || sink.knows(&name)) {
                    self.has_begun = true;
                    let arguments = KeywordArguments::new();
                    return self.take(&text[..1], State::Arguments(arguments, name), sink);
                }
                self.leave(sink);
            }
            State::Arguments(arguments, name) => {
                let (taken, progress) = arguments.feed_call(text, name, sink);
                match progress {
                    Progress::More => {}
                    Progress::Done => {
                        sink.end();
                        self.state = State::AfterCall;
                    }
                    Progress::Wrong => self.leave(sink),
                }
                return taken;
            }
            State::Opened | State::Item => self.leave(sink),
        }
        0
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        match &self.state {
            State::Arguments(arguments, _) if arguments.is_in_string() => false,
            _ if marker == OPEN => {
                self.leave(sink);
                self.is_marked = true;
                sink.open();
                sink.record(marker);
                self.state = State::Opened;
                true
            }
            State::AfterList if marker == CLOSE => {
                sink.forget_whitespace();
                true
            }
            _ => {
                self.leave(sink);
                false
            }
        }
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
    let calls = wanted.calls(["[", ", ", "]"], |tool| {
        Ok(CallForm {
            begin: format!("{}(", identifier(tool, &tool.name)?),
            arguments: ArgumentsForm::Parts(keywords(tool)?),
            end: ")".into(),
        })
    });
    Ok(unmarked(calls?, '['))
}

/// A name that Python can write.
fn identifier<'a>(tool: &Tool, name: &'a str) -> Result<&'a str, NoForm> {
    let mut characters = name.chars();
    let begins = characters
        .next()
        .is_some_and(|c| c.is_alphabetic() || c == '_');
    match begins && characters.all(|c| c.is_alphanumeric() || c == '_' || c == '.') {
        true => Ok(name),
        false => {
            let fault =
                "the model writes calls in Python, so names have only letters, digits and _";
            Err(NoForm::of(tool, fault))
        }
    }
}

/// Maximum number of parameters of a function that needs none of them. Each may be the first one, so their form is of
/// this size times itself.
const OPTIONAL_ONLY_MAX: usize = 64;

/// Keyword arguments: those that are required, then any of the others, in the order of the schema. Their values are
/// JSON, which is also Python here.
fn keywords(tool: &Tool) -> Result<Vec<FormPart>, NoForm> {
    let Parameters::Listed(listed) = parameters(tool)? else {
        let fault = "the model writes calls in Python, so the schema must list the properties";
        return Err(NoForm::of(tool, fault));
    };
    let part = |parameter: &Parameter, comma: &str| {
        let name = identifier(tool, &parameter.name)?;
        Ok(vec![
            FormPart::Text(format!("{comma}{name}=")),
            FormPart::JsonSchema(parameter.schema.to_string()),
        ])
    };
    let perhaps = |others: &[&Parameter]| -> Result<Vec<FormPart>, NoForm> {
        let part = |other: &&Parameter| Ok(FormPart::AnyOf(vec![part(other, ", ")?, Vec::new()]));
        others.iter().map(part).collect()
    };
    let (required, others): (Vec<&Parameter>, Vec<&Parameter>) =
        listed.iter().partition(|parameter| parameter.is_required);
    if required.is_empty() {
        // Each of them may be the first one, which has no comma before it.
        if others.len() > OPTIONAL_ONLY_MAX {
            let fault = format!(
                "a function that the model calls in Python has at most {OPTIONAL_ONLY_MAX} parameters if it needs \
                 none of them; name one of them in required"
            );
            return Err(NoForm::of(tool, fault));
        }
        let mut bytes = 0;
        for (at, other) in others.iter().enumerate() {
            bytes += (at + 1) * other.schema.to_string().len();
            check_bytes(tool, bytes)?;
        }
        let mut firsts = vec![Vec::new()];
        for (at, first) in others.iter().enumerate() {
            let mut parts = part(first, "")?;
            parts.extend(perhaps(&others[at + 1..])?);
            firsts.push(parts);
        }
        return Ok(vec![FormPart::AnyOf(firsts)]);
    }
    let mut parts = Vec::new();
    for (at, parameter) in required.into_iter().enumerate() {
        parts.extend(part(parameter, if at == 0 { "" } else { ", " })?);
    }
    parts.extend(perhaps(&others)?);
    Ok(parts)
}
