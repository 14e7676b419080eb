//! Requests that cannot be carried out, with the status, type, parameter and code of each.

use serde_json::{Value, json};

use crate::mesh::{Bench, chat};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// The path, the body, the status, the parameter at fault, and the code.
type Case<'a> = (&'a str, Value, u16, Option<&'a str>, Option<&'a str>);

#[tokio::test]
async fn bad_requests_are_refused_with_the_field_at_fault() {
    let bench = Bench::new().await;
    let unsupported = Some("unsupported_parameter");
    let text = |fields: Value| {
        let mut body = json!({"model": "tiny", "prompt": "a"});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let message = |message: Value| chat(json!({"messages": [message]}));
    let long = "x".repeat(300);
    let cases: Vec<Case> = vec![
        (
            CHAT,
            chat(json!({"model": "huge"})),
            404,
            Some("model"),
            Some("model_not_found"),
        ),
        (CHAT, json!({"messages": []}), 400, Some("model"), None),
        (CHAT, json!({"model": "tiny"}), 400, Some("messages"), None),
        (
            CHAT,
            chat(json!({"messages": []})),
            400,
            Some("messages"),
            None,
        ),
        (
            CHAT,
            message(json!({"role": "oracle", "content": "a"})),
            400,
            Some("messages[0].role"),
            None,
        ),
        (
            CHAT,
            message(json!({"role": "user"})),
            400,
            Some("messages[0].content"),
            None,
        ),
        (
            CHAT,
            message(json!({"role": "user", "content": 7})),
            400,
            Some("messages[0].content"),
            None,
        ),
        (
            CHAT,
            message(json!({"content": "a"})),
            400,
            Some("messages[0].role"),
            None,
        ),
        (
            CHAT,
            message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})),
            400,
            Some("messages[0].content[0].type"),
            None,
        ),
        (
            CHAT,
            chat(json!({"temperature": 2.5})),
            400,
            Some("temperature"),
            None,
        ),
        (
            CHAT,
            chat(json!({"temperature": "hot"})),
            400,
            Some("temperature"),
            None,
        ),
        (CHAT, chat(json!({"top_p": -0.1})), 400, Some("top_p"), None),
        (CHAT, chat(json!({"top_k": -2})), 400, Some("top_k"), None),
        (CHAT, chat(json!({"min_p": 1.5})), 400, Some("min_p"), None),
        (CHAT, chat(json!({"n": 0})), 400, Some("n"), None),
        (CHAT, chat(json!({"n": 129})), 400, Some("n"), None),
        (
            CHAT,
            chat(json!({"stop": vec!["a"; 65]})),
            400,
            Some("stop"),
            None,
        ),
        (CHAT, chat(json!({"stop": ""})), 400, Some("stop"), None),
        (
            CHAT,
            chat(json!({"top_logprobs": 2})),
            400,
            Some("top_logprobs"),
            None,
        ),
        (
            CHAT,
            chat(json!({"logprobs": true, "top_logprobs": 21})),
            400,
            Some("top_logprobs"),
            None,
        ),
        (
            CHAT,
            chat(json!({"logit_bias": {"a": 1}})),
            400,
            Some("logit_bias"),
            None,
        ),
        (
            CHAT,
            chat(json!({"logit_bias": {"1": 101}})),
            400,
            Some("logit_bias"),
            None,
        ),
        (
            CHAT,
            chat(json!({"logit_bias": {"999999": 1}})),
            400,
            Some("logit_bias"),
            None,
        ),
        (
            CHAT,
            chat(json!({"stop_token_ids": [999999]})),
            400,
            Some("stop_token_ids"),
            None,
        ),
        (
            CHAT,
            chat(json!({"presence_penalty": 2.5})),
            400,
            Some("presence_penalty"),
            None,
        ),
        (
            CHAT,
            chat(json!({"frequency_penalty": -2.5})),
            400,
            Some("frequency_penalty"),
            None,
        ),
        (
            CHAT,
            chat(json!({"prediction": {"type": "thought", "content": "a"}})),
            400,
            Some("prediction.type"),
            None,
        ),
        (
            CHAT,
            chat(json!({"prediction": {"type": "content", "content": [{"type": "image_url"}]}})),
            400,
            Some("prediction.content[0].type"),
            None,
        ),
        (
            CHAT,
            chat(json!({"prediction": {"type": "content", "content": "a".repeat(300)}})),
            400,
            Some("prediction.content"),
            None,
        ),
        (
            CHAT,
            chat(json!({"response_format": {"type": "structural_tag"}})),
            400,
            Some("response_format"),
            unsupported,
        ),
        (
            CHAT,
            chat(json!({"tool_choice": "required"})),
            400,
            Some("tool_choice"),
            None,
        ),
        (
            CHAT,
            chat(json!({"response_format": {"type": "json_object"}, "guided_regex": "a"})),
            400,
            Some("guided_regex"),
            None,
        ),
        (
            CHAT,
            chat(json!({"stream_options": {"include_usage": true}})),
            400,
            Some("stream_options"),
            None,
        ),
        (
            CHAT,
            chat(json!({"speculation": "always"})),
            400,
            Some("speculation"),
            None,
        ),
        (
            CHAT,
            chat(json!({"priority": 0.5})),
            400,
            Some("priority"),
            None,
        ),
        (
            CHAT,
            chat(json!({"tpot_ms": 60_001})),
            400,
            Some("tpot_ms"),
            None,
        ),
        (
            CHAT,
            chat(json!({"session": long})),
            400,
            Some("session"),
            None,
        ),
        (
            CHAT,
            chat(json!({"max_tokens": 0})),
            400,
            Some("max_tokens"),
            None,
        ),
        (
            CHAT,
            message(json!({"role": "user", "content": long})),
            400,
            Some("messages"),
            Some("context_length_exceeded"),
        ),
        (TEXT, text(json!({"prompt": []})), 400, Some("prompt"), None),
        (TEXT, text(json!({"prompt": ""})), 400, Some("prompt"), None),
        (
            TEXT,
            text(json!({"prompt": [999999]})),
            400,
            Some("prompt"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt": {"a": 1}})),
            400,
            Some("prompt"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt": vec!["a"; 129]})),
            400,
            Some("prompt"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt": ["a", "b"], "n": 100})),
            400,
            Some("n"),
            None,
        ),
        (
            TEXT,
            text(json!({"logprobs": 6})),
            400,
            Some("logprobs"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt_logprobs": 6})),
            400,
            Some("prompt_logprobs"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt_logprobs": 1, "stream": true})),
            400,
            Some("prompt_logprobs"),
            None,
        ),
        (
            TEXT,
            text(json!({"best_of": 2, "n": 3})),
            400,
            Some("best_of"),
            None,
        ),
        (
            TEXT,
            text(json!({"best_of": 3, "stream": true})),
            400,
            Some("best_of"),
            None,
        ),
        (
            TEXT,
            text(json!({"best_of": 129})),
            400,
            Some("best_of"),
            None,
        ),
        (
            TEXT,
            text(json!({"prompt": vec![[5]; 100], "best_of": 100})),
            400,
            Some("best_of"),
            None,
        ),
        (
            TEXT,
            text(json!({"suffix": "s"})),
            400,
            Some("suffix"),
            unsupported,
        ),
        (
            TEXT,
            text(json!({"prompt": long})),
            400,
            Some("prompt"),
            Some("context_length_exceeded"),
        ),
    ];
    for (path, body, status, param, code) in cases {
        let (got, answer) = bench.json(path, &body).await;
        let error = &answer["error"];
        assert_eq!(got, status, "{body} gave {answer}");
        assert_eq!(error["type"], "invalid_request_error", "{body}");
        assert_eq!(error["param"].as_str(), param, "{body} gave {answer}");
        assert_eq!(error["code"].as_str(), code, "{body} gave {answer}");
        assert_eq!(error.as_object().unwrap().len(), 4);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
    }
    assert!(bench.mesh.log().leases.is_empty());
    assert_eq!(
        bench.metric("refrain_gateway_rejections_total{limit=\"context\"}"),
        2.0
    );
}

#[tokio::test]
async fn a_body_that_is_not_json_is_refused() {
    let bench = Bench::new().await;
    let deep = "[".repeat(100_000);
    let half = "{\"model\":\"tiny\",\"messages\":[";
    for body in [
        "",
        "{",
        "nonsense",
        half,
        &deep,
        "{\"model\":\"tiny\"} x",
        "\u{0}",
    ] {
        let request = bench
            .client
            .post(format!("{}{CHAT}", bench.url))
            .bearer_auth("sk-acme");
        let response = request.body(body.to_owned()).send().await.unwrap();
        assert_eq!(response.status(), 400);
        let answer: Value = response.json().await.unwrap();
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        assert_eq!(answer["error"].as_object().unwrap().len(), 4);
    }
    let request = bench
        .client
        .post(format!("{}{CHAT}", bench.url))
        .bearer_auth("sk-acme");
    assert_eq!(
        request.body(vec![0xff; 64]).send().await.unwrap().status(),
        400
    );
}

#[tokio::test]
async fn callers_without_a_key_are_refused() {
    let bench = Bench::new().await;
    for key in [None, Some("sk-wrong")] {
        for path in [CHAT, "/v1/models"] {
            let url = format!("{}{path}", bench.url);
            let mut request = if path == CHAT {
                bench.client.post(url)
            } else {
                bench.client.get(url)
            };
            if let Some(key) = key {
                request = request.bearer_auth(key);
            }
            let response = request.body("not even JSON").send().await.unwrap();
            assert_eq!(response.status(), 401);
            let answer: Value = response.json().await.unwrap();
            assert_eq!(answer["error"]["code"], "invalid_api_key");
        }
    }
    let response = bench
        .client
        .get(format!("{}/v1/nothing", bench.url))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 404);
    assert!(response.json::<Value>().await.unwrap()["error"].is_object());
}
