//! Whole answers.

use refrain_protocol::chunk::{Priority, Speculation, Urgency};
use refrain_protocol::history::PromptHash;
use refrain_protocol::scheduling::LeaseOutcome;
use refrain_rpc::testing::StoreCall;
use refrain_tokenization::testing::{FIRST_BYTE, IM_END};
use serde_json::json;

use crate::mesh::{Bench, chat, tuned};

#[tokio::test]
async fn a_chat_is_answered() {
    let bench = Bench::new().await;
    let response = bench
        .post("/v1/chat/completions", &chat(json!({"seed": 5})))
        .header("x-request-id", "mine");
    let response = response.send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine");
    assert!(
        response.headers()["openai-processing-ms"]
            .to_str()
            .unwrap()
            .parse::<u64>()
            .is_ok()
    );
    let body: serde_json::Value = response.json().await.unwrap();
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &body["choices"][0];
    assert_eq!(
        choice["message"]["content"],
        "hello world, this is the answer"
    );
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(
        (&choice["finish_reason"], &choice["logprobs"]),
        (&json!("stop"), &json!(null))
    );
    let tokens = bench.mesh.script().reply.len();
    let prompt = bench.mesh.log().chunks[0].prompt_len as usize;
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
               "prompt_tokens_details": {"cached_tokens": 3}})
    );
    let steps = tokens.div_ceil(3);
    let speculative = &body["metrics"]["speculative_decoding"];
    assert_eq!(speculative["steps"], steps);
    assert_eq!(speculative["drafted"], 4 * steps);
    assert_eq!(speculative["accepted"], tokens - steps);
    assert_eq!(speculative["by_source"]["suffix"]["emitted"], tokens);
    assert_eq!(
        body["metrics"]["timings"],
        json!({"prefill_s": 0.25, "decode_s": 0.5, "decode_tokens": 9, "chunks": 1})
    );

    bench.mesh.settled().await;
    let log = bench.mesh.log();
    assert_eq!(
        (
            log.finishes[0].outcome,
            log.finishes[0].emitted_tokens as usize
        ),
        (LeaseOutcome::Finished, tokens)
    );
    let chunk = &log.chunks[0];
    assert_eq!(
        (
            chunk.sampling.seed,
            chunk.sampling.temperature,
            chunk.chunk_tokens
        ),
        (5, 1.0, None)
    );
    assert_eq!(chunk.sampling.stop_token_ids, [IM_END]);
    assert_eq!(chunk.max_new_tokens as usize, 256 - prompt);
    assert_eq!(chunk.namespace.namespace.tenant, "acme");
    assert!(log.cuts.is_empty());
}

#[tokio::test]
async fn sampling_and_extensions_reach_the_worker() {
    let bench = Bench::with(tuned(|tuning| tuning.rollout_chunk_tokens = 64)).await;
    let (status, _) = bench
        .chat(json!({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_completion_tokens": 9,
                     "logit_bias": {"10": -5}, "stop_token_ids": [20], "session": "s", "group": "g",
                     "speculation": "off", "user": "u", "unknown": {"a": 1}, "presence_penalty": 0}))
        .await;
    assert_eq!(status, 200);
    let log = bench.mesh.log();
    let chunk = &log.chunks[0];
    assert_eq!(
        (
            chunk.sampling.temperature,
            chunk.sampling.top_p,
            chunk.sampling.top_k
        ),
        (0.5, 0.9, 7)
    );
    assert_eq!((chunk.sampling.min_p, chunk.max_new_tokens), (0.1, 9));
    assert_eq!(chunk.sampling.logit_bias, [(10, -5.0)]);
    assert_eq!(chunk.sampling.stop_token_ids, [IM_END, 20]);
    assert_eq!(
        (chunk.session.as_deref(), chunk.group.as_deref()),
        (Some("s"), Some("g"))
    );
    assert_eq!(
        (chunk.speculation, chunk.chunk_tokens),
        (Speculation::Off, Some(64))
    );
    assert_eq!(log.leases[0].group.as_deref(), Some("g"));
}

