//! Tests of bodies, each beside the chat that it becomes.

use std::time::Duration;

use refrain_service_kit::telemetry::Metrics;
use serde_json::Value;

use super::super::store::{StoreLimits, StoredResponse};
use super::*;
use crate::metrics::GatewayMetrics;

fn store(bytes_max: usize) -> Arc<ResponseStore> {
    let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
    let limits = StoreLimits {
        bytes_max,
        tenant_responses_max: 9,
        age_max: Duration::from_secs(60),
    };
    Arc::new(ResponseStore::new(limits, Arc::new(metrics)))
}

fn chat(body: &Value, store: &Arc<ResponseStore>) -> Result<(Value, Echo), ApiError> {
    let (chat, echo) = to_chat(Bytes::from(body.to_string()), "t", store)?;
    Ok((serde_json::from_slice(&chat).unwrap(), echo))
}

#[test]
fn a_conversation_with_tools_becomes_a_chat() {
    let given = json!({
        "model": "m", "instructions": "be kind", "max_output_tokens": 9, "temperature": 0.5, "stream": true,
        "store": false, "parallel_tool_calls": false, "reasoning": {"effort": "low"},
        "input": [
            {"role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"},
            ]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "12"}, {"type": "input_image", "image_url": "data:"},
            ]},
            {"type": "function_call", "call_id": "d", "name": "g", "namespace": "n", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "e", "name": "p", "input": "a\nb"},
            {"type": "custom_tool_call_output", "call_id": "e", "output": "done"},
            {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": false}],
        "tool_choice": {"type": "function", "name": "f"},
    });
    let (chat, echo) = chat(&given, &store(1_000)).unwrap();
    assert_eq!(
        chat,
        json!({
            "model": "m", "max_completion_tokens": 9, "temperature": 0.5, "stream": true,
            "parallel_tool_calls": false, "reasoning_effort": "low",
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "reasoning_content": "hm", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                ]},
                {"role": "tool", "content": "12\n[image left out: this model reads text only]", "tool_call_id": "c"},
                {"role": "assistant", "tool_calls": [
                    {"id": "d", "type": "function", "function": {"name": "n__g", "arguments": "{}"}},
                    {"id": "e", "type": "function",
                     "function": {"name": "p", "arguments": "{\"input\":\"a\\nb\"}"}},
                ]},
                {"role": "tool", "content": "done", "tool_call_id": "e"},
                {"role": "assistant", "tool_calls": [
                    {"id": "l", "type": "function", "function": {
                        "name": "local_shell", "arguments": "{\"type\":\"exec\",\"command\":[\"ls\"]}",
                    }},
                ]},
            ],
            "tools": [{"type": "function", "function": {
                "name": "f", "parameters": {"type": "object"}, "strict": false,
            }}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        })
    );
    assert!(echo.store.is_none());
    assert_eq!(
        (&echo.fields["store"], &echo.fields["temperature"]),
        (&json!(false), &json!(0.5))
    );
    assert_eq!(echo.fields["tools"], given["tools"]);
}

#[test]
fn a_stored_response_is_continued_and_its_items_can_be_named() {
    let stored = store(100_000);
    let said = |role, text: &str| {
        Arc::new(HistoryItem::Message {
            role,
            text: text.into(),
        })
    };
    let response = StoredResponse {
        body: Bytes::from("{}"),
        history: vec![said("user", "a"), said("assistant", "b")],
        items: vec!["msg_1".into()],
    };
    stored.insert("t", "resp_1", response, Instant::now());
    let given = json!({"model": "m", "previous_response_id": "resp_1", "input": "c"});
    let (next, _) = chat(&given, &stored).unwrap();
    assert_eq!(
        next["messages"],
        json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ])
    );
    let given = json!({"model": "m", "input": [{"type": "item_reference", "id": "msg_1"}]});
    let (next, echo) = chat(&given, &stored).unwrap();
    assert_eq!(
        next["messages"],
        json!([{"role": "assistant", "content": "b"}])
    );
    assert!(echo.store.is_some());
    let given = json!({"model": "m", "previous_response_id": "resp_2", "input": "c"});
    let error = chat(&given, &stored).err().unwrap();
    assert!(error.has_code(PREVIOUS_NOT_FOUND), "{error}");
}

