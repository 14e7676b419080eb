//! The routes beside chats and text completions: Messages, Responses, tokens, health, CORS.

use std::path::Path;

use refrain_gateway::GatewayConfig;
use refrain_tokenization::testing::byte_level_files;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::mesh::{Bench, config};

fn request(bench: &Bench, method: Method, path: &str) -> RequestBuilder {
    let url = format!("{}{path}", bench.url);
    bench.client.request(method, url).bearer_auth("sk-acme")
}

async fn answer(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(json!(text)))
}

async fn post(bench: &Bench, path: &str, body: Value) -> (u16, Value) {
    answer(request(bench, Method::POST, path).json(&body)).await
}

/// The events of a stream, which begin with their names.
async fn events(bench: &Bench, path: &str, body: Value) -> Vec<Value> {
    let (status, text) = post(bench, path, body).await;
    assert_eq!(status, 200, "{text}");
    let text = text.as_str().unwrap().to_owned();
    let frames = text.split_terminator("\n\n").map(|frame| {
        let (name, data) = frame.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), event["type"]);
        event
    });
    frames.collect()
}

fn message(fields: &Value) -> Value {
    let mut body = json!({
        "model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "say hello"}],
    });
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn a_message_is_answered_whole_and_streamed() {
    let bench = Bench::new().await;
    bench.mesh.reply("hello there");
    let (status, whole) = post(&bench, "/v1/messages", message(&json!({}))).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!(
        whole["content"],
        json!([{"type": "text", "text": "hello there"}])
    );
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("end_turn"))
    );
    assert!(whole["usage"]["input_tokens"].as_u64().unwrap() > 0);
    let events = events(&bench, "/v1/messages", message(&json!({"stream": true}))).await;
    let texts = events
        .iter()
        .filter_map(|event| event["delta"]["text"].as_str());
    assert_eq!(texts.collect::<String>(), "hello there");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let end = &events[events.len() - 2];
    assert_eq!(
        end["usage"]["output_tokens"],
        whole["usage"]["output_tokens"]
    );
}

