//! Fields of messages that templates know under one name only.

use minijinja::value::{Value, ValueKind};

/// Gives the fields of a message the names that templates know. The deprecated `function_call` becomes a tool call,
/// and its result a message of a tool. Reasoning gets both of its names, and a list without calls is left out.
pub(super) fn renew(fields: &mut Vec<(Value, Value)>) {
    fields.retain(|(name, value)| match name.as_str() {
        Some("tool_calls") => {
            !value.is_none() && (value.kind() != ValueKind::Seq || value.len() != Some(0))
        }
        Some("function_call") => !value.is_none(),
        _ => true,
    });
    for (name, value) in fields.iter_mut() {
        match (name.as_str(), value.as_str()) {
            (Some("role"), Some("function")) => *value = Value::from("tool"),
            (Some("function_call"), _) => {
                let call = [
                    ("type", Value::from("function")),
                    ("function", value.clone()),
                ];
                *name = Value::from("tool_calls");
                *value = Value::from(vec![Value::from_pairs(call)]);
            }
            _ => {}
        }
    }
    let find = |wanted: &str| {
        let named = fields
            .iter()
            .find(|(name, _)| name.as_str() == Some(wanted));
        let value = named.map(|(_, value)| value.clone());
        value.filter(|value| value.as_str().is_some_and(|text| !text.is_empty()))
    };
    let names = ["reasoning_content", "reasoning"];
    match names.map(find) {
        [Some(text), None] => set(fields, names[1], text),
        [None, Some(text)] => set(fields, names[0], text),
        _ => {}
    }
}

fn set(fields: &mut Vec<(Value, Value)>, name: &str, value: Value) {
    fields.retain(|(known, _)| known.as_str() != Some(name));
    fields.push((Value::from(name), value));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::ChatInput;
    use crate::chat_template::ChatTemplate;

    #[test]
    fn older_and_other_names_reach_the_template() {
        let source = "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.reasoning }}|\
            {% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.a }}\
            {% endfor %}{% endif %};{% endfor %}";
        let source = source.replace("\\\n", "").replace("            ", "");
        let template = ChatTemplate::new(&source, Vec::new()).unwrap();
        for (message, expected) in [
            (
                json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{\"a\": 1}"}}),
                "assistant||||f1;",
            ),
            (json!({"role": "function", "content": "r"}), "tool|r|||;"),
            (
                json!({"role": "assistant", "content": "a", "tool_calls": []}),
                "assistant|a|||;",
            ),
            (
                json!({"role": "assistant", "content": "a", "tool_calls": null}),
                "assistant|a|||;",
            ),
            (
                json!({"role": "assistant", "content": "a", "reasoning": "r"}),
                "assistant|a|r|r|;",
            ),
            (
                json!({"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": null}),
                "assistant|a|r|r|;",
            ),
            (
                json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
                "assistant|no|||;",
            ),
            (
                json!({"role": "assistant", "content": []}),
                "assistant||||;",
            ),
        ] {
            let body = json!({ "messages": [message] }).to_string();
            let rendered = template.render(&ChatInput::from_json(&body), true).unwrap();
            assert_eq!(rendered, expected, "{body}");
        }
    }
}
