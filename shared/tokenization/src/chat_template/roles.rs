//! Which messages a template shows, by role and place, and the arrangement of a chat in which all are shown.
//!
//! Templates know few roles. One that does not know `developer` leaves such a message out without a word, and one
//! that wants a single system message at the beginning keeps the last of several, or fails. So each template renders
//! small chats at the start. Where a message would be lost or refused, it is carried to where its text is shown:
//!
//! * Leading messages of the system and of developers become one system message.
//! * Later ones become messages of the user in their place, so that the prompt's beginning stays as it was. Hoisting
//!   them into the first message was rejected: each one would change the head, and with it all cached prefixes.
//! * A system message, or the result of a tool, that a template shows nowhere becomes a message of the user.
//! * Messages of the user that follow one another are joined where the template wants turns to alternate.
//! * Text beside calls gets a message of its own where the template shows only the calls.
//!
//! Whatever the samples did not tell is seen when a prompt is rendered: [`lost_role`] finds a text that is missing.

use minijinja::value::{Value, ValueKind};

use super::content_forms::{ContentForms, Render, SAMPLES, calling, joined, message, part};
use super::template_input::pairs;
use crate::JsonValue;

/// The kinds of messages that a template shows as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ShownRoles {
    /// A system message at the beginning.
    system: bool,
    /// A developer message at the beginning.
    developer: bool,
    /// Several messages at the beginning, of the system and of developers.
    several: bool,
    /// A system message behind other messages.
    late_system: bool,
    /// A developer message behind other messages.
    late_developer: bool,
    /// Messages of the user that follow one another.
    users: bool,
    /// The result of a tool.
    tool: bool,
    /// Text of the model beside its calls.
    beside_calls: bool,
}

impl ShownRoles {
    /// Finds out by rendering what the template shows. `None` if it does not even show a message of the user, so that
    /// nothing can be carried anywhere.
    pub(super) fn of(render: &Render<'_>, forms: &ContentForms) -> Option<Self> {
        let say = |role: &str, text: &str| message(role, forms.apply(role, &Value::from(text)));
        let call = |text: &str| calling(forms.apply("assistant", &Value::from(text)));
        let shows = |messages: Vec<Value>| {
            let texts = messages.iter().filter_map(text_of).collect::<Vec<_>>();
            render(messages).is_some_and(|prompt| texts.iter().all(|text| prompt.contains(text)))
        };
        let [one, other] = SAMPLES;
        let user = || say("user", "pzqyk");
        let answer = || say("assistant", "jvwxq");
        let is_late = |role: &str| {
            shows(vec![user(), say(role, one)])
                && shows(vec![say("system", other), user(), say(role, one)])
                && shows(vec![user(), say(role, one), answer(), user()])
                && shows(vec![user(), answer(), say(role, one), user()])
        };
        let is_leading = |roles: [&str; 2]| {
            let [first, second] = roles;
            shows(vec![say(first, one), say(second, other), user()])
        };
        let ends = |messages: Vec<Value>| {
            let goes_on = [messages.clone(), vec![answer(), user()]].concat();
            shows(messages) && shows(goes_on)
        };
        if !shows(vec![user()]) {
            return None;
        }
        let system = shows(vec![say("system", one), user()]);
        let developer = shows(vec![say("developer", one), user()]);
        Some(ShownRoles {
            system,
            developer,
            several: is_leading(["system", "system"])
                && (!developer || is_leading(["system", "developer"])),
            late_system: is_late("system"),
            late_developer: is_late("developer"),
            users: shows(vec![user(), say("user", one)]),
            tool: ends(vec![user(), call(""), say("tool", one)]),
            beside_calls: ends(vec![user(), call(one), say("tool", other)]),
        })
    }

    /// The arrangements to try for a chat, one after the other: what the samples told, then what nearly every
    /// template shows, then nothing but turns of the user and of the model.
    pub(super) fn attempts(self) -> [Self; 3] {
        let (system, tool) = (self.system, self.tool);
        let nothing = ShownRoles::default();
        let usual = ShownRoles {
            system,
            tool,
            ..nothing
        };
        [self, usual, nothing]
    }

    /// The messages as the template shows them; `None` if they can stay as they are.
    pub(super) fn arrange(self, messages: &[Value]) -> Option<Vec<Value>> {
        let mut arranged: Vec<Value> = Vec::new();
        let mut is_changed = false;
        let mut is_leading = true;
        for message in messages {
            let given = role_of(message);
            is_leading = is_leading && is_instruction(&given);
            let role = self.role(&given, is_leading);
            let (one, more) = match self.splits(message, role) {
                true => {
                    let (text, calls) = apart(message);
                    (text, Some(calls))
                }
                false if role == given => (message.clone(), None),
                false => (with_field(message, "role", Value::from(role)), None),
            };
            is_changed |= more.is_some() || role != given;
            let last = arranged.last();
            let last_role = last.map(role_of).unwrap_or_default();
            let is_joined = match role {
                "user" => last_role == "user" && !self.users,
                _ => is_leading && last.is_some() && !self.several,
            };
            match arranged.last_mut().filter(|_| is_joined) {
                Some(last) => {
                    *last = with_field(last, "content", together(last, &one));
                    is_changed = true;
                }
                None => arranged.push(one),
            }
            arranged.extend(more);
        }
        is_changed.then_some(arranged)
    }

