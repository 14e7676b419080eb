//! Digests of messages: a turn goes on from an earlier one if its messages begin with the same ones.
//!
//! An agent sends an answer back in its own words: without its reasoning, with arguments written anew, or with other
//! white space. Those are the same answer. Messages of others are the same if all their fields are.

use refrain_gateway::{Event, TemplatedChat};
use refrain_tokenization::JsonValue;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

/// The digest of some messages, from the first on.
pub(super) type Digest = u128;

/// The answer of a model, as far as an agent sends it back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AnswerWords {
    pub(super) text: String,
    /// The names of calls, and their arguments as JSON text.
    pub(super) calls: Vec<(String, String)>,
}

impl AnswerWords {
    /// The words that an output was parsed to.
    pub(super) fn of_events(events: &[Event]) -> Self {
        let mut words = AnswerWords::default();
        for event in events {
            match event {
                Event::Text(text) => words.text.push_str(text),
                Event::CallStart { name, .. } => words.calls.push((name.clone(), String::new())),
                Event::CallArguments { delta, .. } => {
                    if let Some((_, arguments)) = words.calls.last_mut() {
                        arguments.push_str(delta);
                    }
                }
                Event::Reasoning(_) | Event::CallEnd { .. } => {}
            }
        }
        words
    }

    /// The words of a message of the assistant.
    fn of_message(message: &Value) -> Self {
        let function = |function: &Value| {
            let arguments = match &function["arguments"] {
                Value::String(text) => text.clone(),
                Value::Null => String::new(),
                arguments => arguments.to_string(),
            };
            let name = function["name"].as_str().unwrap_or_default();
            (name.to_owned(), arguments)
        };
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let calls = calls.map(|call| function(&call["function"]));
        let older = Some(&message["function_call"]).filter(|call| !call.is_null());
        AnswerWords {
            text: text_of(&message["content"]),
            calls: calls.chain(older.map(function)).collect(),
        }
    }

    fn write(&self, out: &mut String) {
        out.push_str("assistant");
        let visible = self
            .text
            .chars()
            .filter(|character| !character.is_whitespace());
        write_text(&visible.collect::<String>(), out);
        for (name, arguments) in &self.calls {
            write_text(name, out);
            match serde_json::from_str::<Value>(arguments) {
                Ok(value) => write_value(&value, out),
                // Some clients leave arguments out where there are none.
                Err(_) if arguments.trim().is_empty() => out.push_str("{}"),
                Err(_) => write_text(arguments.trim(), out),
            }
        }
    }
}

/// The digests of the first 0, 1, 2 and so on messages of a chat, with its model, tools and variables.
pub(super) fn of_chat(chat: &TemplatedChat<'_>) -> Vec<Digest> {
    let mut head = chat.model.to_owned();
    for (name, value) in chat.input.surroundings() {
        write_text(name, &mut head);
        write_value(&value.to_json(), &mut head);
    }
    let mut last = xxh3_128(head.as_bytes());
    let mut digests = vec![last];
    for message in chat.input.messages().items() {
        last = behind(last, &written(&message));
        digests.push(last);
    }
    digests
}

/// The digest of messages and an answer behind them.
pub(super) fn with_answer(before: Digest, answer: &AnswerWords) -> Digest {
    let mut text = String::new();
    answer.write(&mut text);
    behind(before, &text)
}

fn behind(before: Digest, written: &str) -> Digest {
    xxh3_128(&[&before.to_le_bytes(), written.as_bytes()].concat())
}

fn written(message: &JsonValue) -> String {
    let mut message = message.to_json();
    let mut text = String::new();
    if let Some(content) = message.get_mut("content") {
        *content = plain(content);
    }
    match message["role"].as_str() {
        Some("assistant") => AnswerWords::of_message(&message).write(&mut text),
        _ => write_value(&message, &mut text),
    }
    text
}

/// A content without its spelling: a part that is all of it is a text, and marks for caches are none of it.
fn plain(content: &Value) -> Value {
    let Value::Array(parts) = content else {
        return content.clone();
    };
    let plain = parts.iter().map(|part| match &part["text"] {
        Value::String(text) => Value::from(text.as_str()),
        _ => part.clone(),
    });
    let mut parts: Vec<Value> = plain.collect();
    match parts.len() {
        1 => parts.remove(0),
        _ => Value::Array(parts),
    }
}

