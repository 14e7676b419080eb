//! Tool calls and reasoning, whole and streamed.

use refrain_gateway::{GatewayConfig, ModelConfig};
use serde_json::{Value, json};

use crate::mesh::{Bench, WITH_TOOLS, chat, config};
use crate::streams::streamed_text;

const CHAT: &str = "/v1/chat/completions";

/// Text, then two calls.
const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"send\", \"arguments\": {}}\n</tool_call>";

fn with_parsers(tools: &str, reasoning: &str) -> GatewayConfig {
    let mut config = config();
    config.models = vec![ModelConfig {
        id: "tiny".into(),
        files: WITH_TOOLS.into(),
        tool_parser: Some(tools.into()),
        reasoning_parser: Some(reasoning.into()),
        ..ModelConfig::default()
    }];
    config
}

async fn hermes() -> Bench {
    Bench::with(with_parsers("hermes", "<think>...</think>")).await
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}}}})
}

/// A chat with two tools and some more fields.
fn asks(fields: &Value) -> Value {
    let mut body = chat(json!({"tools": [function("look"), function("send")]}));
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The message that a client makes of the deltas of one choice, and the reason of its end. Ids are left out.
fn joined(events: &[Value], index: u64) -> Value {
    let mut message = json!({"content": null, "reasoning": null, "calls": [], "finish": null});
    let add = |place: &mut Value, part: &Value| {
        if let Some(part) = part.as_str() {
            *place = json!(place.as_str().unwrap_or_default().to_owned() + part);
        }
    };
    let choices = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap());
    for choice in choices.filter(|choice| choice["index"] == index) {
        let delta = &choice["delta"];
        assert_eq!(delta["reasoning"], delta["reasoning_content"]);
        add(&mut message["content"], &delta["content"]);
        add(&mut message["reasoning"], &delta["reasoning"]);
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let place = part["index"].as_u64().unwrap() as usize;
            let calls = message["calls"].as_array_mut().unwrap();
            if place == calls.len() {
                assert_eq!(part["type"], "function");
                assert!(part["id"].as_str().unwrap().starts_with("call_"));
                assert_eq!(part["function"]["arguments"], "");
                calls.push(json!([part["function"]["name"], ""]));
            }
            add(&mut calls[place][1], &part["function"]["arguments"]);
        }
        message["finish"] = choice["finish_reason"].clone();
    }
    message
}

/// The same of a whole answer.
fn whole(answer: &Value, index: usize) -> Value {
    let choice = &answer["choices"][index];
    let message = &choice["message"];
    assert_eq!(
        message.get("reasoning"),
        message.get("reasoning_content"),
        "{message}"
    );
    let calls = message["tool_calls"].as_array();
    let calls = calls.into_iter().flatten().map(|call| {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        json!([call["function"]["name"], call["function"]["arguments"]])
    });
    json!({"content": message["content"], "reasoning": message["reasoning"], "calls": calls.collect::<Vec<_>>(),
        "finish": choice["finish_reason"]})
}

/// An output, and the answer that it becomes.
struct Case {
    output: &'static str,
    fields: Value,
    content: Value,
    reasoning: Value,
    calls: Value,
    finish: &'static str,
}

fn case(output: &'static str) -> Case {
    Case {
        output,
        fields: json!({}),
        content: Value::Null,
        reasoning: Value::Null,
        calls: json!([]),
        finish: "stop",
    }
}

fn cases() -> Vec<Case> {
    let one = "<tool_call>{\"name\": \"look\", \"arguments\": {\"city\": \"a END b\"}}</tool_call>";
    let broken = "<tool_call>{\"name\" look}</tool_call> so";
    vec![
        Case {
            content: json!("Let me see.\n"),
            calls: json!([["look", "{\"city\": \"Oslo\"}"], ["send", "{}"]]),
            finish: "tool_calls",
            ..case(CALLS)
        },
        Case {
            fields: json!({"parallel_tool_calls": false}),
            content: json!("Let me see.\n"),
            calls: json!([["look", "{\"city\": \"Oslo\"}"]]),
            finish: "tool_calls",
            ..case(CALLS)
        },
        Case {
            fields: json!({"tool_choice": "none"}),
            content: json!(one),
            ..case(one)
        },
        Case {
            fields: json!({"tools": null}),
            content: json!(one),
            ..case(one)
        },
        Case {
            calls: json!([["look", "{\"city\": \"a END b\"}"]]),
            finish: "tool_calls",
            ..case(one)
        },
        Case {
            content: json!(broken),
            ..case(broken)
        },
        Case {
            content: json!("Hi."),
            reasoning: json!("hm, look"),
            ..case("<think>hm, look</think>Hi.")
        },
        Case {
            fields: json!({"tools": []}),
            content: json!("Hi."),
            reasoning: json!("hm"),
            ..case("<think>hm</think>Hi.")
        },
        Case {
            reasoning: json!("hm"),
            calls: json!([["send", "{}"]]),
            finish: "tool_calls",
            ..case(
                "<think>hm</think>\n\n<tool_call>{\"name\": \"send\", \"arguments\": {}}</tool_call>",
            )
        },
        // A stop text also cuts the reasoning, as with vLLM.
        Case {
            fields: json!({"stop": "END"}),
            reasoning: json!("a "),
            ..case("<think>a END b</think>c")
        },
        Case {
            fields: json!({"stop": ["END", "lo"]}),
            content: json!("Hel"),
            ..case("Hello")
        },
    ]
}