#[tokio::test]
async fn a_message_names_the_stop_text_that_ended_it() {
    let bench = Bench::new().await;
    bench.mesh.reply("one two three");
    let body = message(&json!({"stop_sequences": ["never", "two"]}));
    let (_, whole) = post(&bench, "/v1/messages", body).await;
    assert_eq!(whole["content"][0]["text"], "one ");
    assert_eq!(
        (&whole["stop_reason"], &whole["stop_sequence"]),
        (&json!("stop_sequence"), &json!("two"))
    );
    let (_, whole) = post(&bench, "/v1/messages", message(&json!({"max_tokens": 2}))).await;
    assert_eq!(whole["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn errors_of_messages_have_the_shape_of_their_api() {
    let bench = Bench::new().await;
    for (fields, status, kind) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error"),
        (json!({"temperature": 9}), 400, "invalid_request_error"),
        (
            json!({"tool_choice": {"type": "any"}}),
            400,
            "invalid_request_error",
        ),
        (json!({"model": "nobody"}), 404, "not_found_error"),
    ] {
        let (found, error) = post(&bench, "/v1/messages", message(&fields)).await;
        assert_eq!(found, status, "{error}");
        assert_eq!(
            (&error["type"], &error["error"]["type"]),
            (&json!("error"), &json!(kind))
        );
        assert!(!error["error"]["message"].as_str().unwrap().is_empty());
    }
    let keyless = || bench.client.post(format!("{}/v1/messages", bench.url));
    let strangers = [
        keyless(),
        keyless().bearer_auth("nobody"),
        keyless().header("x-api-key", "nobody"),
    ];
    for request in strangers {
        let (status, error) = answer(request.json(&message(&json!({})))).await;
        assert_eq!(
            (status, &error["error"]["type"]),
            (401, &json!("authentication_error"))
        );
    }
}

#[tokio::test]
async fn the_key_may_come_in_the_header_of_other_clients() {
    let bench = Bench::new().await;
    let url = format!("{}/v1/messages", bench.url);
    let request = bench.client.post(url).header("x-api-key", "sk-acme");
    let request = request.header("anthropic-version", "2023-06-01");
    assert_eq!(answer(request.json(&message(&json!({})))).await.0, 200);
    let list = bench.client.get(format!("{}/v1/models", bench.url));
    assert_eq!(answer(list.header("x-api-key", "sk-acme")).await.0, 200);
}

#[tokio::test]
async fn tokens_are_counted_as_an_answer_counts_them() {
    let bench = Bench::new().await;
    let mut body = message(&json!({}));
    let (_, whole) = post(&bench, "/v1/messages", body.clone()).await;
    body.as_object_mut().unwrap().remove("max_tokens");
    let (status, count) = post(&bench, "/v1/messages/count_tokens", body.clone()).await;
    let (input, cached) = ("input_tokens", "cache_read_input_tokens");
    let said = |name: &str| whole["usage"][name].as_u64().unwrap();
    assert_eq!(
        (status, &count["input_tokens"]),
        (200, &json!(said(input) + said(cached)))
    );
    let (_, tokens) = post(&bench, "/tokenize", body).await;
    assert_eq!(tokens["count"], count["input_tokens"]);
    // Nothing was generated for it.
    assert_eq!(bench.mesh.log().chunks.len(), 1);
    assert_eq!(bench.metric("refrain_gateway_requests_in_flight"), 0.0);
}

/// A report of `refrain analyze` on two calls, or what it says.
async fn analyzed(tokenizer: &str, key: &str) -> Result<Value, String> {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("calls.jsonl");
    let call = json!({"prompt": "say <|im_end|> twice", "output": "It is here again. ".repeat(11)});
    std::fs::write(&log, format!("{call}\n{call}\n")).unwrap();
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_refrain"));
    command.env("REFRAIN_API_KEY", key);
    command.args(["analyze", "--json", "--concurrency", "1", "--tokenizer"]);
    let output = command.args([Path::new(tokenizer), &log]).output().await;
    let output = output.unwrap();
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

#[tokio::test]
async fn logs_are_read_by_the_tokenizer_of_a_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, byte_level_files().tokenizer_json).unwrap();
    let by_file = analyzed(file.to_str().unwrap(), "").await.unwrap();
    assert!(by_file["passages"][0].is_object(), "{by_file}");
    let bench = Bench::new().await;
    for url in [&bench.url, &format!("{}/v1/", bench.url)] {
        let by_url = analyzed(url, "sk-acme").await.unwrap();
        for figures in ["passages", "rows", "speeds", "tokens_read"] {
            assert_eq!(by_url[figures], by_file[figures], "{figures}");
        }
    }
    let nothing = "http://127.0.0.1:1".to_owned();
    for (url, key, wanted) in [
        (&bench.url, "sk-wrong", "REFRAIN_API_KEY"),
        (&nothing, "", "a running gateway"),
        (
            &format!("{}/nothing", bench.url),
            "sk-acme",
            "POST /tokenize",
        ),
    ] {
        let said = analyzed(url, key).await.unwrap_err();
        assert!(
            said.contains(wanted) && said.contains("--tokenizer http"),
            "{said}"
        );
    }
}

#[tokio::test]
async fn texts_become_tokens_and_tokens_become_texts() {
    let bench = Bench::new().await;
    let asked = json!({"model": "tiny", "prompt": "a<|im_end|>", "return_token_strs": true, "add_special_tokens": false});
    let (status, tokens) = post(&bench, "/tokenize", asked).await;
    assert_eq!(status, 200, "{tokens}");
    assert_eq!(tokens["max_model_len"], 256);
    let ids = tokens["tokens"].as_array().unwrap();
    assert_eq!(tokens["count"], ids.len());
    let texts = tokens["token_strs"].as_array().unwrap();
    let joined: String = texts.iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(joined, "a<|im_end|>");
    // A tenant with one model need not name it.
    let (status, text) = post(
        &bench,
        "/detokenize",
        json!({"model": "tiny", "tokens": ids}),
    )
    .await;
    assert_eq!((status, &text["prompt"]), (200, &json!("a<|im_end|>")));
    for (path, body, param) in [
        ("/tokenize", json!({"model": "tiny", "prompt": 7}), "prompt"),
        (
            "/tokenize",
            json!({"model": "tiny", "prompt": "a".repeat(9_000)}),
            "prompt",
        ),
        ("/tokenize", json!({"model": "tiny"}), "messages"),
        (
            "/detokenize",
            json!({"model": "tiny", "tokens": [999_999]}),
            "tokens",
        ),
    ] {
        let (status, error) = post(&bench, path, body).await;
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(param)),
            "{error}"
        );
    }
    let keyless = bench.client.post(format!("{}/tokenize", bench.url));
    assert_eq!(answer(keyless.json(&json!({"prompt": "a"}))).await.0, 401);
}

