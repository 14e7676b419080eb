//! Trainers, request by request, as their code sends them: slime, miles, AReaL, prime-rl and vime.

use refrain_tokenization::testing::IM_END;
use reqwest::Method;
use serde_json::{Value, json};

use crate::mesh::Mishap;
use crate::trainer::Lab;

/// A rollout of slime.
fn slime(ids: &[u32]) -> Value {
    json!({
        "input_ids": ids,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "stop": null,
            "stop_token_ids": null, "skip_special_tokens": false, "no_stop_trim": true,
            "spaces_between_special_tokens": false, "sampling_seed": 42,
        },
        "return_logprob": true,
    })
}

/// Tokens and log-probabilities as slime and AReaL read them.
fn scored(meta: &Value) -> (Vec<u64>, Vec<f64>) {
    let rows = meta["output_token_logprobs"].as_array().unwrap();
    let ids = rows.iter().map(|row| row[1].as_u64().unwrap()).collect();
    let logprobs = rows.iter().map(|row| row[0].as_f64().unwrap()).collect();
    assert!(rows.iter().all(|row| row[2].is_null()));
    (ids, logprobs)
}

#[tokio::test]
async fn slime_reads_tokens_log_probabilities_versions_and_drafts() {
    let lab = Lab::new().await;
    lab.bench.mesh.script().versions = vec![0, 0, 3];
    let (status, answer) = lab.post("/generate", &slime(&lab.ids("abc"))).await;
    assert_eq!(status, 200, "{answer}");
    let reply = lab.bench.mesh.script().reply.clone();
    let meta = &answer["meta_info"];
    let (ids, logprobs) = scored(meta);
    assert_eq!(
        ids,
        reply.iter().map(|id| u64::from(*id)).collect::<Vec<_>>()
    );
    assert!(logprobs.iter().all(|logprob| *logprob == -1.0));
    // The end token is not trimmed, and special tokens have text.
    assert_eq!(answer["text"], "hello world, this is the answer<|im_end|>");
    assert_eq!(answer["output_ids"].as_array().unwrap().len(), reply.len());
    assert_eq!(
        meta["finish_reason"],
        json!({"type": "stop", "matched": IM_END})
    );
    assert_eq!(meta["weight_version"], "3");
    let length = reply.len();
    let spans =
        json!([{"start": 0, "end": 6, "version": 0}, {"start": 6, "end": length, "version": 3}]);
    assert_eq!(meta["weight_versions"], spans);
    let steps = length.div_ceil(3);
    for (field, number) in [
        ("prompt_tokens", 3),
        ("completion_tokens", length),
        ("cached_tokens", 3),
        ("spec_verify_ct", steps),
        ("spec_draft_token_num", 4 * steps),
        ("spec_accept_token_num", length - steps),
        ("output_token_logprobs_length", length),
    ] {
        assert_eq!(meta[field], json!(number), "{field}");
    }
    assert!(meta["id"].is_string());
    let log = lab.bench.mesh.log();
    let sampling = &log.chunks[0].sampling;
    assert_eq!((sampling.seed, sampling.top_logprobs), (42, Some(0)));
    assert_eq!(log.chunks[0].max_new_tokens, 64);
    let done = "refrain_gateway_trainer_requests_total{route=\"/generate\",outcome=\"done\"}";
    drop(log);
    assert_eq!(lab.bench.metric(done), 1.0);
}

#[tokio::test]
async fn slime_streams_all_of_the_output_so_far() {
    let lab = Lab::new().await;
    let mut body = slime(&lab.ids("abc"));
    body["stream"] = json!(true);
    let (events, done) = lab.stream("/generate", &body).await;
    assert!(done);
    let (mut tokens, mut text) = (0, String::new());
    for (at, event) in events.iter().enumerate() {
        let (ids, _) = scored(&event["meta_info"]);
        let is_last = at + 1 == events.len();
        assert!(ids.len() > tokens || is_last, "an event without news");
        assert!(event["text"].as_str().unwrap().starts_with(&text));
        assert_eq!(event["meta_info"]["finish_reason"].is_null(), !is_last);
        tokens = ids.len();
        text = event["text"].as_str().unwrap().to_owned();
    }
    assert_eq!(tokens, lab.bench.mesh.script().reply.len());
    assert_eq!(events.last().unwrap()["meta_info"]["weight_version"], "7");
}