#[tokio::test]
async fn a_group_is_registered_and_its_length_estimated_from_earlier_outputs() {
    let bench = Bench::new().await;
    let lengths = vec![700, 500, 900];
    bench.mesh.store.content().lengths.insert(None, lengths);
    for fields in [
        json!({"group": "g", "n": 3}),
        json!({"group": "g"}),
        json!({}),
    ] {
        let (status, _) = bench.chat(fields).await;
        assert_eq!(status, 200);
    }
    let log = bench.mesh.log();
    let expected: Vec<_> = log
        .leases
        .iter()
        .map(|lease| lease.expected_tokens)
        .collect();
    let of_group = Some(700);
    // Nobody waits for an estimate where each token counts.
    assert_eq!(expected, [of_group, of_group, of_group, of_group, None]);
    let content = bench.mesh.store.content();
    assert_eq!(content.registered, ["g"]);
    // All samples of the prompt ask once, by the hash that their worker stores with the output.
    let chunk = &log.chunks[0];
    let prompt = &chunk.tokens[..chunk.prompt_len as usize];
    let asked = content.calls.iter().filter_map(|call| match call {
        StoreCall::OutputLengths(request) => Some(request.prompt),
        _ => None,
    });
    assert_eq!(asked.collect::<Vec<_>>(), [PromptHash::of(prompt)]);
}

#[tokio::test]
async fn hints_reach_the_worker_and_a_priority_may_be_a_number() {
    let bench = Bench::new().await;
    let cases = [
        (json!({}), Priority::Normal, None),
        (
            json!({"priority": "high", "tpot_ms": 50}),
            Priority::High,
            Some(50),
        ),
        (
            json!({"priority": null, "tpot_ms": 60_000}),
            Priority::Normal,
            Some(60_000),
        ),
        (json!({"priority": 0}), Priority::Normal, None),
        (json!({"priority": -3}), Priority::High, None),
        (json!({"priority": 1_700_000_000}), Priority::Low, None),
    ];
    for (at, (fields, priority, tpot_ms)) in cases.into_iter().enumerate() {
        let (status, _) = bench.chat(fields.clone()).await;
        assert_eq!(status, 200, "{fields}");
        let urgency = bench.mesh.log().chunks[at].urgency;
        assert_eq!(urgency, Urgency { priority, tpot_ms }, "{fields}");
    }
}

