//! Spans and events of OpenTelemetry, opened into objects as other tools write them.
//!
//! Conventions differ in names and in whether a list is JSON in one attribute or many attributes with numbers in
//! their names. Opened, both are a list of messages.

use serde_json::{Map, Value};

use super::members::{Object, has_any, open_texts};

/// A span or an event of a log with its attributes opened; `None` for another object.
pub(super) fn opened(object: &Object) -> Option<Object> {
    let is_span = has_any(
        object,
        "spanId span_id context traceId trace_id timeUnixNano startTimeUnixNano start_time",
    );
    let is_event = has_any(object, "eventName event_name");
    let attributes = object.get("attributes").unwrap_or(&Value::Null);
    if !is_span || (attributes.is_null() && !is_event) {
        return None;
    }
    let mut pairs = pairs_of(attributes);
    // Older conventions write prompts and answers as events of a span.
    let mut messages = Vec::new();
    for event in object
        .get("events")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let mut of_event = event.get("attributes").map(pairs_of).unwrap_or_default();
        let name = event
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default();
        match name {
            "gen_ai.choice" => {
                let mut choice: Object = std::mem::take(&mut of_event).into_iter().collect();
                open_texts(&mut choice, 0);
                pairs.push(("choices".to_owned(), Value::Array(vec![choice.into()])));
            }
            name if name.starts_with("gen_ai.") && name.ends_with(".message") => {
                messages.push(message(name, nested(of_event)));
            }
            _ => pairs.extend(of_event),
        }
    }
    if !messages.is_empty() {
        pairs.push(("messages".to_owned(), Value::Array(messages)));
    }
    let mut span = object.clone();
    span.remove("events");
    span.remove("resource");
    if let Some(body) = object.get("body").map(plain) {
        let event = ["eventName", "event_name"]
            .iter()
            .find_map(|key| object.get(*key)?.as_str());
        let event = event
            .or_else(|| {
                pairs
                    .iter()
                    .find(|(key, _)| key == "event.name")?
                    .1
                    .as_str()
            })
            .unwrap_or_default();
        match event {
            "gen_ai.choice" => {
                span.insert("choices".to_owned(), Value::Array(vec![body]));
            }
            event if event.ends_with(".message") => {
                span.insert(
                    "messages".to_owned(),
                    Value::Array(vec![message(event, body)]),
                );
            }
            _ => {
                span.insert("body".to_owned(), body);
            }
        }
    }
    let mut attributes = nested(pairs);
    // The provider's name is no system prompt.
    for convention in ["gen_ai", "llm"] {
        if let Some(Value::Object(members)) = attributes.get_mut(convention)
            && members.get("system").is_some_and(Value::is_string)
        {
            members.remove("system");
        }
    }
    span.insert("attributes".to_owned(), attributes);
    open_texts(&mut span, 0);
    Some(span)
}

/// A row whose columns are paths with dots, as tables of spans have them. `None` for another object.
pub(super) fn opened_row(object: &Object) -> Option<Object> {
    let is_path = |key: &String| {
        key.starts_with("attributes.") || key.starts_with("gen_ai.") || key.starts_with("llm.")
    };
    if !object.keys().any(is_path) {
        return None;
    }
    let pairs = object
        .iter()
        .map(|(key, value)| (key.clone(), value.clone()));
    match nested(pairs.collect()) {
        Value::Object(row) => Some(row),
        _ => None,
    }
}

/// A message that an event holds, whose role is in the event's name.
fn message(event: &str, mut body: Value) -> Value {
    let role = event
        .trim_start_matches("gen_ai.")
        .trim_end_matches(".message");
    if let Value::Object(body) = &mut body {
        body.entry("role").or_insert_with(|| role.into());
    }
    body
}

/// Attributes as pairs, from the protocol's JSON or from a plain object.
fn pairs_of(attributes: &Value) -> Vec<(String, Value)> {
    match attributes {
        Value::Array(list) => {
            let pair = |pair: &Value| {
                Some((
                    pair.get("key")?.as_str()?.to_owned(),
                    plain(pair.get("value")?),
                ))
            };
            list.iter().filter_map(pair).collect()
        }
        Value::Object(members) => members
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
        _ => Vec::new(),
    }
}

/// A value of the protocol's JSON, which wraps each in an object with the name of its type.
fn plain(value: &Value) -> Value {
    let Some((kind, inner)) = value
        .as_object()
        .filter(|object| object.len() == 1)
        .and_then(|object| object.iter().next())
    else {
        return value.clone();
    };
    let values = || inner.get("values").and_then(Value::as_array);
    match kind.as_str() {
        "stringValue" | "string_value" | "boolValue" | "doubleValue" | "intValue" | "int_value" => {
            inner.clone()
        }
        "arrayValue" | "array_value" => values().into_iter().flatten().map(plain).collect(),
        "kvlistValue" | "kvlist_value" => {
            let pairs = values()
                .map(|list| pairs_of(&Value::Array(list.clone())))
                .unwrap_or_default();
            Value::Object(pairs.into_iter().collect())
        }
        _ => value.clone(),
    }
}

/// Pairs whose keys are paths with dots, as nested objects. Objects whose keys are numbers become lists.
fn nested(pairs: Vec<(String, Value)>) -> Value {
    let mut top = Map::new();
    for (path, value) in pairs {
        insert(&mut top, &path, value);
    }
    listed(Value::Object(top))
}

fn insert(into: &mut Object, path: &str, value: Value) {
    // A path that is deeper than this is no path.
    match path
        .split_once('.')
        .filter(|_| path.matches('.').count() < 16)
    {
        Some((first, rest)) => {
            let inner = into
                .entry(first)
                .or_insert_with(|| Value::Object(Map::new()));
            if !inner.is_object() {
                // `llm.model` and `llm.model.name` can stand together.
                *inner = Value::Object(Map::from_iter([("value".to_owned(), inner.take())]));
            }
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
        None => {
            into.insert(path.to_owned(), value);
        }
    }
}

fn listed(value: Value) -> Value {
    let members = match value {
        Value::Object(members) => members,
        Value::Array(items) => {
            let item = |item| match item {
                Value::Object(members) if members.keys().any(|key| key.contains('.')) => {
                    nested(members.into_iter().collect())
                }
                item => item,
            };
            return items.into_iter().map(item).collect();
        }
        other => return other,
    };
    let is_list = !members.is_empty() && members.keys().all(|key| key.parse::<u16>().is_ok());
    if is_list {
        let mut items: Vec<(u16, Value)> = members
            .into_iter()
            .filter_map(|(key, value)| Some((key.parse().ok()?, listed(value))))
            .collect();
        items.sort_by_key(|(at, _)| *at);
        return Value::Array(items.into_iter().map(|(_, value)| value).collect());
    }
    Value::Object(
        members
            .into_iter()
            .map(|(key, value)| (key, listed(value)))
            .collect(),
    )
}