#[test]
fn metadata_have_the_limits_of_openai() {
    let given = |value: String| json!({"model": "m", "input": "a", "metadata": {"k": value}});
    assert!(chat(&given("v".repeat(512)), &store(1 << 20)).is_ok());
    let error = chat(&given("v".repeat(513)), &store(1 << 20))
        .err()
        .unwrap();
    assert_eq!(error.param.as_deref(), Some("metadata"));
}

#[test]
fn nothing_is_stored_where_there_is_no_room() {
    let (_, echo) = chat(
        &json!({"model": "m", "input": "a", "store": true}),
        &store(0),
    )
    .unwrap();
    assert!(echo.store.is_none());
    assert_eq!(echo.fields["store"], false);
}

#[test]
fn faults_are_named_with_their_places() {
    let of_item = |item: Value| json!([item]);
    for (field, value, place) in [
        ("input", Value::Null, "input"),
        ("input", json!(7), "input"),
        ("input", json!([]), "input"),
        (
            "input",
            of_item(json!({"type": "computer_call"})),
            "input[0].type",
        ),
        (
            "input",
            of_item(json!({"role": "odd", "content": "a"})),
            "input[0].role",
        ),
        (
            "input",
            of_item(json!({"role": "user"})),
            "input[0].content",
        ),
        (
            "input",
            of_item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "input[0].content[0].type",
        ),
        (
            "input",
            of_item(json!({"type": "function_call"})),
            "input[0].call_id",
        ),
        (
            "input",
            of_item(json!({"type": "item_reference", "id": "x"})),
            "input[0].id",
        ),
        ("instructions", json!(7), "instructions"),
        ("tools", json!([{"type": "odd"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].name"),
        (
            "tool_choice",
            json!({"type": "web_search"}),
            "tool_choice.type",
        ),
        (
            "text",
            json!({"format": {"type": "odd"}}),
            "text.format.type",
        ),
        ("background", json!(true), "background"),
        ("conversation", json!("c"), "conversation"),
        ("top_logprobs", json!(2), "top_logprobs"),
        ("n", json!(2), "n"),
    ] {
        let mut body = json!({"model": "m", "input": "a"});
        body[field] = value;
        let error = chat(&body, &store(1_000)).err().unwrap();
        assert_eq!(error.param.as_deref(), Some(place));
        assert!(error.message.starts_with(place), "{}", error.message);
    }
}

#[test]
fn errors_of_the_chat_name_the_fields_of_this_api() {
    let tools = json!([{"type": "function", "name": "f"}]);
    let body = json!({"model": "m", "input": "a", "tools": tools});
    let (_, echo) = chat(&body, &store(1_000)).unwrap();
    let renamed = |error| echo.renamed(error);
    let error = renamed(ApiError::invalid("response_format", "response_format: no"));
    assert_eq!(error.param.as_deref(), Some("text.format"));
    assert_eq!(error.message, "text.format: no");
    for (there, here) in [
        (
            "response_format.json_schema.schema.a",
            "text.format.schema.a",
        ),
        ("tools[0].function.parameters.a", "tools[0].parameters.a"),
        ("max_tokens", "max_output_tokens"),
        ("response_formats", "response_formats"),
    ] {
        let error = renamed(ApiError::invalid(there, format!("{there}: no")));
        assert_eq!(error.param.as_deref(), Some(here));
        assert_eq!(error.message, format!("{here}: no"));
    }
    let error = ApiError::invalid("temperature", "temperature: no");
    assert_eq!(renamed(error.clone()), error);
}