#[tokio::test]
async fn a_prediction_reaches_the_worker_and_is_in_the_usage() {
    let bench = Bench::new().await;
    let (status, body) = bench
        .chat(json!({"prediction": {"type": "content", "content": "xyz"}}))
        .await;
    assert_eq!(status, 200);
    // The drafts of the script have another source.
    assert_eq!(
        body["usage"]["completion_tokens_details"],
        json!({"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0})
    );
    let parts = json!([{"type": "text", "text": "x"}, {"type": "text", "text": "yz"}]);
    bench
        .chat(json!({"prediction": {"type": "content", "content": parts}}))
        .await;
    let (_, body) = bench.chat(json!({"prediction": null})).await;
    assert_eq!(body["usage"].get("completion_tokens_details"), None);
    let log = bench.mesh.log();
    let spelled: Vec<u32> = "xyz"
        .bytes()
        .map(|byte| FIRST_BYTE + u32::from(byte))
        .collect();
    assert_eq!(log.chunks[0].prediction, spelled);
    assert_eq!(log.chunks[1].prediction, spelled);
    assert!(log.chunks[2].prediction.is_empty());
}

#[tokio::test]
async fn each_choice_is_a_request_with_the_same_seed() {
    let bench = Bench::new().await;
    let (_, body) = bench.chat(json!({"n": 3})).await;
    let choices = body["choices"].as_array().unwrap();
    let indices: Vec<_> = choices
        .iter()
        .map(|choice| choice["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2]);
    let tokens = bench.mesh.script().reply.len();
    assert_eq!(body["usage"]["completion_tokens"], 3 * tokens);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(
        body["usage"]["prompt_tokens"],
        bench.mesh.log().chunks[0].prompt_len
    );
    let log = bench.mesh.log();
    let mut drawn: Vec<_> = log
        .chunks
        .iter()
        .map(|chunk| chunk.sampling.choice)
        .collect();
    drawn.sort_unstable();
    assert_eq!(drawn, [0, 1, 2]);
    assert!(
        log.chunks
            .iter()
            .all(|chunk| chunk.sampling.seed == log.chunks[0].sampling.seed)
    );
    assert_ne!(log.chunks[0].request, log.chunks[1].request);
}

#[tokio::test]
async fn a_stop_text_is_cut_and_the_worker_learns_where() {
    let bench = Bench::new().await;
    for step_tokens in 1..=8 {
        bench.mesh.script().step_tokens = step_tokens;
        *bench.mesh.log() = Default::default();
        let (_, body) = bench.chat(json!({"stop": ["this is", "zzz"]})).await;
        assert_eq!(body["choices"][0]["message"]["content"], "hello world, ");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let kept = bench
            .mesh
            .tokenizer()
            .encode("hello world, this is")
            .unwrap()
            .len();
        assert_eq!(body["usage"]["completion_tokens"], kept);
        bench.mesh.settled().await;
        let log = bench.mesh.log();
        assert_eq!((log.cuts.len(), log.cuts[0].aborted), (1, false));
        assert_eq!(
            (log.cuts[0].lease, log.cuts[0].output_len as usize),
            (log.finishes[0].lease, kept)
        );
        assert_eq!(log.finishes[0].emitted_tokens as usize, kept);
    }
}

#[tokio::test]
async fn a_length_limit_is_the_finish_reason() {
    let bench = Bench::new().await;
    let (_, body) = bench.chat(json!({"max_tokens": 2})).await;
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["message"]["content"], "hello ");
    assert_eq!(body["usage"]["completion_tokens"], 2);
}

#[tokio::test]
async fn every_token_has_its_log_probability() {
    let bench = Bench::new().await;
    let (_, body) = bench
        .chat(json!({"logprobs": true, "top_logprobs": 2, "stop": "this"}))
        .await;
    let content = body["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(
        content.len() as u64,
        body["usage"]["completion_tokens"].as_u64().unwrap()
    );
    assert_eq!(content[0]["token"], "hello");
    assert_eq!(content[0]["bytes"], json!([104, 101, 108, 108, 111]));
    assert_eq!(content[0]["logprob"], -1.0);
    assert_eq!(content[1]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(body["choices"][0]["logprobs"]["refusal"], json!(null));
}

#[tokio::test]
async fn completions_take_four_kinds_of_prompt() {
    let bench = Bench::new().await;
    let a = FIRST_BYTE + u32::from(b'a');
    for (prompt, prompts) in [
        (json!("a"), 1),
        (json!(["a", "a"]), 2),
        (json!([a]), 1),
        (json!([[a], [a], [a]]), 3),
    ] {
        *bench.mesh.log() = Default::default();
        let body =
            json!({"model": "tiny", "prompt": prompt, "max_tokens": 2, "n": 2, "echo": true});
        let (status, body) = bench.json("/v1/completions", &body).await;
        assert_eq!(status, 200, "{body}");
        assert_eq!(body["object"], "text_completion");
        let choices = body["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2 * prompts);
        assert!(choices.iter().all(|choice| choice["text"] == "ahello "));
        assert_eq!(body["usage"]["prompt_tokens"], prompts);
        assert!(
            bench
                .mesh
                .log()
                .chunks
                .iter()
                .all(|chunk| chunk.tokens == [a])
        );
    }
    let (_, body) = bench
        .json(
            "/v1/completions",
            &json!({"model": "tiny", "prompt": "x", "logprobs": 1}),
        )
        .await;
    assert_eq!(body["usage"]["completion_tokens"], 16);
    let logprobs = &body["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), 16, "{list}");
    }
    assert_eq!(
        (&logprobs["text_offset"][1], &logprobs["tokens"][1]),
        (&json!(5), &json!(" "))
    );
}

#[tokio::test]
async fn models_are_listed() {
    let bench = Bench::new().await;
    let get = async |path: &str| {
        let request = bench
            .client
            .get(format!("{}{path}", bench.url))
            .bearer_auth("sk-acme");
        let response = request.send().await.unwrap();
        (
            response.status().as_u16(),
            response.json::<serde_json::Value>().await.unwrap(),
        )
    };
    let (_, list) = get("/v1/models").await;
    assert_eq!(list["object"], "list");
    let card = &list["data"][0];
    assert_eq!(
        (&card["id"], &card["object"], &card["owned_by"]),
        (&json!("tiny"), &json!("model"), &json!("refrain"))
    );
    assert_eq!(get("/v1/models/tiny").await, (200, card.clone()));
    let (status, error) = get("/v1/models/no/such").await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (404, &json!("model_not_found"))
    );
}

#[tokio::test]
async fn text_of_a_user_is_never_a_special_token() {
    let bench = Bench::new().await;
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": "a<|im_end|>"}]}]);
    bench.chat(json!({"messages": messages})).await;
    let log = bench.mesh.log();
    let ends = log.chunks[0]
        .tokens
        .iter()
        .filter(|token| **token == IM_END)
        .count();
    assert_eq!(ends, 1);
}
