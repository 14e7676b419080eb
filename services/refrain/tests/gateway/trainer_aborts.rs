//! Aborts, wherever a request is.

use std::time::Duration;

use refrain_protocol::scheduling::LeaseOutcome;
use serde_json::{Value, json};

use crate::mesh::{Mishap, chat, eventually};
use crate::trainer::Lab;

const GENERATE: &str = "/generate";

fn rollout(rid: &str) -> Value {
    json!({"input_ids": [5], "rid": rid, "return_logprob": true})
}

/// Waits until `holds` does.
async fn wait(what: &str, holds: impl Fn() -> bool) {
    eventually(what, async || holds()).await;
}

async fn abort(lab: &Lab, rid: &str) {
    let (status, answer) = lab.post("/abort_request", &json!({"rid": rid})).await;
    assert_eq!((status, &answer["aborted"]), (200, &json!(1)), "{answer}");
}

/// Checks an answer without output.
fn is_empty(answer: &Value) {
    let meta = &answer["meta_info"];
    let reason = json!({"type": "abort", "message": "Abort before prefill"});
    assert_eq!(meta["finish_reason"], reason, "{answer}");
    assert_eq!(meta["output_token_logprobs"], json!([]));
    assert_eq!(
        (&answer["text"], &answer["output_ids"]),
        (&json!(""), &json!([]))
    );
}

#[tokio::test]
async fn a_request_that_decodes_is_answered_with_what_it_has() {
    let lab = Lab::new().await;
    lab.bench.mesh.mishap(0, Mishap::Hang(2));
    let sent = lab.sent(GENERATE, &rollout("a"));
    lab.bench.mesh.wait_for_hanging(1).await;
    abort(&lab, "a").await;
    let (status, answer) = sent.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let meta = &answer["meta_info"];
    assert_eq!(meta["finish_reason"]["type"], "abort");
    assert_eq!(meta["output_token_logprobs"].as_array().unwrap().len(), 6);
    assert_eq!(answer["text"], "hello worl");
    assert_eq!(meta["weight_version"], "7");
    lab.bench.mesh.settled().await;
    let log = lab.bench.mesh.log();
    // The worker learns where the output ends, and no length is learnt from it.
    assert_eq!((log.cuts[0].output_len, log.cuts[0].aborted), (6, true));
    assert_eq!(log.finishes[0].outcome, LeaseOutcome::Aborted);
    drop(log);
    let aborted = "refrain_gateway_trainer_requests_total{route=\"/generate\",outcome=\"aborted\"}";
    assert_eq!(lab.bench.metric(aborted), 1.0);
    assert_eq!(
        lab.bench.metric("refrain_gateway_trainer_aborts_total"),
        1.0
    );
    assert_eq!(
        lab.bench
            .metric("refrain_gateway_trainer_requests_in_flight"),
        0.0
    );
}

#[tokio::test]
async fn a_request_whose_prompt_is_read_has_no_tokens() {
    let lab = Lab::new().await;
    lab.bench.mesh.mishap(0, Mishap::Hang(0));
    let sent = lab.sent(GENERATE, &rollout("a"));
    lab.bench.mesh.wait_for_streams(1).await;
    abort(&lab, "a").await;
    is_empty(&sent.await.unwrap().1);
    lab.bench.mesh.settled().await;
    assert_eq!(lab.bench.mesh.log().cuts[0].output_len, 0);
}

#[tokio::test]
async fn a_request_that_waits_for_a_worker_has_no_tokens() {
    let lab = Lab::new().await;
    lab.bench.mesh.script().silent_from_call = 0;
    let sent = lab.sent(GENERATE, &rollout("a"));
    wait("no lease is asked for", || {
        lab.bench.mesh.log().lease_calls == 1
    })
    .await;
    abort(&lab, "a").await;
    is_empty(&sent.await.unwrap().1);
    assert_eq!(lab.bench.mesh.log().leases.len(), 0);
}