    /// The role under which the template shows a message of this role.
    fn role(self, given: &str, is_leading: bool) -> &str {
        let (system, developer) = match is_leading {
            true => (self.system, self.developer),
            false => (self.late_system, self.late_developer),
        };
        match given {
            "developer" if developer && (self.several || !is_leading) => given,
            "developer" | "system" if system => "system",
            "developer" if developer => given,
            "system" if is_leading && developer => "developer",
            "developer" | "system" => "user",
            "tool" | "function" if !self.tool => "user",
            given => given,
        }
    }

    /// Whether the text of a message must stand apart from its calls.
    fn splits(self, message: &Value, role: &str) -> bool {
        let calls = field(message, "tool_calls");
        role == "assistant"
            && !self.beside_calls
            && calls.is_some_and(|calls| calls.len().is_some_and(|count| count > 0))
            && text_of(message).is_some_and(|text| !text.trim().is_empty())
    }
}

/// The role of a text that a prompt does not show. Only [`SEARCHES_MAX`] times the prompt is searched, so that no
/// chat makes this slow; messages behind that count as shown.
///
/// Templates trim texts, write them as JSON, and cut reasoning and switches such as `/no_think` out of them. So a
/// text is shown if the letters of one of its lines are.
pub(super) fn lost_role(messages: &Value, prompt: &str) -> Option<String> {
    let mut search = Search {
        prompt,
        letters: None,
        from: 0,
        bytes_left: prompt.len().saturating_mul(SEARCHES_MAX),
    };
    let mut messages = messages.try_iter().into_iter().flatten();
    let lost = messages.find(|message| {
        let role = role_of(message);
        let text = text_of(message).unwrap_or_default();
        let text = match role.as_str() {
            // Templates cut reasoning of earlier turns, which ends in one of these ways.
            "assistant" => text.rsplit("</think>").next().unwrap_or_default(),
            _ => &text,
        };
        let is_switch = text.starts_with('/') && !text.contains(char::is_whitespace);
        let is_reasoning = role == "assistant" && (text.contains("<|") || text.contains("[THINK"));
        !is_switch && !is_reasoning && !search.finds(text.trim())
    });
    lost.map(|message| role_of(&message))
}

/// How often a prompt is searched through for the texts of its messages.
const SEARCHES_MAX: usize = 32;

/// A line with fewer letters may be in a prompt by chance.
const LETTERS_MIN: usize = 4;

/// A prompt that is searched for texts, which mostly follow one another in it.
struct Search<'a> {
    prompt: &'a str,
    /// The letters of the prompt, once they were needed.
    letters: Option<String>,
    /// The end of the last text that was found.
    from: usize,
    bytes_left: usize,
}

impl Search<'_> {
    fn finds(&mut self, text: &str) -> bool {
        if text.is_empty() || self.bytes_left == 0 {
            return true;
        }
        let rest = self.prompt.get(self.from..).unwrap_or_default();
        if let Some(place) = rest.find(text) {
            self.spend(place);
            self.from += place + text.len();
            return true;
        }
        self.spend(rest.len());
        let lines: Vec<String> = text.lines().map(letters).collect();
        let longest = lines.iter().map(String::len).max().unwrap_or_default();
        let mut telling = (lines.iter()).filter(|line| line.len() >= longest.min(LETTERS_MIN));
        let prompt = self.prompt;
        let all = self.letters.get_or_insert_with(|| letters(prompt));
        let bytes_left = &mut self.bytes_left;
        telling.any(|line| {
            *bytes_left = bytes_left.saturating_sub(all.len());
            *bytes_left == 0 || all.contains(line)
        })
    }

    fn spend(&mut self, bytes: usize) {
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
    }
}

fn letters(text: &str) -> String {
    text.chars().filter(|one| one.is_alphanumeric()).collect()
}

/// Whether a role gives the model its instructions.
fn is_instruction(role: &str) -> bool {
    matches!(role, "system" | "developer")
}

fn field(message: &Value, name: &str) -> Option<Value> {
    let value = message.get_attr(name).ok()?;
    (!value.is_undefined() && !value.is_none()).then_some(value)
}

fn role_of(message: &Value) -> String {
    let role = field(message, "role");
    role.and_then(|role| role.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// The text of a message; `None` if it has no content.
fn text_of(message: &Value) -> Option<String> {
    let content = field(message, "content")?;
    match content.kind() {
        ValueKind::Seq => Some(joined(&content)),
        _ => content.as_str().map(str::to_owned),
    }
}

/// A message with another value of a field.
fn with_field(message: &Value, name: &str, value: Value) -> Value {
    JsonValue(message.clone()).with(name, JsonValue(value)).0
}

/// The contents of two messages as one. Two texts have an empty line between them.
fn together(first: &Value, second: &Value) -> Value {
    let contents = [first, second].map(|message| field(message, "content").unwrap_or_default());
    if let [Some(first), Some(second)] = contents.each_ref().map(|content| content.as_str()) {
        return Value::from(format!("{first}\n\n{second}"));
    }
    let parts = contents.iter().flat_map(|content| match content.as_str() {
        Some(text) => vec![part(text)],
        None => content.try_iter().into_iter().flatten().collect(),
    });
    parts.collect()
}

/// A message of the model as one with its text, and one with its calls.
fn apart(message: &Value) -> (Value, Value) {
    let mut text = pairs(message);
    text.retain(|(name, _)| name.as_str() != Some("tool_calls"));
    let mut calls = pairs(message);
    // The reasoning came before the text.
    calls.retain(|(name, _)| matches!(name.as_str(), Some("role" | "content" | "tool_calls")));
    let calls = with_field(&Value::from_pairs(calls), "content", Value::from(""));
    (Value::from_pairs(text), calls)
}
