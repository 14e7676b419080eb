//! A chat in the shape that templates expect.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::value::{Value, ValueKind};

use super::chat_input::ChatInput;
use crate::TokenizationError;

/// Replaces strings of the input. `None` keeps a string without copying it.
pub(super) type StringMap<'a> = dyn FnMut(&str) -> Option<String> + 'a;

/// The variables that a template gets from the input. Texts are shared with the input, not copied.
pub(super) fn variables(input: &ChatInput) -> BTreeMap<String, Value> {
    let kwargs = input.kwargs.iter().flat_map(|kwargs| kwargs.0.clone());
    let mut variables: BTreeMap<String, Value> = kwargs.collect();
    let messages = input.messages.0.iter().map(normal_message);
    variables.insert("messages".into(), messages.collect());
    // Without tools, templates expect `none`.
    let tools = input.tools.as_ref().filter(|tools| !tools.is_empty());
    let tools = tools.map(|tools| Value::from(tools.0.clone()));
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
            let text = value.as_str().unwrap_or_default();
            *value = Value::from(format!("{text}{end}"));
        }
    }
    *last = Value::from_pairs(fields);
    variables.insert("messages".into(), messages.into_iter().collect());
    Ok(())
}

/// A private-use character that none of the strings contains.
pub(super) fn unused_character(
    variables: &BTreeMap<String, Value>,
) -> Result<char, TokenizationError> {
    let mut used = BTreeSet::new();
    let mut note = |text: &str| {
        used.extend(text.chars().filter(|character| *character >= '\u{F0000}'));
        None
    };
    for value in variables.values() {
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

/// A message as templates expect it. `content` is one string: text parts are joined by line ends, and missing content
/// is the empty string. The arguments of tool calls are objects, also where clients send them as JSON text.
fn normal_message(message: &Value) -> Value {
    let mut fields = pairs(message);
    if !fields
        .iter()
        .any(|(name, _)| name.as_str() == Some("content"))
    {
        fields.push((Value::from("content"), Value::from("")));
    }
    for (name, value) in &mut fields {
        match name.as_str() {
            Some("content") if value.is_none() => *value = Value::from(""),
            Some("content") if value.kind() == ValueKind::Seq => {
                let texts = value.try_iter().into_iter().flatten().filter_map(|part| {
                    // A refusal in the history is what the model said.
                    ["text", "refusal"].into_iter().find_map(|name| {
                        let text = part.get_attr(name).ok()?;
                        text.as_str().map(str::to_owned)
                    })
                });
                *value = Value::from(texts.collect::<Vec<_>>().join("\n"));
            }
            Some("tool_calls") if value.kind() == ValueKind::Seq => {
                *value = value
                    .try_iter()
                    .into_iter()
                    .flatten()
                    .map(|call| normal_call(&call))
                    .collect();
            }
            _ => {}
        }
    }
    Value::from_pairs(fields)
}

fn normal_call(call: &Value) -> Value {
    let function = |function: &Value| {
        Value::from_pairs(pairs(function).into_iter().map(|(name, value)| {
            match (name.as_str(), value.as_str()) {
                (Some("arguments"), Some(text)) => {
                    let parsed = serde_json::from_str::<Value>(text).ok();
                    let object = parsed.filter(|parsed| parsed.kind() == ValueKind::Map);
                    (name, object.unwrap_or(value))
                }
                _ => (name, value),
            }
        }))
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

/// The keys and values of an object, or nothing if the value is no object.
fn pairs(map: &Value) -> Vec<(Value, Value)> {
    if map.kind() != ValueKind::Map {
        return Vec::new();
    }
    let keys = map.try_iter().into_iter().flatten();
    keys.map(|key| (key.clone(), map.get_item(&key).unwrap_or_default()))
        .collect()
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