#[tokio::test]
async fn the_bytes_of_a_long_stream_do_not_grow_with_the_square_of_its_length() {
    let lab = Lab::new().await;
    lab.bench.mesh.reply(&"ab".repeat(100));
    lab.bench.mesh.script().step_tokens = 1;
    // Each step arrives apart.
    lab.bench.mesh.script().step_pause = std::time::Duration::from_millis(1);
    let body = json!({"input_ids": [5], "stream": true, "return_logprob": true});
    let (events, done) = lab.stream("/generate", &body).await;
    assert!(done && events.len() > 10, "{}", events.len());
    let rows: usize = events
        .iter()
        .map(|event| event["output_ids"].as_array().unwrap().len())
        .sum();
    let length = lab.bench.mesh.script().reply.len();
    assert!(rows < 20 * length, "{rows} rows for {length} tokens");
}

#[tokio::test]
async fn lists_of_prompts_and_several_samples_are_answered_as_lists() {
    let lab = Lab::new().await;
    let short = json!({"max_new_tokens": 2, "n": 2});
    let body =
        json!({"input_ids": [[5, 6], [7]], "sampling_params": short, "rid": ["first", "second"]});
    let (status, answer) = lab.post("/generate", &body).await;
    assert_eq!(status, 200, "{answer}");
    let samples = answer.as_array().unwrap();
    let ids: Vec<_> = samples
        .iter()
        .map(|one| one["meta_info"]["id"].clone())
        .collect();
    assert_eq!(ids, ["first", "first", "second", "second"]);
    for (sample, prompt) in samples.iter().zip([2, 2, 1, 1]) {
        let meta = &sample["meta_info"];
        assert_eq!(meta["prompt_tokens"], prompt);
        assert_eq!(
            meta["finish_reason"],
            json!({"type": "length", "length": 2})
        );
        assert!(
            meta.get("output_token_logprobs").is_none(),
            "nobody asked for them"
        );
    }
    let one = json!({"text": ["ab"], "sampling_params": [{"max_new_tokens": 1}]});
    let (status, answer) = lab.post("/generate", &one).await;
    assert_eq!(
        (status, answer.as_array().unwrap().len()),
        (200, 1),
        "{answer}"
    );
    let two =
        json!({"text": ["ab", "cd"], "sampling_params": [{"temperature": 0}, {"temperature": 1}]});
    assert_eq!(lab.post("/generate", &two).await.0, 400);
}

#[tokio::test]
async fn an_output_without_a_limit_may_fill_the_context() {
    let lab = Lab::new().await;
    for (path, body) in [
        ("/generate", json!({"input_ids": [5, 6]})),
        (
            "/inference/v1/generate",
            json!({"token_ids": [5, 6], "sampling_params": {}}),
        ),
        ("/v1/completions", json!({"prompt": [5, 6]})),
    ] {
        assert_eq!(lab.post(path, &body).await.0, 200, "{path}");
        let log = lab.bench.mesh.log();
        assert_eq!(log.chunks.last().unwrap().max_new_tokens, 254, "{path}");
    }
}

#[tokio::test]
async fn a_stop_text_is_named_and_kept_if_the_trainer_wants_it() {
    let lab = Lab::new().await;
    let mut body = slime(&[5]);
    body["sampling_params"]["stop"] = json!(["world"]);
    for (keeps, text) in [(true, "hello world"), (false, "hello ")] {
        body["sampling_params"]["no_stop_trim"] = json!(keeps);
        let (_, answer) = lab.post("/generate", &body).await;
        assert_eq!(answer["text"], text);
        let reason = &answer["meta_info"]["finish_reason"];
        assert_eq!(reason, &json!({"type": "stop", "matched": "world"}));
    }
}

