//! The ends of chunks, as the scheduler learns of them, and the calls that end one chunk and ask for the next.

use std::time::Duration;

use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, ErrorKind};
use serde_json::{Value, json};

use crate::mesh::{Bench, Mishap, chat, config, eventually, tuned};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "hello world, this is the answer";

/// The outcomes of all leases, once they are given back.
async fn outcomes(bench: &Bench) -> Vec<LeaseOutcome> {
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    log.finishes.iter().map(|finish| finish.outcome).collect()
}

/// Waits until the scheduler has been asked this many times for a lease.
async fn wait_for_calls(bench: &Bench, calls: usize) {
    eventually("so many calls for a lease", async || {
        bench.mesh.log().lease_calls >= calls
    })
    .await;
}

#[tokio::test]
async fn an_output_that_ends_is_finished_however_it_ends() {
    let second = Bench::new().await.mesh.script().reply[1];
    for (fields, cuts) in [
        (json!({}), 0),
        (json!({"max_tokens": 5}), 0),
        (json!({"stop": "world"}), 1),
        // This worker decodes on behind such a token.
        (json!({"stop_token_ids": [second]}), 1),
    ] {
        let bench = Bench::new().await;
        assert_eq!(bench.chat(fields.clone()).await.0, 200);
        assert_eq!(outcomes(&bench).await, [LeaseOutcome::Finished], "{fields}");
        assert_eq!(bench.mesh.log().cuts.len(), cuts, "{fields}");
    }
}

#[tokio::test]
async fn the_choices_that_are_not_the_best_are_finished_too() {
    let bench = Bench::new().await;
    let body = json!({"model": "tiny", "prompt": "a", "max_tokens": 6, "best_of": 3});
    assert_eq!(bench.json("/v1/completions", &body).await.0, 200);
    assert_eq!(outcomes(&bench).await, [LeaseOutcome::Finished; 3]);
}

#[tokio::test]
async fn a_request_that_nobody_can_carry_out_is_given_up() {
    // One that the engine refuses.
    let bench = Bench::new().await;
    let refused = Mishap::Refuse(ErrorKind::InvalidRequest);
    bench.mesh.mishap(0, refused);
    assert_eq!(bench.chat(json!({})).await.0, 400);
    assert_eq!(outcomes(&bench).await, [LeaseOutcome::GivenUp]);
    // One that no worker has room for, of which all but the last attempt went on.
    let bench = Bench::with(tuned(|tuning| tuning.failures_max = 3)).await;
    for lease in 0..3 {
        let refused = Mishap::Refuse(ErrorKind::Unavailable);
        bench.mesh.mishap(lease, refused);
    }
    assert_eq!(bench.chat(json!({})).await.0, 503);
    let (continues, given_up) = (LeaseOutcome::Continues, LeaseOutcome::GivenUp);
    assert_eq!(outcomes(&bench).await, [continues, continues, given_up]);
    // One on which all workers fail.
    let bench = Bench::with(tuned(|tuning| tuning.failures_max = 2)).await;
    for lease in 0..2 {
        bench
            .mesh
            .mishap(lease, Mishap::Fail(0, ErrorKind::Upstream));
    }
    assert_eq!(bench.chat(json!({})).await.0, 502);
    assert_eq!(outcomes(&bench).await, [LeaseOutcome::WorkerFailed; 2]);
}

#[tokio::test]
async fn a_request_whose_time_is_up_is_given_up() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        request_ms_max: 2_000,
        ..config()
    })
    .await;
    for lease in 0..2 {
        bench.mesh.mishap(lease, Mishap::Hang(1));
    }
    let answers = [false, true].map(async |stream| {
        let sent = bench.post(CHAT, &chat(json!({"stream": stream})));
        sent.send().await.unwrap().text().await.unwrap()
    });
    for answer in futures_util::future::join_all(answers).await {
        assert!(answer.contains("longer than 2 s"), "{answer}");
    }
    assert_eq!(outcomes(&bench).await, [LeaseOutcome::GivenUp; 2]);
}

#[tokio::test]
async fn a_request_that_is_cut_off_by_a_drain_is_given_up() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, Mishap::Hang(1));
    let sent = tokio::spawn(bench.post(CHAT, &chat(json!({}))).send());
    bench.mesh.wait_for_streams(1).await;
    let Bench { mesh, gateway, .. } = bench;
    assert_eq!(gateway.drain(Duration::from_millis(10)).await, 1);
    mesh.settled().await;
    assert_eq!(mesh.log().finishes[0].outcome, LeaseOutcome::GivenUp);
    assert_eq!(sent.await.unwrap().unwrap().status(), 503);
}