#[tokio::test]
async fn a_response_is_answered_whole_and_streamed_and_continued() {
    let bench = Bench::new().await;
    bench.mesh.reply("hello there");
    let body = json!({"model": "tiny", "input": "say hello", "max_output_tokens": 40, "instructions": "be kind"});
    let (status, whole) = post(&bench, "/v1/responses", body.clone()).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!(whole["output"][0]["content"][0]["text"], "hello there");
    assert_eq!(
        (&whole["status"], &whole["store"]),
        (&json!("completed"), &json!(true))
    );
    let id = whole["id"].as_str().unwrap();
    let path = format!("/v1/responses/{id}");
    assert_eq!(
        answer(request(&bench, Method::GET, &path)).await,
        (200, whole.clone())
    );
    let stranger = bench.client.get(format!("{}{path}", bench.url));
    assert_eq!(answer(stranger.bearer_auth("sk-bolt")).await.0, 404);
    let mut next = body.clone();
    next["previous_response_id"] = json!(id);
    next["stream"] = json!(true);
    next["store"] = json!(false);
    let events = events(&bench, "/v1/responses", next.clone()).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(
        last["response"]["output"][0]["content"][0]["text"],
        "hello there"
    );
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    assert!(
        tokens(&last["response"]) > tokens(&whole),
        "the conversation is missing"
    );
    let unstored = format!("/v1/responses/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(answer(request(&bench, Method::GET, &unstored)).await.0, 404);
    assert_eq!(bench.metric("refrain_gateway_responses_stored"), 1.0);
    let (_, deleted) = answer(request(&bench, Method::DELETE, &path)).await;
    assert_eq!(deleted["deleted"], true);
    let (status, error) = post(&bench, "/v1/responses", next).await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (400, &json!("previous_response_not_found"))
    );
}

#[tokio::test]
async fn the_input_of_a_stored_response_is_listed_and_counted() {
    let bench = Bench::new().await;
    bench.mesh.reply("hello there");
    let body = json!({"model": "tiny", "input": "say hello", "max_output_tokens": 40});
    let (_, first) = post(&bench, "/v1/responses", body.clone()).await;
    let mut next = body.clone();
    next["previous_response_id"] = first["id"].clone();
    next["input"] = json!("say it again");
    let (status, counted) = post(&bench, "/v1/responses/input_tokens", next.clone()).await;
    let (_, second) = post(&bench, "/v1/responses", next).await;
    assert_eq!(
        (status, counted),
        (
            200,
            json!({
                "object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"],
            })
        )
    );
    let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
    let list = format!("{path}/input_items");
    let get = async |query: &str| {
        let path = format!("{list}{query}");
        answer(request(&bench, Method::GET, &path)).await
    };
    let (status, page) = get("?order=asc").await;
    assert_eq!(status, 200, "{page}");
    let texts = page["data"].as_array().unwrap().iter();
    let texts: Vec<_> = texts.map(|item| &item["content"][0]["text"]).collect();
    assert_eq!(texts, ["say hello", "hello there", "say it again"]);
    let (_, page) = get("?limit=1&include[]=reasoning.encrypted_content").await;
    assert_eq!(page["data"][0]["content"][0]["text"], "say it again");
    assert_eq!(page["has_more"], true);
    for query in ["?limit=0", "?limit=x", "?order=up", "?after=msg_1"] {
        let (status, error) = get(query).await;
        let kind = &error["error"]["type"];
        assert_eq!((status, kind), (400, &json!("invalid_request_error")));
    }
    let stranger = bench.client.get(format!("{}{list}", bench.url));
    assert_eq!(answer(stranger.bearer_auth("sk-bolt")).await.0, 404);
    let again = format!("{path}?stream=true");
    assert_eq!(answer(request(&bench, Method::GET, &again)).await.0, 400);
    let cancel = format!("{path}/cancel");
    let (status, error) = answer(request(&bench, Method::POST, &cancel)).await;
    assert_eq!(status, 400, "{error}");
    answer(request(&bench, Method::DELETE, &path)).await;
    assert_eq!(get("").await.0, 404);
    let cancelled = answer(request(&bench, Method::POST, &cancel)).await;
    assert_eq!(cancelled.0, 404);
}

