//! Tests of bodies, each beside the chat that it becomes.

use serde_json::Value;

use super::*;

fn chat(body: Value) -> Result<Value, ApiError> {
    let (chat, _) = to_chat(Bytes::from(body.to_string()), false)?;
    Ok(serde_json::from_slice(&chat).unwrap())
}

fn body(field: &str, value: Value) -> Value {
    let mut body = json!({
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}],
    });
    body[field] = value;
    body
}

#[test]
fn a_conversation_with_tools_becomes_a_chat() {
    let given = json!({
        "model": "m", "max_tokens": 9, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3, "stream": true,
        "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind"},
        ],
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "w", "input": {"z": 1, "a": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [
                    {"type": "text", "text": "12"}, {"type": "text", "text": "rain"},
                ], "is_error": true},
                {"type": "text", "text": "and?"},
            ]},
        ],
        "tools": [{"name": "w", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
    });
    assert_eq!(
        chat(given).unwrap(),
        json!({
            "model": "m", "stop": ["x"], "temperature": 0.5, "top_k": 3, "stream": true, "max_tokens": 9,
            "messages": [
                {"role": "system", "content": "be\nkind"},
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": [
                    {"id": "t1", "type": "function",
                     "function": {"name": "w", "arguments": "{\"z\":1,\"a\":\"Oslo\"}"}},
                ]},
                {"role": "tool", "content": "Error: 12\nrain", "tool_call_id": "t1"},
                {"role": "user", "content": "and?"},
            ],
            "safety_identifier": "u", "tool_choice": "auto", "parallel_tool_calls": false,
            "tools": [{"type": "function", "function": {
                "name": "w", "description": "d", "parameters": {"type": "object"},
            }}],
            "chat_template_kwargs": {"enable_thinking": true},
        })
    );
}

#[test]
fn images_in_results_and_references_to_tools_become_texts() {
    let given = json!({
        "model": "m", "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}},
                {"type": "tool_reference", "tool_name": "late"},
                {"type": "tool_reference", "tool_name": "gone"},
            ]}]},
        ],
        "tools": [
            {"name": "now", "input_schema": {"type": "object"}},
            {"name": "late", "description": "d", "input_schema": {"type": "object"}, "defer_loading": true},
        ],
    });
    let chat = chat(given).unwrap();
    let late = r#"{"type":"function","function":{"name":"late","description":"d","parameters":{"type":"object"}}}"#;
    let expected = format!("a\n[image left out: this model reads text only]\n{late}\ngone");
    assert_eq!(chat["messages"][0]["content"], expected);
    let deferred = |at: usize| chat["tools"][at].get("defer_loading").cloned();
    assert_eq!((deferred(0), deferred(1)), (None, Some(json!(true))));
}

#[test]
fn an_answer_that_has_begun_is_continued() {
    let messages = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    ]);
    let chat = chat(body("messages", messages)).unwrap();
    assert_eq!(chat["continue_final_message"], true);
    assert_eq!(chat["add_generation_prompt"], false);
}

#[test]
fn a_forced_tool_keeps_its_name() {
    let chat = |choice| chat(body("tool_choice", choice)).unwrap()["tool_choice"].clone();
    assert_eq!(chat(json!({"type": "any"})), "required");
    let named = json!({"type": "function", "function": {"name": "w"}});
    assert_eq!(chat(json!({"type": "tool", "name": "w"})), named);
}

#[test]
fn faults_are_named_with_their_places() {
    let of_user = |block: Value| json!([{"role": "user", "content": [block]}]);
    for (field, value, place) in [
        ("max_tokens", Value::Null, "max_tokens"),
        ("messages", json!([]), "messages"),
        ("messages", json!(7), "messages"),
        ("messages", json!([{"role": "user"}]), "messages.0.content"),
        (
            "messages",
            json!([{"role": "tool", "content": "a"}]),
            "messages.0.role",
        ),
        (
            "messages",
            of_user(json!({"type": "image"})),
            "messages.0.content.0.image",
        ),
        (
            "messages",
            of_user(json!({"type": "odd"})),
            "messages.0.content.0.type",
        ),
        (
            "messages",
            of_user(json!({"type": "text"})),
            "messages.0.content.0.text",
        ),
        (
            "messages",
            of_user(json!({"type": "tool_result"})),
            "messages.0.content.0.tool_use_id",
        ),
        ("system", json!(7), "system"),
        ("tools", json!({}), "tools"),
        (
            "tools",
            json!([{"type": "web_search_20250305", "name": "w"}]),
            "tools.0.type",
        ),
        ("tools", json!([{"name": "w"}]), "tools.0.input_schema"),
        ("tool_choice", json!({"type": "odd"}), "tool_choice.type"),
        ("thinking", json!({"type": "odd"}), "thinking.type"),
        ("mcp_servers", json!([{"type": "url"}]), "mcp_servers"),
        (
            "output_config",
            json!({"format": {"type": "xml"}}),
            "output_config.format.type",
        ),
        (
            "output_format",
            json!({"type": "json_object"}),
            "output_format.type",
        ),
        ("n", json!(2), "n"),
    ] {
        let error = chat(body(field, value)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(place));
        assert!(error.message.starts_with(place), "{}", error.message);
    }
    let error = chat(body("messages", of_user(json!({"type": "image"})))).unwrap_err();
    assert!(error.message.contains("image"), "{}", error.message);
}

#[test]
fn the_format_of_the_answer_is_passed_on_by_either_name() {
    let format = json!({"type": "json_schema", "schema": {"z": 1, "a": 2}});
    let expected = json!({"type": "json_schema", "json_schema": {"schema": {"z": 1, "a": 2}}});
    for (field, value) in [
        ("output_config", json!({"format": format, "effort": "low"})),
        ("output_format", format.clone()),
    ] {
        assert_eq!(
            chat(body(field, value)).unwrap()["response_format"],
            expected
        );
    }
    let mut both = body("output_format", format.clone());
    both["output_config"] = json!({"format": format});
    assert_eq!(
        chat(both).unwrap_err().param.as_deref(),
        Some("output_format")
    );
}

#[test]
fn errors_of_the_chat_name_the_fields_of_this_api() {
    for (there, here) in [
        (
            "response_format.json_schema.schema.a",
            "output_config.format.schema.a",
        ),
        ("tools[1].function.parameters.a", "tools.1.input_schema.a"),
        ("tools[1].function", "tools.1"),
        ("stop", "stop_sequences"),
        ("temperature", "temperature"),
    ] {
        let error = renamed(
            ApiError::invalid(there, format!("{there}: no")),
            "output_config.format",
        );
        assert_eq!(error.param.as_deref(), Some(here));
        assert_eq!(error.message, format!("{here}: no"));
    }
}

#[test]
fn to_count_tokens_needs_no_output_limit() {
    let mut given = body("stream", json!(true));
    given["max_tokens"] = Value::Null;
    let (chat, _) = to_chat(Bytes::from(given.to_string()), true).unwrap();
    let chat: Value = serde_json::from_slice(&chat).unwrap();
    assert_eq!(
        (&chat["max_tokens"], &chat["stream"]),
        (&json!(1), &Value::Null)
    );
}