#[tokio::test]
async fn a_request_between_two_chunks_keeps_its_tokens_and_gives_its_lease_back() {
    let lab = Lab::new().await;
    {
        let mut script = lab.bench.mesh.script();
        script.lease_chunk_tokens = Some(6);
        script.silent_from_call = 1;
    }
    let sent = lab.sent(GENERATE, &rollout("a"));
    wait("no second lease is asked for", || {
        lab.bench.mesh.log().lease_calls == 2
    })
    .await;
    abort(&lab, "a").await;
    let (_, answer) = sent.await.unwrap();
    assert_eq!(
        answer["output_ids"].as_array().unwrap().len(),
        6,
        "{answer}"
    );
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    lab.bench.mesh.settled().await;
    assert_eq!(
        lab.bench.mesh.log().finishes[0].outcome,
        LeaseOutcome::Aborted
    );
}

#[tokio::test]
async fn a_request_that_is_held_back_has_no_tokens_and_never_asks_for_a_worker() {
    let lab = Lab::with(|config| config.trainer.in_flight_max = 1).await;
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    let first = lab.sent(GENERATE, &rollout("first"));
    lab.bench.mesh.wait_for_streams(1).await;
    let held = lab.sent(GENERATE, &rollout("held"));
    let streamed = json!({"input_ids": [[5], [6]], "rid": ["x", "y"], "stream": true});
    let (url, client) = (lab.url.clone(), lab.bench.client.clone());
    let stream = tokio::spawn(async move {
        let sent = client
            .post(format!("{url}{GENERATE}"))
            .json(&streamed)
            .send();
        sent.await.unwrap().text().await.unwrap()
    });
    lab.wait_for_held(2.0).await;
    abort(&lab, "held").await;
    is_empty(&held.await.unwrap().1);
    lab.wait_for_held(1.0).await;
    abort(&lab, "y").await;
    let text = stream.await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(text.matches("\"type\":\"abort\"").count(), 2, "{text}");
    abort(&lab, "first").await;
    assert_eq!(
        first.await.unwrap().1["output_ids"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(lab.bench.mesh.log().lease_calls, 1);
}

#[tokio::test]
async fn a_request_whose_body_is_not_read_yet_is_aborted_with_all_others() {
    let lab = Lab::with(|config| {
        config.trainer.in_flight_max = 1;
        config.trainer.held_bytes_max = 1;
    })
    .await;
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    let mut sent = vec![lab.sent(GENERATE, &rollout("a"))];
    lab.bench.mesh.wait_for_streams(1).await;
    // The second one has the memory of bodies until it has a slot, and the others are not read.
    for _ in 0..2 {
        sent.push(lab.sent(GENERATE, &rollout("a")));
    }
    let scored = json!({"token_ids": [5], "sampling_params": {"logprobs": 0}});
    sent.push(lab.sent("/inference/v1/generate", &scored));
    sent.push(lab.sent("/v1/completions", &json!({"prompt": [5], "logprobs": 0})));
    lab.wait_for_held(4.0).await;
    let (_, answer) = lab
        .post("/abort_request", &json!({"abort_all": true}))
        .await;
    assert_eq!(answer["aborted"], 5);
    let mut answers = Vec::new();
    for one in sent {
        let (status, answer) = one.await.unwrap();
        assert_eq!(status, 200);
        answers.push(answer);
    }
    is_empty(&answers[1]);
    is_empty(&answers[2]);
    assert_eq!(answers[3]["choices"][0]["finish_reason"], "abort");
    assert_eq!(answers[3]["choices"][0]["logprobs"]["content"], json!([]));
    let completion = &answers[4]["choices"][0];
    assert_eq!(completion["finish_reason"], "abort");
    assert_eq!(completion["logprobs"]["tokens"], json!([]));
}

#[tokio::test]
async fn finished_and_unknown_requests_are_no_faults_and_names_of_vllm_work_too() {
    let lab = Lab::new().await;
    lab.post(GENERATE, &rollout("done")).await;
    for body in [
        json!({"rid": "done"}),
        json!({"rid": "unknown"}),
        json!({"abort_all": true}),
        json!({}),
    ] {
        let (status, answer) = lab.post("/abort_request", &body).await;
        assert_eq!((status, &answer["aborted"]), (200, &json!(0)), "{body}");
    }
    lab.bench.mesh.mishap(1, Mishap::Hang(1));
    let body = json!({"token_ids": [5], "request_id": "r", "sampling_params": {"logprobs": 1}});
    let sent = lab.sent("/inference/v1/generate", &body);
    lab.bench.mesh.wait_for_hanging(1).await;
    let (_, answer) = lab
        .post("/abort_requests", &json!({"request_ids": ["other"]}))
        .await;
    assert_eq!(answer, json!({"status": "aborted", "aborted": 0}));
    let (_, answer) = lab
        .post("/abort_requests", &json!({"request_ids": ["r"]}))
        .await;
    assert_eq!(answer["aborted"], 1);
    let (_, answer) = sent.await.unwrap();
    let choice = &answer["choices"][0];
    assert_eq!(
        (
            choice["finish_reason"].as_str(),
            choice["token_ids"].as_array().unwrap().len()
        ),
        (Some("abort"), 3)
    );
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 3);
    assert_eq!(lab.post("/abort_request", &json!({"rid": 7})).await.0, 400);
}

#[tokio::test]
async fn a_stream_that_is_aborted_ends_with_its_tokens() {
    let lab = Lab::new().await;
    lab.bench.mesh.mishap(0, Mishap::Hang(2));
    let body = json!({"input_ids": [5], "rid": "a", "stream": true, "return_logprob": true});
    let (url, client) = (lab.url.clone(), lab.bench.client.clone());
    let sent = tokio::spawn(async move {
        let sent = client.post(format!("{url}{GENERATE}")).json(&body).send();
        sent.await.unwrap().text().await.unwrap()
    });
    lab.bench.mesh.wait_for_hanging(1).await;
    abort(&lab, "a").await;
    let text = sent.await.unwrap();
    let events: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(last["output_ids"].as_array().unwrap().len(), 6);
}

#[tokio::test]
async fn an_abort_by_a_worker_is_an_answer_here_and_a_failure_elsewhere() {
    let lab = Lab::new().await;
    lab.bench.mesh.mishap(0, Mishap::Abort(1));
    let (status, answer) = lab.post(GENERATE, &rollout("a")).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(answer["output_ids"].as_array().unwrap().len(), 3);
    assert_eq!(lab.bench.mesh.log().leases.len(), 1);
    // Somebody else's output goes on at another worker.
    lab.bench.mesh.mishap(1, Mishap::Abort(1));
    let (status, answer) = lab.bench.chat(json!({})).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(
        choice["message"]["content"],
        "hello world, this is the answer"
    );
    let log = lab.bench.mesh.log();
    assert_eq!(log.leases.len(), 3);
    assert_eq!(log.leases[2].exclude[0].0, "w0");
    assert_eq!(log.finishes[1].outcome, LeaseOutcome::WorkerFailed);
}

#[tokio::test]
async fn aborts_reach_only_the_requests_of_this_listener() {
    let lab = Lab::new().await;
    lab.bench.mesh.script().step_pause = Duration::from_millis(20);
    let body = chat(json!({"class": "rollout"}));
    let other = tokio::spawn(lab.bench.post("/v1/chat/completions", &body).send());
    lab.bench.mesh.wait_for_streams(1).await;
    let (_, answer) = lab
        .post("/abort_request", &json!({"abort_all": true}))
        .await;
    assert_eq!(answer["aborted"], 0);
    let answer: Value = other.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}