#[tokio::test]
async fn an_answer_is_the_same_whole_and_streamed_for_every_size_of_steps() {
    let bench = hermes().await;
    for case in cases() {
        bench.mesh.reply(case.output);
        let expected = json!({"content": case.content, "reasoning": case.reasoning, "calls": case.calls,
            "finish": case.finish});
        for step_tokens in [1, 3, 1000] {
            bench.mesh.script().step_tokens = step_tokens;
            let mut body = asks(&case.fields);
            let (status, answer) = bench.json(CHAT, &body).await;
            assert_eq!(status, 200, "{answer}");
            let context = (case.output, &case.fields, step_tokens);
            assert_eq!(whole(&answer, 0), expected, "{context:?}");
            body["stream"] = json!(true);
            let (events, done) = bench.stream(CHAT, &body).await;
            assert!(done);
            assert_eq!(joined(&events, 0), expected, "streamed: {context:?}");
        }
    }
    bench.mesh.settled().await;
}

#[tokio::test]
async fn a_call_that_is_cut_off_ends_by_its_length() {
    let bench = hermes().await;
    let output = "<tool_call>{\"name\": \"look\", \"arguments\": {\"city\": \"Oslo, Bergen and Tromso\"}}</tool_call>";
    bench.mesh.reply(output);
    let cut = 50;
    let mut body = asks(&json!({"max_tokens": cut}));
    let (_, answer) = bench.json(CHAT, &body).await;
    let answer = whole(&answer, 0);
    // No client can use half of a call, so the text comes as it is.
    let text = answer["content"].as_str().unwrap();
    assert!(output.starts_with(text) && text.len() >= cut, "{text}");
    assert_eq!(
        (&answer["calls"], &answer["finish"]),
        (&json!([]), &json!("length"))
    );
    body["stream"] = json!(true);
    let (events, _) = bench.stream(CHAT, &body).await;
    let streamed = joined(&events, 0);
    assert_eq!(streamed["finish"], "length");
    assert_eq!(streamed["calls"][0][0], "look");
    assert!(
        "{\"city\": \"Oslo, Bergen and Tromso\"}"
            .starts_with(streamed["calls"][0][1].as_str().unwrap())
    );
}