#[tokio::test]
async fn a_prompt_can_be_scored_by_either_interface() {
    let lab = Lab::new().await;
    lab.bench.mesh.script().reply = vec![6, 7, 8];
    let mut body = json!({"input_ids": [5, 6, 7], "return_logprob": true, "sampling_params": {"max_new_tokens": 0}});
    // miles and AReaL ask for the end of the prompt only.
    for (start, rows) in [
        (
            0,
            json!([[null, 5, null], [-1.0, 6, null], [-1.0, 7, null]]),
        ),
        (1, json!([[-1.0, 6, null], [-1.0, 7, null]])),
        (9, json!([])),
    ] {
        body["logprob_start_len"] = json!(start);
        let (status, answer) = lab.post("/generate", &body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["meta_info"]["input_token_logprobs"], rows);
        assert_eq!(answer["meta_info"]["completion_tokens"], 0);
    }
    // prime-rl scores with one token of output.
    let body = json!({"model": "tiny", "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}});
    let (status, answer) = lab.post("/inference/v1/generate", &body).await;
    assert_eq!(status, 200, "{answer}");
    let scored = answer["prompt_logprobs"].as_array().unwrap();
    assert!(
        scored[0].is_null() && scored[1]["6"]["logprob"] == -1.0,
        "{answer}"
    );
    assert_eq!(answer["choices"][0]["token_ids"], json!([8]));
}

#[tokio::test]
async fn areal_continues_an_output_by_itself_through_sglangs_interface() {
    let lab = Lab::new().await;
    let mut ids = lab.ids("abc");
    let body = |ids: &[u32], left: usize| {
        json!({
            "input_ids": ids, "image_data": null, "return_logprob": true, "stream": false,
            "sampling_params": {"top_p": 1.0, "top_k": 100_000, "max_new_tokens": left, "temperature": 0.0,
                "stop_token_ids": [], "frequency_penalty": 0.0, "ignore_eos": false, "skip_special_tokens": false},
        })
    };
    let (_, answer) = lab.post("/generate", &body(&ids, 6)).await;
    let (tokens, _) = scored(&answer["meta_info"]);
    assert_eq!(tokens.len(), 6);
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "length");
    ids.extend(tokens.iter().map(|id| *id as u32));
    let (status, _) = lab.post("/generate", &body(&ids, 6)).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn areal_reads_token_ids_out_of_vllms_completions_without_a_model() {
    let lab = Lab::new().await;
    let body = json!({
        "prompt": lab.ids("abc"), "top_p": 1.0, "top_k": -1, "max_tokens": 5, "temperature": 0.0,
        "stop_token_ids": [IM_END], "return_tokens_as_token_ids": true, "logprobs": 0, "stream": false,
        "use_beam_search": false,
    });
    let (status, answer) = lab.post("/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
    let ids = tokens
        .iter()
        .map(|token| token.as_str().unwrap().split_once(':').unwrap().1);
    let ids: Vec<u32> = ids.map(|id| id.parse().unwrap()).collect();
    assert_eq!(ids, lab.bench.mesh.script().reply[..5]);
    assert_eq!(
        choice["logprobs"]["token_logprobs"],
        json!([-1.0, -1.0, -1.0, -1.0, -1.0])
    );
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(
        choice["weight_versions"],
        json!([{"start": 0, "end": 5, "version": 7}])
    );
    // The last event of a stream has the spans of the whole output, and no other event has any.
    lab.bench.mesh.script().step_tokens = 1;
    // Each step arrives apart.
    lab.bench.mesh.script().step_pause = std::time::Duration::from_millis(1);
    lab.bench.mesh.script().versions = vec![7, 7, 8];
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let (events, done) = lab.stream("/v1/completions", &streamed).await;
    assert!(done && events.len() > 1, "{events:?}");
    let (last, earlier) = events.split_last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(
        last["choices"][0]["weight_versions"],
        json!([{"start": 0, "end": 2, "version": 7}, {"start": 2, "end": 5, "version": 8}])
    );
    assert!(
        (earlier.iter()).all(|event| event["choices"][0].get("weight_versions").is_none()),
        "{earlier:?}"
    );
    // The listener of clients names tokens the same way, and says nothing of versions.
    let mut public = body;
    public["model"] = json!("tiny");
    let (status, answer) = lab.bench.json("/v1/completions", &public).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(&choice["logprobs"]["tokens"], &json!(tokens));
    assert!(choice.get("weight_versions").is_none());
}

#[tokio::test]
async fn prime_rl_evaluates_with_chats_that_can_be_aborted() {
    let lab = Lab::new().await;
    let mut body = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "abc"}], "temperature": 1.0, "max_tokens": 5,
        "logprobs": true, "top_logprobs": 0,
    });
    let (status, answer) = lab.post("/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["content"], "hello wor");
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 5);
    body["stream"] = json!(true);
    let (events, done) = lab.stream("/v1/chat/completions", &body).await;
    assert!(done && !events.is_empty());
    // One that is in flight is counted, and ends with what it has.
    lab.bench.mesh.mishap(2, Mishap::Hang(1));
    body["stream"] = json!(false);
    let sent = lab.sent("/v1/chat/completions", &body);
    lab.bench.mesh.wait_for_streams(1).await;
    assert_eq!(lab.get("/v1/loads").await.1["num_reqs"], 1);
    lab.post("/abort_request", &json!({"abort_all": true}))
        .await;
    let (status, answer) = sent.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "abort");
}