/// A content as one text. Parts that have none count as nothing.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(Value::as_str).collect(),
        _ => String::new(),
    }
}

/// Writes a value in one way: with sorted keys, and without those that are null.
fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields
                .iter()
                .filter(|(_, value)| !value.is_null())
                .collect();
            fields.sort_by_key(|(name, _)| *name);
            out.push('{');
            for (name, value) in fields {
                write_text(name, out);
                write_value(value, out);
            }
            out.push('}');
        }
        Value::Array(values) => {
            out.push('[');
            for value in values {
                write_value(value, out);
            }
            out.push(']');
        }
        Value::String(text) => write_text(text, out),
        other => out.push_str(&other.to_string()),
    }
}

/// Writes a text so that its end is known.
fn write_text(text: &str, out: &mut String) {
    out.push_str(&format!("\"{}:", text.len()));
    out.push_str(text);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn same(one: &Value, other: &Value) -> bool {
        let written = |value: &Value| {
            let value: JsonValue = serde_json::from_value(value.clone()).unwrap();
            written(&value)
        };
        written(one) == written(other)
    }

    #[test]
    fn an_answer_is_the_same_in_the_words_of_any_client() {
        let call = |arguments: &str, id: &str| json!({"id": id, "function": {"name": "f", "arguments": arguments}});
        let sent = json!({"role": "assistant", "content": "Let me see.\n",
            "tool_calls": [call("{\"b\": 1, \"a\": [2]}", "x")]});
        for other in [
            json!({"role": "assistant", "content": [{"type": "text", "text": "Let me see."}],
                "tool_calls": [call("{\"a\":[2],\"b\":1}", "y")], "reasoning_content": "hm"}),
            json!({"role": "assistant", "content": " Let me  see.", "name": null,
                "function_call": {"name": "f", "arguments": {"a": [2], "b": 1}}}),
        ] {
            assert!(same(&sent, &other), "{other}");
        }
        for other in [
            json!({"role": "assistant", "content": "Let me think.", "tool_calls": [call("{\"a\":[2],\"b\":1}", "y")]}),
            json!({"role": "assistant", "content": "Let me see.", "tool_calls": [call("{\"a\":[2],\"b\":2}", "y")]}),
            json!({"role": "assistant", "content": "Let me see."}),
        ] {
            assert!(!same(&sent, &other), "{other}");
        }
        let events = [
            Event::Reasoning("hm".into()),
            Event::Text("Let me ".into()),
            Event::Text("see.".into()),
            Event::CallStart {
                index: 0,
                id: Some("z".into()),
                name: "f".into(),
            },
            Event::CallArguments {
                index: 0,
                delta: "{\"a\":[2],".into(),
            },
            Event::CallArguments {
                index: 0,
                delta: "\"b\":1}".into(),
            },
        ];
        let mut of_output = String::new();
        AnswerWords::of_events(&events).write(&mut of_output);
        let message: JsonValue = serde_json::from_value(sent).unwrap();
        assert_eq!(of_output, written(&message));
    }

    #[test]
    fn messages_of_others_are_the_same_if_all_their_fields_are() {
        let tool = json!({"role": "tool", "content": "4", "tool_call_id": "a"});
        assert!(same(
            &tool,
            &json!({"tool_call_id": "a", "role": "tool", "content": "4", "name": null})
        ));
        for other in [
            json!({"role": "tool", "content": "4 ", "tool_call_id": "a"}),
            json!({"role": "tool", "content": "4", "tool_call_id": "b"}),
            json!({"role": "user", "content": "4", "tool_call_id": "a"}),
        ] {
            assert!(!same(&tool, &other), "{other}");
        }
        let parts = |mark: Value| {
            let part = json!({"type": "text", "text": "4", "cache_control": mark});
            json!({"role": "tool", "content": [part], "tool_call_id": "a"})
        };
        assert!(same(&tool, &parts(json!({"type": "ephemeral"}))));
        assert!(same(&tool, &parts(Value::Null)));
        // The border between two texts is a part of what is written.
        assert!(!same(&json!(["ab", "c"]), &json!(["a", "bc"])));
    }
}