#[tokio::test]
async fn choices_have_calls_of_their_own_and_logprobs_stay_complete() {
    let bench = hermes().await;
    bench.mesh.reply(CALLS);
    let fields = json!({"n": 2, "logprobs": true});
    let (_, answer) = bench.json(CHAT, &asks(&fields)).await;
    let tokens = bench.mesh.script().reply.len();
    let mut ids = std::collections::BTreeSet::new();
    for index in 0..2 {
        assert_eq!(whole(&answer, index)["finish"], "tool_calls");
        let choice = &answer["choices"][index];
        let logprobs = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(logprobs.len(), tokens);
        for call in choice["message"]["tool_calls"].as_array().unwrap() {
            ids.insert(call["id"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(ids.len(), 4, "an id came twice");
    let mut body = asks(&fields);
    body["stream"] = json!(true);
    let (events, _) = bench.stream(CHAT, &body).await;
    let entries = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap())
        .filter_map(|choice| choice["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum::<usize>();
    assert_eq!(entries, 2 * tokens);
}

#[tokio::test]
async fn special_tokens_mark_reasoning_and_are_counted() {
    // The tokens of ChatML have no text that a client sees, so they are found as tokens or not at all.
    let config = with_parsers("none", "<|im_start|>...<|endoftext|>");
    let bench = Bench::with(config).await;
    let said = [
        vec![1],
        bench.mesh.tokenizer().encode("hm ST").unwrap(),
        vec![0],
        bench.mesh.tokenizer().encode("OP hi").unwrap(),
        vec![2],
    ]
    .concat();
    bench.mesh.script().reply = said.clone();
    for step_tokens in [1, 4, 100] {
        bench.mesh.script().step_tokens = step_tokens;
        // No stop text reaches across the end of the reasoning.
        let (_, answer) = bench.chat(json!({"stop": "STOP"})).await;
        let message = whole(&answer, 0);
        assert_eq!(
            (&message["reasoning"], &message["content"]),
            (&json!("hm ST"), &json!("OP hi"))
        );
        let usage = &answer["usage"];
        assert_eq!(usage["completion_tokens"], said.len());
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 7);
    }
}

#[tokio::test]
async fn functions_are_answered_in_their_own_shape() {
    let bench = hermes().await;
    bench.mesh.reply(CALLS);
    let fields = json!({"functions": [{"name": "look", "parameters": {"type": "object"}}]});
    let (_, answer) = bench.chat(fields.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call");
    assert_eq!(
        choice["message"]["function_call"],
        json!({"name": "look", "arguments": "{\"city\": \"Oslo\"}"})
    );
    assert_eq!(choice["message"].get("tool_calls"), None);
    let mut body = chat(fields);
    body["stream"] = json!(true);
    let (events, _) = bench.stream(CHAT, &body).await;
    let part = |event: &Value, field: &str| {
        let call = &event["choices"][0]["delta"]["function_call"];
        call[field].as_str().unwrap_or_default().to_owned()
    };
    let all = |field| {
        events
            .iter()
            .map(|event| part(event, field))
            .collect::<String>()
    };
    assert_eq!(
        (all("name"), all("arguments")),
        ("look".into(), "{\"city\": \"Oslo\"}".into())
    );
    assert_eq!(streamed_text(&events, 0), "Let me see.\n");
}

#[tokio::test]
async fn calls_are_counted_by_their_outcome() {
    let bench = hermes().await;
    let counted = |outcome: &str| {
        let line =
            format!("refrain_gateway_tool_calls_total{{model=\"tiny\",outcome=\"{outcome}\"}}");
        bench.metric(&line)
    };
    bench.mesh.reply(CALLS);
    bench.json(CHAT, &asks(&json!({}))).await;
    bench
        .json(CHAT, &asks(&json!({"parallel_tool_calls": false})))
        .await;
    bench.mesh.reply("<tool_call>no</tool_call>");
    bench.json(CHAT, &asks(&json!({}))).await;
    assert_eq!(
        ["parsed", "dropped", "failed"].map(counted),
        [3.0, 1.0, 1.0]
    );
}

#[tokio::test]
async fn tools_are_refused_where_the_template_cannot_show_them() {
    let bench = Bench::new().await;
    let (status, answer) = bench.json(CHAT, &asks(&json!({}))).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")));
    assert_eq!(answer["error"]["code"], "unsupported_parameter");
    // A client that wants no call loses nothing.
    let (status, _) = bench
        .json(CHAT, &asks(&json!({"tool_choice": "none"})))
        .await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn the_history_may_have_calls_and_messages_without_content() {
    let bench = hermes().await;
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let history = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "assistant", "content": null, "reasoning_content": "hm"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": null, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "rain"},
        {"role": "user", "content": []},
    ]);
    let (status, answer) = bench
        .json(CHAT, &asks(&json!({ "messages": history })))
        .await;
    assert_eq!(status, 200, "{answer}");
    for (message, param) in [
        (
            json!({"role": "assistant", "tool_calls": [{"id": "x"}]}),
            "messages[0].tool_calls[0].function",
        ),
        (
            json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (json!({"role": "tool"}), "messages[0].content"),
        (
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "messages[0].content[0].type",
        ),
    ] {
        let (status, answer) = bench
            .json(CHAT, &asks(&json!({"messages": [message]})))
            .await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)));
    }
}

#[tokio::test]
async fn a_parser_that_does_not_exist_stops_the_start() {
    for (tools, reasoning, key) in [
        ("hermse", "none", "tool_parser"),
        ("none", "qwen9", "reasoning_parser"),
    ] {
        let error = crate::mesh::start_error(with_parsers(tools, reasoning)).await;
        for part in ["model tiny", key, "hermes", "deepseek_r1"] {
            let is_of_other_kind = (part == "hermes") != (key == "tool_parser")
                && ["hermes", "deepseek_r1"].contains(&part);
            assert!(is_of_other_kind || error.contains(part), "{part}: {error}");
        }
    }
}
