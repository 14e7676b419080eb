//! Calls of further trainers: chats with the tokens of their prompts, load by vLLM's names, and clear refusals.

use reqwest::Method;
use serde_json::{Value, json};

use crate::trainer::Lab;

/// A chat as the session server of miles sends it to its router.
fn chat_of_tokens(lab: &Lab) -> Value {
    json!({
        "model": "default", "messages": [{"role": "user", "content": "not what the tokens say"}], "max_tokens": 4,
        "input_ids": lab.ids("the tokens"), "logprobs": true, "return_meta_info": true, "no_stop_trim": false,
        "return_routed_experts": false, "rid": "one",
    })
}

#[tokio::test]
async fn a_chat_may_give_its_prompt_as_tokens_and_ask_for_the_facts_about_its_output() {
    let lab = Lab::new().await;
    let body = chat_of_tokens(&lab);
    let request = lab
        .request(Method::POST, "/v1/chat/completions")
        .json(&body);
    let request = request.header("x-smg-routing-key", "0123456789abcdef0123456789abcdef");
    let answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let answer: Value = answer.json().await.unwrap();
    let ids = lab.ids("the tokens").len();
    assert_eq!(answer["usage"]["prompt_tokens"], ids, "{answer}");
    let facts = &answer["choices"][0]["meta_info"];
    assert_eq!(facts["id"], "one");
    assert_eq!(facts["prompt_tokens"], ids);
    let logprobs = facts["output_token_logprobs"].as_array().unwrap();
    assert_eq!(
        Some(logprobs.len() as u64),
        facts["completion_tokens"].as_u64()
    );
    assert_eq!(
        facts["completion_tokens"],
        answer["usage"]["completion_tokens"]
    );
    assert!(answer["choices"][0]["message"]["content"].is_string());
    assert_eq!(facts["weight_version"], "7");

    for (field, value) in [
        ("stream", json!(true)),
        ("input_ids", json!([])),
        ("input_ids", json!([1_000_000])),
        ("input_ids", json!("text")),
        ("return_routed_experts", json!(true)),
        ("return_indexer_topk", json!(true)),
        ("return_hidden_states", json!(true)),
        ("required_prefix_token_ids", json!([1])),
        ("no_stop_trim", json!(true)),
    ] {
        let mut body = body.clone();
        body[field] = value;
        let (status, answer) = lab.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{field}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        let names = if field == "stream" {
            "return_meta_info"
        } else {
            field
        };
        assert!(message.contains(names), "{field}: {message}");
    }
    let (status, answer) = lab.post("/sessions/s/v1/chat/completions", &body).await;
    assert_eq!(status, 400, "{answer}");
}

#[tokio::test]
async fn completions_take_the_word_of_chats_for_log_probabilities() {
    let lab = Lab::new().await;
    let of = async |logprobs: Value| {
        let body = json!({"prompt": lab.ids("abc"), "max_tokens": 3, "logprobs": logprobs});
        let (status, answer) = lab.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["logprobs"].clone()
    };
    assert_eq!(of(json!(true)).await, of(json!(0)).await);
    assert!(of(json!(false)).await.is_null());
}

#[tokio::test]
async fn the_load_has_the_names_of_vllm() {
    let lab = Lab::new().await;
    let page = lab.request(Method::GET, "/metrics").send().await.unwrap();
    assert_eq!(page.status(), 200);
    let page = page.text().await.unwrap();
    for series in [
        "vllm:num_requests_running{engine=\"0\"} 0",
        "vllm:num_requests_waiting{engine=\"0\"} 0",
        "vllm:num_preemptions_total{engine=\"0\"} 0",
    ] {
        assert!(page.lines().any(|line| line == series), "{page}");
    }
}

#[tokio::test]
async fn calls_that_cannot_work_say_what_to_do_instead() {
    let lab = Lab::new().await;
    for (path, advice) in [
        ("/init_communicator/", "AsyncGRPOTrainer"),
        ("/generate/", "AsyncGRPOTrainer"),
        ("/skyrl/v1/generate", "enable_return_routed_experts"),
        ("/fetch_weights", "broadcast"),
        ("/api/v1/asample", "this URL"),
    ] {
        let (status, answer) = lab.post(path, &json!({})).await;
        assert_eq!(status, 400, "{path}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.contains(advice) && message.contains(path),
            "{message}"
        );
    }
    let (status, answer) = lab
        .post("/collective_rpc", &json!({"method": "exec"}))
        .await;
    assert_eq!(
        (status, answer["error"]["param"].as_str()),
        (400, Some("method"))
    );
    assert_eq!(
        lab.post("/finish_session?session_id=x", &json!({})).await.0,
        200
    );
    let health = lab.request(Method::GET, "/health/").send().await.unwrap();
    assert_eq!(health.status(), 200, "a client of TRL would wait for ever");
}
