//! A chat in the shape that templates expect.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::value::{Value, ValueKind};

use super::chat_input::ChatInput;
use super::content_forms::ContentForms;
use super::older_fields::renew;
use crate::TokenizationError;

/// The shape of messages. A template that fails with one shape may do with the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shape {
    /// As transformers has it: fields that are null are left out, and the arguments of calls are objects.
    Usual,
    /// Content that is missing is the empty text, since templates join it to others, and parameters that are missing
    /// are an empty object.
    Filled,
    /// The arguments of calls are JSON text as well, since templates join them to others.
    TextArguments,
}

impl Shape {
    pub(super) const ALL: [Shape; 3] = [Shape::Usual, Shape::Filled, Shape::TextArguments];
}

/// Names under which clients send reasoning. The first is the one that most templates read.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Replaces strings of the input. `None` keeps a string without copying it.
pub(super) type StringMap<'a> = dyn FnMut(&str) -> Option<String> + 'a;

/// The variables that a template gets from the input, with its messages as they were arranged. Texts are shared with
/// the input, not copied.
pub(super) fn variables(
    input: &ChatInput,
    messages: &[Value],
    shape: Shape,
    forms: &ContentForms,
) -> BTreeMap<String, Value> {
    let kwargs = input.kwargs.iter().flat_map(|kwargs| kwargs.0.clone());
    let mut variables: BTreeMap<String, Value> = kwargs.collect();
    let messages = messages
        .iter()
        .map(|message| normal_message(message, shape, forms));
    variables.insert("messages".into(), messages.collect());
    // Without tools, templates expect `none`.
    let tools = input.tools.as_ref().filter(|tools| !tools.is_empty());
    let tools = tools.map(|tools| {
        tools
            .0
            .iter()
            .map(|tool| normal_tool(tool, shape))
            .collect()
    });
    variables.insert("tools".into(), tools.unwrap_or_else(|| Value::from(())));
    variables
}

/// Appends to the content of the last message.
pub(super) fn append_to_last_message(
    variables: &mut BTreeMap<String, Value>,
    end: &str,
) -> Result<(), TokenizationError> {
    let messages = variables.get("messages").map(Value::try_iter);
    let mut messages: Vec<Value> = messages.into_iter().flatten().flatten().collect();
    let Some(last) = messages.last_mut() else {
        return Err(TokenizationError::Input(
            "there is no message to continue".into(),
        ));
    };
    let mut fields = pairs(last);
    for (name, value) in &mut fields {
        if name.as_str() == Some("content") {
            *value = appended(value, end);
        }
    }
    *last = Value::from_pairs(fields);
    variables.insert("messages".into(), messages.into_iter().collect());
    Ok(())
}

/// A content with more text at its end.
fn appended(content: &Value, end: &str) -> Value {
    if let Some(text) = content.as_str() {
        return Value::from(format!("{text}{end}"));
    }
    let mut parts: Vec<Value> = content.try_iter().into_iter().flatten().collect();
    if let Some(last) = parts.last_mut() {
        let fields =
            pairs(last)
                .into_iter()
                .map(|(name, value)| match (name.as_str(), value.as_str()) {
                    (Some("text"), Some(text)) => (name, Value::from(format!("{text}{end}"))),
                    _ => (name, value),
                });
        *last = Value::from_pairs(fields);
    }
    parts.into_iter().collect()
}

/// A private-use character that none of the strings contains.
pub(super) fn unused_character<'a>(
    values: impl Iterator<Item = &'a Value>,
) -> Result<char, TokenizationError> {
    let mut used = BTreeSet::new();
    let mut note = |text: &str| {
        used.extend(text.chars().filter(|character| *character >= '\u{F0000}'));
        None
    };
    for value in values {
        map_strings(value, &mut note);
    }
    ('\u{F0000}'..='\u{10FFFD}')
        .find(|character| !used.contains(character))
        .ok_or_else(|| {
            TokenizationError::Input(
                "the messages contain every private-use character; remove some of them".into(),
            )
        })
}

/// A message as templates expect it. Fields that are null are left out. Content has the form that the template reads,
/// and reasoning has the names that templates know.
fn normal_message(message: &Value, shape: Shape, forms: &ContentForms) -> Value {
    if is_plain(message, forms) {
        return message.clone();
    }
    let mut fields = pairs(message);
    renew(&mut fields);
    fields.retain(|(_, value)| !value.is_none());
    let field = |name: &str| {
        let found = fields.iter().find(|(key, _)| key.as_str() == Some(name));
        found.map(|(_, value)| value.clone())
    };
    let role = field("role").unwrap_or_default();
    let mut further = Vec::new();
    if field("content").is_none() && shape >= Shape::Filled {
        let role = role.as_str().unwrap_or_default();
        further.push(("content", forms.apply(role, &Value::from(""))));
    }
    if let Some(reasoning) = REASONING.iter().find_map(|name| field(name)) {
        // The template of gpt-oss reads `thinking`.
        for name in ["reasoning_content", "thinking"] {
            if field(name).is_none() {
                further.push((name, reasoning.clone()));
            }
        }
    }
    for (name, value) in &mut fields {
        match name.as_str() {
            Some("content") => *value = forms.apply(role.as_str().unwrap_or_default(), value),
            Some("tool_calls") if value.kind() == ValueKind::Seq => {
                let calls = value.try_iter().into_iter().flatten();
                *value = calls.map(|call| normal_call(&call, shape)).collect();
            }
            _ => {}
        }
    }
    fields.extend(
        further
            .into_iter()
            .map(|(name, value)| (Value::from(name), value)),
    );
    Value::from_pairs(fields)
}