#[tokio::test]
async fn prime_rl_and_vime_read_vllms_native_interface() {
    let lab = Lab::new().await;
    let (_, models) = lab.get("/v1/models").await;
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(models["data"][0]["max_model_len"], 256);
    let body = json!({
        "model": "tiny", "token_ids": lab.ids("abc"), "cache_salt": "4", "priority": 0, "features": null,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop_token_ids": [IM_END],
            "skip_special_tokens": false, "return_token_ids": true, "cache_salt": "4",
            "routed_experts_prompt_start": 3, "seed": 9,
        },
        "request_id": "trace-1", "kv_transfer_params": null, "stream": false,
    });
    let request = lab
        .request(Method::POST, "/inference/v1/generate")
        .json(&body);
    let request = request.bearer_auth("EMPTY").header("X-Session-ID", "trace");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["request_id"], "trace-1");
    let choice = &answer["choices"][0];
    let reply = lab.bench.mesh.script().reply.clone();
    assert_eq!(choice["token_ids"], json!(reply));
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), reply.len());
    assert!(content.iter().all(|entry| entry["logprob"] == -1.0));
    assert_eq!(content[0]["token"], format!("token_id:{}", reply[0]));
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["weight_version"], "7");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(answer["usage"]["completion_tokens"], reply.len());
    let namespaces: Vec<_> = {
        let log = lab.bench.mesh.log();
        assert_eq!(log.chunks[0].sampling.seed, 9);
        log.chunks
            .iter()
            .map(|chunk| chunk.namespace.namespace.clone())
            .collect()
    };
    // Another salt, which is the version, leaves drafts together.
    let mut later = body.clone();
    later["cache_salt"] = json!("5");
    later["sampling_params"]["cache_salt"] = json!("5");
    lab.post("/inference/v1/generate", &later).await;
    assert_eq!(
        lab.bench
            .mesh
            .log()
            .chunks
            .last()
            .unwrap()
            .namespace
            .namespace,
        namespaces[0]
    );
    // vime adds up the new tokens of each event.
    later["stream"] = json!(true);
    let (events, done) = lab.stream("/inference/v1/generate", &later).await;
    assert!(done);
    let tokens: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap())
        .flat_map(|choice| choice["token_ids"].as_array().unwrap().clone())
        .collect();
    assert_eq!(json!(tokens), json!(reply));
    assert_eq!(
        events.last().unwrap()["usage"]["completion_tokens"],
        reply.len()
    );
}

#[tokio::test]
async fn answers_of_a_tenant_that_hides_metrics_tell_nothing_of_drafts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tenants.toml");
    std::fs::write(&path, "[[tenants]]\nname = \"lab\"\nhides_metrics = true\n").unwrap();
    let lab = Lab::with(|config| {
        config.tenants_file = Some(path);
        config.trainer.tenant = Some("lab".parse().unwrap());
    })
    .await;
    let (status, answer) = lab.post("/generate", &slime(&[5])).await;
    assert_eq!(status, 200, "{answer}");
    let meta = &answer["meta_info"];
    for field in [
        "cached_tokens",
        "spec_verify_ct",
        "spec_draft_token_num",
        "spec_accept_token_num",
    ] {
        assert_eq!(meta[field], 0, "{field}");
    }
    assert_eq!(meta["weight_version"], "7");
}
