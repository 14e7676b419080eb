//! Harmony, the format of gpt-oss: messages with a channel, where reasoning and calls are messages as well.
//!
//! ```text
//! <|channel|>analysis<|message|>The user asks …<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"days": 2}<|call|>
//! <|start|>assistant<|channel|>final<|message|>It is cold.<|return|>
//! ```
//!
//! The channel `analysis` is reasoning, and all others are text. A message with a recipient is a call; its name is
//! the recipient without `functions.`.

use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, FormPart, TextForm};
use serde_json::json;

use crate::family::Family;
use crate::form::{CallsWanted, NoForm, bare_name, object_schema};
use crate::json::Progress;
use crate::name::ArgumentsReader;
use crate::sink::{Sink, is_name};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// Longest header of a message.
const HEADER_BYTES_MAX: usize = 1024;
/// The part of a header that names the recipient.
const RECIPIENT: &str = "to=";

#[derive(Default)]
struct Header {
    /// Role and recipient before the channel.
    role: String,
    /// Channel, recipient and content type. It is `None` before the channel's marker.
    channel: Option<String>,
}

impl Header {
    /// The recipient, which stands in either part.
    fn recipient(&self) -> Option<&str> {
        let parts = [Some(self.role.as_str()), self.channel.as_deref()];
        let words = parts.into_iter().flatten().flat_map(str::split_whitespace);
        words.filter_map(|word| word.strip_prefix(RECIPIENT)).next()
    }

    fn is_analysis(&self) -> bool {
        let channel = self.channel.as_deref().unwrap_or_default();
        channel.split_whitespace().next() == Some("analysis")
    }

    fn len(&self) -> usize {
        self.role.len() + self.channel.as_ref().map_or(0, String::len)
    }
}

enum State {
    /// The prompt ended within a header, after the role. A recipient may follow.
    Start(String),
    Text,
    Header(Header),
    Reasoning,
    Arguments(ArgumentsReader),
    /// After a call's arguments.
    After,
}

/// See the module's documentation.
pub(crate) struct Harmony {
    state: State,
}

impl Harmony {
    pub(crate) fn new() -> Self {
        Harmony {
            state: State::Start(String::new()),
        }
    }

    fn fail(&mut self, sink: &mut Sink) {
        sink.fail();
        self.state = State::Text;
    }

    /// A header has ended.
    fn message(&mut self, header: &Header, sink: &mut Sink) {
        match header.recipient() {
            Some(recipient) => {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                if is_name(name) {
                    sink.record(MESSAGE);
                    self.state = State::Arguments(ArgumentsReader::new(None, name.to_owned()));
                } else {
                    sink.record(MESSAGE);
                    self.fail(sink);
                }
            }
            None => {
                sink.discard();
                self.state = match header.is_analysis() {
                    true => State::Reasoning,
                    false => State::Text,
                };
            }
        }
    }

    fn begin_header(&mut self, marker: &str, role: String, sink: &mut Sink) {
        sink.record(marker);
        let channel = (marker == CHANNEL).then(String::new);
        self.state = State::Header(Header { role, channel });
    }

    /// Leaves a call at the end of its message.
    fn leave(&mut self, sink: &mut Sink) {
        match &mut self.state {
            State::Arguments(arguments) if !arguments.has_begun() => arguments.end_empty(sink),
            State::Arguments(_) => {
                sink.fail();
            }
            _ => {}
        }
    }
}