/// Whether a message has a role and one text, as most have, and stays as it is in every shape.
fn is_plain(message: &Value, forms: &ContentForms) -> bool {
    let object = message.as_object();
    if message.kind() != ValueKind::Map || message.len() != Some(2) {
        return false;
    }
    let text = |name: &str| object?.get_value(&Value::from(name));
    let (Some(role), Some(content)) = (text("role"), text("content")) else {
        return false;
    };
    let role = role.as_str();
    content.as_str().is_some()
        && role.is_some_and(|role| role != "function" && forms.keeps_text(role))
}

/// A call whose arguments have the shape that the template reads. Most templates read an object. Text is the
/// client's own words, so the prompt repeats what the model had said.
fn normal_call(call: &Value, shape: Shape) -> Value {
    let arguments = |value: Value| match value.as_str() {
        _ if shape == Shape::TextArguments => value,
        // Clients say so that there are none.
        Some(text) if text.trim().is_empty() => empty_object(),
        Some(text) => {
            let parsed = serde_json::from_str::<crate::JsonValue>(text).ok();
            let object = parsed.filter(crate::JsonValue::is_object);
            object.map_or(value, |object| object.0)
        }
        None => value,
    };
    let function =
        |function: &Value| {
            Value::from_pairs(pairs(function).into_iter().map(
                |(name, value)| match name.as_str() {
                    Some("arguments") => (name, arguments(value)),
                    _ => (name, value),
                },
            ))
        };
    Value::from_pairs(
        pairs(call)
            .into_iter()
            .map(|(name, value)| match name.as_str() {
                Some("function") => (name, function(&value)),
                _ => (name, value),
            }),
    )
}

fn empty_object() -> Value {
    Value::from_pairs(Vec::<(Value, Value)>::new())
}

/// A tool, with parameters where the shape asks for them. Clients may leave them out.
fn normal_tool(tool: &Value, shape: Shape) -> Value {
    let function = tool.get_attr("function").unwrap_or_default();
    let mut described = pairs(&function);
    let parameters = function.get_attr("parameters").unwrap_or_default();
    if shape == Shape::Usual
        || described.is_empty()
        || !(parameters.is_none() || parameters.is_undefined())
    {
        return tool.clone();
    }
    described.retain(|(name, _)| name.as_str() != Some("parameters"));
    described.push((Value::from("parameters"), empty_object()));
    let fields = pairs(tool)
        .into_iter()
        .map(|(name, value)| match name.as_str() {
            Some("function") => (name, Value::from_pairs(described.clone())),
            _ => (name, value),
        });
    Value::from_pairs(fields)
}

/// The keys and values of an object, or nothing if the value is no object.
pub(super) fn pairs(map: &Value) -> Vec<(Value, Value)> {
    if map.kind() != ValueKind::Map {
        return Vec::new();
    }
    let pairs = map.as_object().and_then(|object| object.try_iter_pairs());
    pairs.into_iter().flatten().collect()
}

/// Whether `test` holds for a string of a value, or for a key in it.
pub(super) fn any_string(value: &Value, test: &mut dyn FnMut(&str) -> bool) -> bool {
    match value.kind() {
        ValueKind::String => test(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let mut items = value.try_iter().into_iter().flatten();
            items.any(|item| any_string(&item, test))
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
            let mut pairs = pairs.into_iter().flatten();
            pairs.any(|(key, item)| any_string(&key, test) || any_string(&item, test))
        }
        _ => false,
    }
}

/// A copy of a value with all strings mapped. The JSON parser bounds the depth (128).
pub(super) fn map_strings(value: &Value, map: &mut StringMap<'_>) -> Value {
    match value.kind() {
        ValueKind::String => match map(value.as_str().unwrap_or_default()) {
            Some(text) => Value::from(text),
            None => value.clone(),
        },
        ValueKind::Seq => value
            .try_iter()
            .into_iter()
            .flatten()
            .map(|item| map_strings(&item, map))
            .collect(),
        ValueKind::Map => {
            let mapped: Vec<_> = pairs(value)
                .into_iter()
                .map(|(key, item)| (map_strings(&key, map), map_strings(&item, map)))
                .collect();
            Value::from_pairs(mapped)
        }
        _ => value.clone(),
    }
}