#[tokio::test]
async fn the_other_choices_of_a_request_that_fails_are_given_up() {
    let bench = Bench::new().await;
    bench.mesh.script().step_pause = Duration::from_millis(20);
    bench.mesh.mishap(0, Mishap::Hang(1));
    bench
        .mesh
        .mishap(1, Mishap::Fail(2, ErrorKind::InvalidRequest));
    bench.mesh.mishap(2, Mishap::Hang(1));
    assert_eq!(bench.chat(json!({"n": 3})).await.0, 400);
    assert_eq!(outcomes(&bench).await, [LeaseOutcome::GivenUp; 3]);
}

#[tokio::test]
async fn a_request_whose_client_leaves_is_aborted() {
    for stream in [false, true] {
        let bench = Bench::new().await;
        for lease in 0..2 {
            bench.mesh.mishap(lease, Mishap::Hang(1));
        }
        let sent = bench.post(CHAT, &chat(json!({"stream": stream, "n": 2})));
        let sent = tokio::spawn(async move {
            let answer = sent.send().await.unwrap();
            answer.text().await
        });
        bench.mesh.wait_for_streams(2).await;
        sent.abort();
        assert_eq!(outcomes(&bench).await, [LeaseOutcome::Aborted; 2]);
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_there_is_a_lease_leaves_nothing_behind() {
    let bench = Bench::new().await;
    bench.mesh.script().silent_from_call = 0;
    let sent = tokio::spawn(bench.post(CHAT, &chat(json!({}))).send());
    wait_for_calls(&bench, 1).await;
    sent.abort();
    assert_eq!(outcomes(&bench).await, []);
}

#[tokio::test]
async fn one_call_ends_a_chunk_and_asks_for_the_next() {
    let bench = Bench::new().await;
    bench.mesh.script().step_pause = Duration::from_millis(5);
    let (_, body) = bench.chat(json!({"chunk_tokens": 10})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    let tokens = bench.mesh.script().reply.len();
    assert_eq!(log.leases.len(), tokens.div_ceil(10));
    assert_eq!((&log.leases[0].ended, log.leases[0].age_ms), (&None, 0));
    let mut emitted = 0;
    for (number, pair) in log.leases.windows(2).enumerate() {
        let ended = pair[1].ended.as_ref().unwrap();
        assert_eq!(ended, &log.finishes[number]);
        assert_eq!(
            (ended.lease.0 as usize, ended.outcome),
            (number, LeaseOutcome::Continues)
        );
        // The worker has finished it, and its engine had some of the context in its cache.
        assert!(ended.worker_ended_ms_ago.is_some());
        assert_eq!((ended.emitted_tokens, ended.cached_tokens), (10, Some(3)));
        emitted += ended.emitted_tokens;
        assert_eq!(pair[1].generated_tokens, emitted);
        // The place in line is that of the first call.
        assert!(pair[1].age_ms >= pair[0].age_ms + 15, "{}", pair[1].age_ms);
        assert_eq!(pair[1].request, pair[0].request);
    }
    assert_eq!(log.finishes.last().unwrap().outcome, LeaseOutcome::Finished);
}

#[tokio::test]
async fn a_chunk_without_a_token_does_not_know_what_was_cached() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, Mishap::GiveWay(0));
    assert_eq!(bench.chat(json!({})).await.0, 200);
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    let cached: Vec<_> = log.finishes.iter().map(|end| end.cached_tokens).collect();
    assert_eq!(cached, [None, Some(3)]);
}

#[tokio::test]
async fn a_lease_is_given_back_alone_if_the_call_for_the_next_one_fails() {
    let bench = Bench::new().await;
    let absent = ApiError::new(ErrorKind::Upstream, "the connection broke off");
    bench.mesh.script().refused_calls.insert(1, absent);
    let (status, body) = bench.chat(json!({"chunk_tokens": 20})).await;
    assert_eq!(
        (status, &body["choices"][0]["message"]["content"]),
        (200, &json!(TEXT))
    );
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    let continues = log.finishes[0].outcome;
    assert_eq!(continues, LeaseOutcome::Continues);
    // The repeated call does not end it once more.
    assert_eq!((log.lease_calls, &log.leases[1].ended), (3, &None));
    assert!(log.leases[1].age_ms > 0);
}

#[tokio::test]
async fn a_lease_is_given_back_if_the_call_for_the_next_one_is_dropped() {
    let config = || refrain_gateway::GatewayConfig {
        request_ms_max: 2_000,
        ..config()
    };
    for leaves in [true, false] {
        let bench = Bench::with(config()).await;
        bench.mesh.script().silent_from_call = 1;
        let body: Value = chat(json!({"chunk_tokens": 20}));
        let sent = tokio::spawn(bench.post(CHAT, &body).send());
        wait_for_calls(&bench, 2).await;
        let outcome = match leaves {
            true => {
                sent.abort();
                LeaseOutcome::Aborted
            }
            false => {
                assert_eq!(sent.await.unwrap().unwrap().status(), 504);
                LeaseOutcome::GivenUp
            }
        };
        assert_eq!(outcomes(&bench).await, [outcome]);
        assert_eq!(bench.mesh.log().finishes[0].emitted_tokens, 20);
    }
}
