//! How a template reads the content of messages: as one text, as a list of parts, or as either.
//!
//! Nothing in a model's files says so. A template that is given the wrong form prints the list as it would be written
//! in a program, or prints nothing. So each template renders a small chat in both forms once, at the start.

use minijinja::value::{Value, ValueKind};

/// Renders messages as they are. `None` if the template fails.
pub(super) type Render<'a> = dyn Fn(Vec<Value>) -> Option<String> + 'a;

/// The form in which a template reads the content of a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// One text.
    #[default]
    Text,
    /// One text or a list of parts.
    Either,
    /// A list of parts.
    Parts,
    /// A list of which the template reads one part.
    OnePart,
}

/// The forms that the template reads, by role.
#[derive(Clone, Debug, Default)]
pub(super) struct ContentForms([Form; ROLES.len()]);

/// The user comes first, since the chats of the others have messages of the user.
const ROLES: [&str; 4] = ["user", "system", "assistant", "tool"];

/// Texts that no template writes by itself.
pub(super) const SAMPLES: [&str; 2] = ["qvxzj", "wkqyv"];

/// The id of the sample's call. Mistral's templates want nine characters.
const CALL_ID: &str = "call00001";

/// The function that the sample calls.
const FUNCTION: &str = "f";

impl ContentForms {
    /// The forms with which every content stays as it is.
    pub(super) fn unchanged() -> Self {
        ContentForms([Form::Either; ROLES.len()])
    }

    /// Finds the forms by rendering.
    pub(super) fn of(render: &Render<'_>) -> Self {
        let mut forms = ContentForms::default();
        for (at, role) in ROLES.into_iter().enumerate() {
            let shows = |content| forms.shows(render, role, content);
            let two_parts = shows(Value::from(SAMPLES.map(part).to_vec()));
            let text = shows(Value::from(SAMPLES.concat()));
            let form = match (two_parts, text) {
                (true, true) => Form::Either,
                (true, false) => Form::Parts,
                (false, true) => Form::Text,
                (false, false) => match shows(Value::from(vec![part(&SAMPLES.concat())])) {
                    true => Form::OnePart,
                    false => Form::Text,
                },
            };
            forms.0[at] = form;
        }
        forms
    }

    /// Whether the template shows a content of a role, and nothing of how it is written.
    fn shows(&self, render: &Render<'_>, role: &str, content: Value) -> bool {
        let filler = |role| message(role, self.apply(role, &Value::from("x")));
        let content = message(role, content);
        let messages = match role {
            "system" => vec![content, filler("user")],
            "user" => vec![content],
            "assistant" => vec![filler("user"), content, filler("user")],
            _ => {
                let empty = self.apply("assistant", &Value::from(""));
                vec![filler("user"), calling(empty), content]
            }
        };
        render(messages).is_some_and(|text| {
            SAMPLES.iter().all(|sample| text.contains(sample))
                && !["'type'", "\"type\"", "\\\"type"]
                    .iter()
                    .any(|sign| text.contains(sign))
        })
    }

    /// The form that the template reads for a role.
    fn form(&self, role: &str) -> Form {
        let known = match role {
            "developer" => "system",
            "function" => "tool",
            role => role,
        };
        let at = ROLES.iter().position(|role| *role == known);
        at.map_or(Form::Text, |at| self.0[at])
    }

    /// Whether a content that is one text stays as it is.
    pub(super) fn keeps_text(&self, role: &str) -> bool {
        matches!(self.form(role), Form::Text | Form::Either)
    }

    /// The content of a message in the form that the template reads. Where it reads one text, the texts of parts are
    /// joined by line ends.
    pub(super) fn apply(&self, role: &str, content: &Value) -> Value {
        let form = self.form(role);
        let is_list = content.kind() == ValueKind::Seq;
        if !is_list && content.as_str().is_none() {
            return content.clone();
        }
        match form {
            Form::Text if is_list => Value::from(joined(content)),
            Form::OnePart if is_list => Value::from(vec![part(&joined(content))]),
            Form::Parts | Form::OnePart if !is_list => {
                Value::from(vec![part(content.as_str().unwrap_or_default())])
            }
            _ if is_list => {
                let parts = content.try_iter().into_iter().flatten();
                parts.map(refusal_as_text).collect()
            }
            _ => content.clone(),
        }
    }
}

/// A part as templates know it: they have no place for refusals.
fn refusal_as_text(each: Value) -> Value {
    match each.get_attr("refusal") {
        Ok(refusal) if refusal.as_str().is_some() => part(refusal.as_str().unwrap_or_default()),
        _ => each,
    }
}

/// The text of a part. A refusal comes back as one in the history that clients send.
fn text_of(part: &Value) -> Option<String> {
    let field = |name| Some(part.get_attr(name).ok()?.as_str()?.to_owned());
    field("text").or_else(|| field("refusal"))
}

/// The texts of a list of parts.
pub(super) fn joined(parts: &Value) -> String {
    let texts = parts.try_iter().into_iter().flatten();
    let texts = texts.filter_map(|part| text_of(&part));
    texts.collect::<Vec<_>>().join("\n")
}

pub(super) fn part(text: &str) -> Value {
    Value::from_pairs([("type", "text"), ("text", text)])
}

/// A message of a role. The result of a tool names the call of [`calling`], since some templates look for it.
pub(super) fn message(role: &str, content: Value) -> Value {
    let fields = [("role", Value::from(role)), ("content", content)];
    let called = [("tool_call_id", CALL_ID), ("name", FUNCTION)];
    let called = called.map(|(name, value)| (name, Value::from(value)));
    let called = called.into_iter().filter(|_| role == "tool");
    Value::from_pairs(fields.into_iter().chain(called))
}

/// A message of the model that calls a function.
pub(super) fn calling(content: Value) -> Value {
    let function = Value::from_pairs([
        ("name", Value::from(FUNCTION)),
        ("arguments", Value::from_pairs(Vec::<(Value, Value)>::new())),
    ]);
    let call = Value::from_pairs([
        ("id", Value::from(CALL_ID)),
        ("type", Value::from("function")),
        ("function", function),
    ]);
    Value::from_pairs([
        ("role", Value::from("assistant")),
        ("content", content),
        ("tool_calls", Value::from(vec![call])),
    ])
}
