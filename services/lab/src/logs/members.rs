//! Members of objects, by names that each tool writes in its own way.

use serde_json::{Map, Value};

pub(super) type Object = Map<String, Value>;

/// Whether a key is this name, apart from case and signs between words. The name has neither.
pub(super) fn is_named(key: &str, name: &str) -> bool {
    let mut rest = name.as_bytes();
    for byte in key.bytes().filter(u8::is_ascii_alphanumeric) {
        match rest.split_first() {
            Some((first, after)) if *first == byte.to_ascii_lowercase() => rest = after,
            _ => return false,
        }
    }
    rest.is_empty()
}

/// A key without case and signs between words.
pub(super) fn plain_name(key: &str) -> String {
    let letters = key.chars().filter(char::is_ascii_alphanumeric);
    letters.map(|letter| letter.to_ascii_lowercase()).collect()
}

/// The words of a list of names.
pub(super) fn words(list: &str) -> impl Iterator<Item = &str> {
    list.split_ascii_whitespace()
}

pub(super) fn has_word(list: &str, word: &str) -> bool {
    words(list).any(|listed| listed == word)
}

/// Whether a key is one of these names, as of [`is_named`].
pub(super) fn is_named_any(key: &str, names: &str) -> bool {
    words(names).any(|name| is_named(key, name))
}

/// Whether the object has one of these exact keys.
pub(super) fn has_any(object: &Object, keys: &str) -> bool {
    words(keys).any(|key| object.contains_key(key))
}

/// The first member under one of these exact keys that is not null, by the order of the keys.
pub(super) fn first_of<'a>(object: &'a Object, keys: &str) -> Option<&'a Value> {
    let mut found = words(keys).filter_map(|key| object.get(key));
    found.find(|value| !value.is_null())
}

/// As [`first_of`], by names as of [`is_named`].
pub(super) fn named<'a>(object: &'a Object, names: &str) -> Option<&'a Value> {
    words(names).find_map(|name| {
        let mut members = object.iter();
        members.find_map(|(key, value)| (is_named(key, name) && !value.is_null()).then_some(value))
    })
}

/// Whether a text can be a JSON object or array.
pub(super) fn looks_like_json(text: &str) -> bool {
    let bytes = text.trim().as_bytes();
    matches!(
        (bytes.first(), bytes.last()),
        (Some(b'{'), Some(b'}')) | (Some(b'['), Some(b']'))
    )
}

/// Objects are opened and searched so deep.
const DEPTH_MAX: usize = 5;

/// Keys of the values that programs exchange with models. A text of JSON with none of them stays text: a model may
/// have written it.
const EXCHANGED: &str = "messages message choices content contents role prompt input output \
    candidates parts from generations delta custom_id";

/// Members that hold records of their own, in the tools that nest them.
pub(super) const NESTED: &str = "observations resourceSpans resource_spans scopeSpans \
    scope_spans spans resourceLogs resource_logs scopeLogs scope_logs logRecords log_records \
    child_runs runs entries samples calls requests mapping";

/// Opens texts of JSON and of event streams inside objects, where they hold requests or responses.
pub(super) fn open_texts(object: &mut Object, depth: usize) {
    for (key, value) in object.iter_mut() {
        let opened = match &*value {
            Value::String(text) if looks_like_json(text) => {
                let is_opened = |value: &Value| {
                    is_exchanged(value) || (value.is_object() && is_named(key, "metadata"))
                };
                serde_json::from_str(text).ok().filter(is_opened)
            }
            Value::String(text) => event_stream(text),
            _ => None,
        };
        if let Some(opened) = opened {
            *value = opened;
        }
        match value {
            Value::Object(inner) if depth < DEPTH_MAX => open_texts(inner, depth + 1),
            // Records of their own are as deep as the one around them.
            Value::Array(list) if depth < DEPTH_MAX && has_word(NESTED, key) => {
                list.iter_mut()
                    .filter_map(Value::as_object_mut)
                    .for_each(|inner| open_texts(inner, depth));
            }
            _ => {}
        }
    }
}

fn is_exchanged(value: &Value) -> bool {
    match value {
        Value::Object(object) => has_any(object, EXCHANGED),
        Value::Array(list) => list.first().is_some_and(is_exchanged),
        _ => false,
    }
}

/// The events of a stream that was logged as it came: lines that begin with `data:`, or lines of JSON.
fn event_stream(text: &str) -> Option<Value> {
    let text = text.trim_start();
    let is_stream = ["data:", "event:", "{\""]
        .iter()
        .any(|start| text.starts_with(start));
    if !is_stream || !text.contains('\n') {
        return None;
    }
    let lines = text
        .lines()
        .map(|line| line.strip_prefix("data:").unwrap_or(line));
    let events: Vec<Value> = lines
        .filter_map(|line| serde_json::from_str(line.trim()).ok())
        .filter(Value::is_object)
        .collect();
    (!events.is_empty()).then_some(Value::Array(events))
}

/// An object and the objects in it, level by level and not through arrays. Members that `is_skipped` are not entered.
pub(super) fn within(
    top: &Object,
    depth_max: usize,
    is_skipped: impl Fn(&str) -> bool,
) -> Vec<&Object> {
    let mut found = vec![top];
    let mut level = 0..1;
    for _ in 0..depth_max {
        for at in level.clone() {
            for (key, value) in found[at] {
                if let Value::Object(inner) = value
                    && !is_skipped(key)
                {
                    found.push(inner);
                }
            }
        }
        level = level.end..found.len();
    }
    found
}