impl Family for Harmony {
    fn markers(&self) -> &'static [&'static str] {
        &[START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        let next = text.chars().next().unwrap_or_default();
        let length = next.len_utf8();
        match &mut self.state {
            State::Start(role) => {
                let word = role.trim_start();
                let is_role = match word.len() {
                    0 if next.is_whitespace() => true,
                    begun if begun < RECIPIENT.len() => {
                        RECIPIENT.get(begun..begun + 1) == Some(&text[..length])
                    }
                    _ => true,
                };
                if role.is_empty() {
                    sink.open();
                }
                if !is_role || role.len() + length > HEADER_BYTES_MAX {
                    match word.is_empty() {
                        true => self.not_begun(sink),
                        false => self.fail(sink),
                    }
                    return 0;
                }
                role.push(next);
                sink.record(&text[..length]);
                length
            }
            State::Text => {
                sink.plain(text);
                text.len()
            }
            State::Reasoning => {
                sink.reasoning(text);
                text.len()
            }
            State::Header(header) => {
                if header.len() + length > HEADER_BYTES_MAX {
                    self.fail(sink);
                    return 0;
                }
                let Header { role, channel } = header;
                channel.as_mut().unwrap_or(role).push(next);
                sink.record(&text[..length]);
                length
            }
            State::Arguments(arguments) => {
                let (taken, progress) = arguments.feed(text, "", sink);
                match progress {
                    Progress::More => {}
                    Progress::Wrong => self.fail(sink),
                    Progress::Done => {
                        let is_text = arguments.conclude(sink);
                        self.state = if is_text { State::Text } else { State::After };
                    }
                }
                taken
            }
            State::After => {
                sink.plain(text);
                text.len()
            }
        }
    }

    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        match (&mut self.state, marker) {
            (State::Arguments(arguments), _) if arguments.is_in_string() => return false,
            (State::Start(role), CHANNEL | START | MESSAGE) => {
                let role = std::mem::take(role);
                if role.is_empty() {
                    sink.open();
                }
                if marker == MESSAGE {
                    let header = Header {
                        role,
                        channel: None,
                    };
                    self.message(&header, sink);
                } else {
                    self.begin_header(marker, role, sink);
                }
            }
            (State::Start(role), _) => {
                match role.trim_start().is_empty() {
                    true => self.not_begun(sink),
                    false => self.fail(sink),
                }
                return false;
            }
            (State::Header(header), CHANNEL) if header.channel.is_none() => {
                header.channel = Some(String::new());
                sink.record(marker);
            }
            (State::Header(header), CONSTRAIN) => {
                let Header { role, channel } = header;
                channel.as_mut().unwrap_or(role).push(' ');
                sink.record(marker);
            }
            (State::Header(header), MESSAGE) => {
                let header = std::mem::take(header);
                self.message(&header, sink);
            }
            (State::Header(_), START | CHANNEL) => {
                self.fail(sink);
                sink.open();
                self.begin_header(marker, String::new(), sink);
            }
            (State::Header(_), _) => {
                sink.record(marker);
                self.fail(sink);
            }
            (State::Reasoning, CONSTRAIN | MESSAGE) => sink.reasoning(marker),
            (State::Text | State::After, CONSTRAIN | MESSAGE) => return false,
            (_, START | CHANNEL) => {
                self.leave(sink);
                sink.open();
                self.begin_header(marker, String::new(), sink);
            }
            (_, END | CALL | RETURN) => {
                self.leave(sink);
                sink.forget_whitespace();
                self.state = State::Text;
            }
            _ => {
                self.fail(sink);
                return false;
            }
        }
        true
    }

    fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    fn give_up(&mut self) {
        self.state = State::Text;
    }

    fn finish(&mut self, sink: &mut Sink) {
        if matches!(&self.state, State::Start(role) if role.trim_start().is_empty()) {
            self.not_begun(sink);
        }
    }
}

impl Harmony {
    /// The output is not a header, and only whitespace was held for it.
    fn not_begun(&mut self, sink: &mut Sink) {
        sink.cancel();
        self.state = State::Text;
    }
}

/// The beginning of a message after reasoning, or at the end of the prompt. There the model may reason first, in a
/// message that is a part of the form: free text before the form could be an answer as well.
fn head(after_reasoning: bool) -> Vec<FormPart> {
    if after_reasoning {
        return vec![FormPart::Text(format!("{START}assistant"))];
    }
    let markers = [START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN];
    let analysis = vec![
        FormPart::Text(format!("{CHANNEL}analysis{MESSAGE}")),
        FormPart::TextWithout(markers.map(String::from).into()),
        FormPart::Text(format!("{END}{START}assistant")),
    ];
    vec![FormPart::AnyOf(vec![analysis, Vec::new()])]
}

/// A message with this header, after its channel's marker, and this content.
fn message(header: &str, content: FormPart, after_reasoning: bool) -> CallForm {
    let mut parts = head(after_reasoning);
    parts.push(FormPart::Text(format!("{CHANNEL}{header}{MESSAGE}")));
    parts.push(content);
    CallForm {
        begin: String::new(),
        arguments: ArgumentsForm::Parts(parts),
        end: String::new(),
    }
}

/// The form of calls. A call ends the output, so there is one.
pub(super) fn form(wanted: &CallsWanted<'_>) -> Result<TextForm, NoForm> {
    let mut calls = wanted.calls(["", "", ""], |tool| {
        let name = bare_name(tool, &tool.name)?;
        let header = format!("commentary to=functions.{name} {CONSTRAIN}json");
        let schema = object_schema(&tool.parameters).to_string();
        let content = FormPart::JsonSchema(schema);
        Ok(message(&header, content, wanted.after_reasoning))
    })?;
    if wanted.optional {
        let answer = FormPart::TextWithout(Vec::new());
        calls
            .calls
            .push(message("final", answer, wanted.after_reasoning));
    }
    Ok(TextForm::Calls(CallsForm {
        optional: false,
        parallel: false,
        ..calls
    }))
}

/// The form of an answer, as a message to the user.
pub(crate) fn answer_form(text: TextForm, after_reasoning: bool) -> Result<TextForm, NoForm> {
    let content = match text {
        TextForm::JsonObject => FormPart::JsonSchema(json!({"type": "object"}).to_string()),
        TextForm::JsonSchema(schema) => FormPart::JsonSchema(schema),
        TextForm::Regex(pattern) => FormPart::Regex(pattern),
        TextForm::Choice(texts) => {
            let texts = texts.into_iter().map(|text| vec![FormPart::Text(text)]);
            FormPart::AnyOf(texts.collect())
        }
        TextForm::Lark(_) | TextForm::Ebnf(_) | TextForm::Calls(_) | TextForm::AnyOf(_) => {
            return Err(NoForm {
                tool: None,
                fault: "a grammar is not supported with this model, whose answers have a head of their own".into(),
            });
        }
    };
    Ok(TextForm::Calls(CallsForm {
        optional: false,
        parallel: false,
        begin: String::new(),
        separator: String::new(),
        end: String::new(),
        calls: vec![message("final", content, after_reasoning)],
    }))
}
