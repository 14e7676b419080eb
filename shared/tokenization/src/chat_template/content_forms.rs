//! How a template reads the content of messages: as one text, as a list of parts, or as either.
//!
//! Nothing in a model's files says so. A template that is given the wrong form prints the list as it would be written
//! in a program, or prints nothing. So each template renders a small chat in both forms once, at the start.

use minijinja::value::{Value, ValueKind};

use super::ChatTemplate;
use super::chat_input::ChatInput;
use super::template_input::{Shape, empty_object, variables};
use crate::JsonList;

/// The forms that the template reads, by role.
#[derive(Clone, Debug, Default)]
pub(super) struct ContentForms {
    /// Roles whose content may be a list of parts.
    parts: Vec<&'static str>,
    /// Roles whose content must be a list of parts.
    only_parts: Vec<&'static str>,
}

/// The user comes first, since the chats of the others have messages of the user.
const ROLES: [&str; 4] = ["user", "system", "assistant", "tool"];

/// Texts that no template writes by itself.
const SAMPLES: [&str; 2] = ["qvxzj", "wkqyv"];

impl ContentForms {
    /// Finds the forms by rendering.
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let mut forms = ContentForms::default();
        for role in ROLES {
            let parts = SAMPLES.map(part).to_vec();
            if forms.shows(template, role, Value::from(parts)) {
                forms.parts.push(role);
                if !forms.shows(template, role, Value::from(SAMPLES.concat())) {
                    forms.only_parts.push(role);
                }
            }
        }
        forms
    }

    /// Whether the template shows a content of a role, and nothing of how it is written.
    fn shows(&self, template: &ChatTemplate, role: &str, content: Value) -> bool {
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
        let variables = variables(
            &ChatInput::new(JsonList(messages), None, None),
            Shape::Filled,
            // The samples keep their forms.
            &ContentForms {
                parts: ROLES.to_vec(),
                only_parts: Vec::new(),
            },
        );
        let rendered = template.render_mapped(&variables, true, &mut |_| None);
        rendered.is_ok_and(|text| {
            SAMPLES.iter().all(|sample| text.contains(sample))
                && !["'type'", "\"type\"", "\\\"type"]
                    .iter()
                    .any(|sign| text.contains(sign))
        })
    }

    /// The content of a message in a form that the template reads. Where it reads no parts, their texts are joined by
    /// line ends.
    pub(super) fn apply(&self, role: &str, content: &Value) -> Value {
        let content = match content.kind() {
            ValueKind::Seq if self.parts.contains(&role) => return content.clone(),
            ValueKind::Seq => {
                let texts = content.try_iter().into_iter().flatten().filter_map(|part| {
                    let text = part.get_attr("text").ok()?;
                    text.as_str().map(str::to_owned)
                });
                Value::from(texts.collect::<Vec<_>>().join("\n"))
            }
            _ => content.clone(),
        };
        match content.as_str() {
            Some(text) if self.only_parts.contains(&role) => Value::from(vec![part(text)]),
            _ => content,
        }
    }
}

fn part(text: &str) -> Value {
    Value::from_pairs([("type", "text"), ("text", text)])
}

fn message(role: &str, content: Value) -> Value {
    Value::from_pairs([("role", Value::from(role)), ("content", content)])
}

/// A message of the model that calls a function.
fn calling(content: Value) -> Value {
    let function = Value::from_pairs([("name", Value::from("f")), ("arguments", empty_object())]);
    let call = Value::from_pairs([
        ("id", Value::from("call00001")),
        ("type", Value::from("function")),
        ("function", function),
    ]);
    Value::from_pairs([
        ("role", Value::from("assistant")),
        ("content", content),
        ("tool_calls", Value::from(vec![call])),
    ])
}