#[tokio::test]
async fn a_message_with_a_wrong_method_is_refused_in_the_shape_of_its_api() {
    let bench = Bench::new().await;
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let sent = request(&bench, Method::GET, path).send().await.unwrap();
        assert_eq!(
            (sent.status().as_u16(), &sent.headers()["allow"]),
            (405, &"POST".parse().unwrap())
        );
        let error: Value = sent.json().await.unwrap();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
}

#[tokio::test]
async fn a_list_in_the_place_of_an_object_is_refused_by_the_name_of_its_field() {
    let bench = Bench::new().await;
    let chat = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": true,
    });
    for (field, value) in [
        ("stream_options", json!([true])),
        ("stream_options", json!([])),
        ("response_format", json!(["text"])),
        ("chat_template_kwargs", json!([])),
        ("logit_bias", json!([[1, 2]])),
    ] {
        let mut body = chat.clone();
        body[field] = value;
        let (status, error) = post(&bench, "/v1/chat/completions", body).await;
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(field)),
            "{error}"
        );
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("must be an object"), "{message}");
    }
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/detokenize",
    ] {
        let (status, error) = post(&bench, path, json!(["tiny", [1]])).await;
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            status == 400 && message.contains("object"),
            "{path}: {status} {error}"
        );
    }
}

#[tokio::test]
async fn a_response_that_is_refused_names_the_field_of_its_api() {
    let bench = Bench::new().await;
    for (field, value, param) in [
        ("input", json!("a b ".repeat(500)), "input"),
        ("tools", json!([{"type": "odd"}]), "tools[0].type"),
        (
            "text",
            json!({"format": {"type": "json_schema", "name": "n"}}),
            "text.format.schema",
        ),
        ("tool_choice", json!("required"), "tool_choice"),
    ] {
        let mut body = json!({"model": "tiny", "input": "a"});
        body[field] = value;
        let (status, error) = post(&bench, "/v1/responses", body).await;
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(param)),
            "{error}"
        );
    }
}

#[tokio::test]
async fn health_and_version_need_no_key() {
    let bench = Bench::new().await;
    let get = |path: &str| bench.client.get(format!("{}{path}", bench.url));
    for path in ["/health", "/ping"] {
        assert_eq!(answer(get(path)).await, (200, json!("")), "{path}");
    }
    let (status, version) = answer(get("/version")).await;
    assert_eq!(
        (status, &version["version"]),
        (200, &json!(env!("CARGO_PKG_VERSION")))
    );
    assert_eq!(
        answer(bench.client.post(format!("{}/ping", bench.url)))
            .await
            .0,
        200
    );
}

#[tokio::test]
async fn an_unknown_route_is_named_without_its_query() {
    let bench = Bench::new().await;
    let (status, error) = answer(request(&bench, Method::GET, "/v1/nothing?secret=1")).await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (404, &json!("unknown_url"))
    );
    assert_eq!(error["error"]["message"], "no such route: GET /v1/nothing");
}

#[tokio::test]
async fn web_pages_of_the_configured_origins_may_call() {
    let preflight = async |bench: &Bench| {
        let request = bench
            .client
            .request(
                Method::OPTIONS,
                format!("{}/v1/chat/completions", bench.url),
            )
            .header("origin", "https://chat.example.com")
            .header("access-control-request-method", "POST")
            .header(
                "access-control-request-headers",
                "authorization,content-type",
            );
        request.send().await.unwrap()
    };
    let config = GatewayConfig {
        cors_origins: vec!["https://chat.example.com".into()],
        ..config()
    };
    let bench = Bench::with(config).await;
    let response = preflight(&bench).await;
    assert_eq!(response.status(), 200);
    let origin = "access-control-allow-origin";
    assert_eq!(response.headers()[origin], "https://chat.example.com");
    let request = request(&bench, Method::GET, "/v1/models");
    let request = request.header("origin", "https://evil.example.com");
    assert!(
        request
            .send()
            .await
            .unwrap()
            .headers()
            .get(origin)
            .is_none()
    );
    let closed = Bench::new().await;
    let response = preflight(&closed).await;
    assert_eq!(response.status(), 405);
    assert!(response.headers().get(origin).is_none());
}

#[tokio::test]
async fn model_cards_have_the_length_of_the_context() {
    let bench = Bench::new().await;
    let (_, list) = answer(request(&bench, Method::GET, "/v1/models")).await;
    assert_eq!(list["data"][0]["max_model_len"], 256);
}
