//! Workers and schedulers that fail: the client does not notice, or gets an error.

use std::time::Duration;

use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use serde_json::json;

use crate::mesh::{Bench, Mishap, chat, config, tuned};
use crate::streams::streamed_text;

const TEXT: &str = "hello world, this is the answer";

#[tokio::test]
async fn a_chunk_that_gives_way_continues_on_its_worker_under_the_next_lease() {
    let bench = Bench::new().await;
    for lease in 0..3 {
        // The first chunk gives way before it has a token.
        bench.mesh.mishap(lease, Mishap::GiveWay(lease));
    }
    let (events, done) = bench
        .stream("/v1/chat/completions", &chat(json!({"stream": true})))
        .await;
    assert!(done);
    assert_eq!(streamed_text(&events, 0), TEXT);
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    assert_eq!(log.chunks.len(), 4);
    for (lease, finish) in log.leases[1..].iter().zip(&log.finishes) {
        assert_eq!(lease.prefer, Some(WorkerId("w0".into())));
        assert!(lease.exclude.is_empty());
        // The engine may be silent, so the end of the chunk does not show that the worker is well.
        assert_eq!(
            (finish.outcome, finish.worker_ended_ms_ago),
            (LeaseOutcome::Continues, None)
        );
    }
}

#[tokio::test]
async fn a_lost_worker_delays_a_stream_and_changes_nothing() {
    for mishap in [
        Mishap::Lose(2),
        Mishap::Lose(0),
        Mishap::Fail(3, ErrorKind::Upstream),
        Mishap::Skip(1),
        Mishap::Refuse(ErrorKind::Unavailable),
        Mishap::Refuse(ErrorKind::Conflict),
    ] {
        let bench = Bench::new().await;
        bench.mesh.mishap(0, mishap.clone());
        let fields =
            json!({"stream": true, "stream_options": {"include_usage": true}, "stop": "ever"});
        let (events, done) = bench.stream("/v1/chat/completions", &chat(fields)).await;
        assert!(done, "{mishap:?}");
        assert_eq!(streamed_text(&events, 0), TEXT);
        let reply = bench.mesh.script().reply.clone();
        assert_eq!(
            events.last().unwrap()["usage"]["completion_tokens"],
            reply.len()
        );
        bench.mesh.settled().await;
        let log = bench.mesh.log();
        assert_eq!(log.chunks.len(), 2);
        assert_eq!(
            (log.chunks[0].request, log.chunks[0].sampling.seed),
            (log.chunks[1].request, log.chunks[1].sampling.seed)
        );
        assert!(log.chunks[1].epoch > log.chunks[0].epoch);
        let generated = log.leases[1].generated_tokens;
        assert_eq!(
            log.chunks[1].max_new_tokens + generated,
            log.chunks[0].max_new_tokens
        );
        let failed = !matches!(mishap, Mishap::Refuse(_));
        let outcome = if failed {
            LeaseOutcome::WorkerFailed
        } else {
            LeaseOutcome::Continues
        };
        assert_eq!(
            (log.finishes[0].outcome, log.finishes[0].emitted_tokens),
            (outcome, generated)
        );
        assert_eq!(log.finishes[1].outcome, LeaseOutcome::Finished);
        if failed {
            assert_eq!(log.leases[1].exclude, [WorkerId("w0".into())]);
        }
        drop(log);
        assert_eq!(bench.metric("refrain_gateway_continuations_total"), 1.0);
    }
}

#[tokio::test]
async fn a_stop_text_is_found_across_workers() {
    let bench = Bench::new().await;
    bench.mesh.script().step_tokens = 1;
    bench.mesh.mishap(0, Mishap::Lose(10));
    let (_, body) = bench.chat(json!({"stop": "world, this"})).await;
    assert_eq!(body["choices"][0]["message"]["content"], "hello ");
    bench.mesh.settled().await;
    let kept = bench
        .mesh
        .tokenizer()
        .encode("hello world, this")
        .unwrap()
        .len();
    assert_eq!(bench.mesh.log().cuts[0].output_len as usize, kept);
}

#[tokio::test]
async fn a_worker_lost_after_the_last_token_does_no_harm() {
    let bench = Bench::new().await;
    let steps = bench.mesh.script().reply.len().div_ceil(3);
    bench
        .mesh
        .mishap(0, Mishap::Fail(steps, ErrorKind::Upstream));
    let (_, body) = bench.chat(json!({})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    assert_eq!(bench.mesh.log().chunks.len(), 1);
}

#[tokio::test]
async fn a_silent_worker_counts_as_lost() {
    let bench = Bench::with(tuned(|tuning| {
        tuning.worker_silence_max = Duration::from_secs(2);
    }))
    .await;
    bench.mesh.mishap(0, Mishap::Hang(2));
    let (status, body) = bench.chat(json!({})).await;
    assert_eq!(
        (status, &body["choices"][0]["message"]["content"]),
        (200, &json!(TEXT))
    );
    bench.mesh.settled().await;
}

#[tokio::test]
async fn a_draining_worker_evacuates_its_requests() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, Mishap::Drain(2));
    let (_, body) = bench.chat(json!({})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    let log = bench.mesh.log();
    assert_eq!(log.finishes[0].outcome, LeaseOutcome::Continues);
    assert_eq!(
        (log.leases[1].prefer.as_ref(), &log.leases[1].exclude[..]),
        (None, &[WorkerId("w0".into())][..])
    );
}

#[tokio::test]
async fn a_transferred_request_continues_on_the_named_worker_and_is_marked_as_such() {
    let bench = Bench::new().await;
    bench.mesh.mishap(0, Mishap::Transfer(2));
    let (_, body) = bench.chat(json!({"chunk_tokens": 10})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    let log = bench.mesh.log();
    assert_eq!(log.finishes[0].outcome, LeaseOutcome::Continues);
    assert_eq!(
        (log.leases[1].prefer.as_ref(), log.leases[1].exclude.len()),
        (Some(&WorkerId("w1".into())), 0)
    );
    let transferred: Vec<bool> = log.chunks.iter().map(|chunk| chunk.transferred).collect();
    assert!(
        !transferred[0]
            && transferred.len() > 2
            && transferred[1..].iter().all(|transferred| *transferred)
    );
}

#[tokio::test]
async fn a_context_that_a_worker_no_longer_has_is_sent_and_is_no_failure() {
    let bench = Bench::new().await;
    bench.mesh.script().forgets = true;
    let (_, body) = bench.chat(json!({"chunk_tokens": 10})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    let log = bench.mesh.log();
    let chunks = bench.mesh.script().reply.len().div_ceil(10);
    assert_eq!((log.chunks.len(), log.leases.len()), (chunks, chunks));
    assert_eq!(log.gone, chunks - 1);
    assert!(log.leases.iter().all(|lease| lease.exclude.is_empty()));
    assert!(log.chunks.iter().all(|chunk| chunk.resumes.is_none()));
    let attempts = log.chunks.iter().map(|chunk| chunk.budget.attempts);
    assert!(
        attempts
            .into_iter()
            .all(|left| left == log.chunks[0].budget.attempts)
    );
    let sent: usize = log.chunks.iter().map(|chunk| chunk.tokens.len()).sum();
    assert_eq!(log.context_tokens, sent);
    let others = log.finishes[..chunks - 1].iter();
    assert!(
        others
            .into_iter()
            .all(|finish| finish.outcome == LeaseOutcome::Continues)
    );
}

#[tokio::test]
async fn chunks_follow_each_other_on_the_same_worker() {
    let bench = Bench::new().await;
    let (_, body) = bench.chat(json!({"chunk_tokens": 10})).await;
    assert_eq!(body["choices"][0]["message"]["content"], TEXT);
    let tokens = bench.mesh.script().reply.len();
    assert_eq!(body["metrics"]["timings"]["chunks"], tokens.div_ceil(10));
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    let log = bench.mesh.log();
    assert_eq!(log.chunks.len(), tokens.div_ceil(10));
    // The context is sent once. Later chunks name what the worker has parked.
    assert_eq!(log.context_tokens, log.chunks[0].prompt_len as usize);
    assert!(log.chunks[0].resumes.is_none());
    assert!(log.chunks[1..].iter().all(|chunk| chunk.resumes.is_some()));
    assert!(
        log.leases[1..]
            .iter()
            .all(|lease| lease.prefer == Some(WorkerId("w0".into())))
    );
    assert!(
        log.finishes[..log.finishes.len() - 1]
            .iter()
            .all(|finish| finish.outcome == LeaseOutcome::Continues)
    );
    assert_eq!(log.leases[1].context_tokens, log.chunks[0].prompt_len + 10);
}

#[tokio::test]
async fn a_request_that_gives_up_has_the_last_error() {
    let bench = Bench::with(tuned(|tuning| tuning.failures_max = 3)).await;
    for lease in 0..3 {
        bench.mesh.mishap(lease, Mishap::Lose(0));
    }
    let (status, body) = bench.chat(json!({})).await;
    assert_eq!(
        (status, &body["error"]["type"]),
        (502, &json!("server_error"))
    );
    bench.mesh.settled().await;
    assert_eq!(bench.mesh.log().chunks.len(), 3);
}

#[tokio::test]
async fn an_output_is_continued_without_a_budget_of_retries() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        retry_share: 0.0,
        ..tuned(|tuning| tuning.retries_per_s_min = 0.0)
    })
    .await;
    bench.mesh.mishap(0, Mishap::Fail(2, ErrorKind::Upstream));
    for lease in 1..4 {
        bench
            .mesh
            .mishap(lease, Mishap::Fail(0, ErrorKind::Upstream));
    }
    let (status, body) = bench.chat(json!({})).await;
    assert_eq!(
        (status, &body["choices"][0]["message"]["content"]),
        (200, &json!(TEXT))
    );
    let refused = "refrain_gateway_rejections_total{limit=\"retries\"}";
    assert_eq!(bench.metric(refused), 0.0);
    // Before the first token it is a retry.
    bench.mesh.mishap(5, Mishap::Fail(0, ErrorKind::Upstream));
    assert_eq!(bench.chat(json!({})).await.0, 502);
    assert_eq!(bench.metric(refused), 1.0);
}

#[tokio::test]
async fn the_timer_of_the_gateway_fires_before_that_of_a_worker() {
    let request_ms_max = 200;
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        request_ms_max,
        ..config()
    })
    .await;
    // On a busy machine the time may be up before a worker is asked. Then the test tries again.
    for lease in 0.. {
        assert!(lease < 300, "no worker was asked");
        bench.mesh.mishap(lease, Mishap::Hang(0));
        assert_eq!(bench.chat(json!({})).await.0, 504);
        if let Some(chunk) = bench.mesh.log().chunks.first() {
            assert!(chunk.budget.time_left_ms.unwrap() > request_ms_max);
            break;
        }
    }
}

#[tokio::test]
async fn only_a_chunk_that_the_worker_finished_counts_as_finished() {
    let bench = Bench::new().await;
    let steps = {
        let script = bench.mesh.script();
        script.reply.len().div_ceil(script.step_tokens)
    };
    for (lease, (mishap, stop, is_ended)) in [
        (None, "never", true),
        // The output has ended, and only the `End` of the worker is missing.
        (Some(Mishap::Lose(steps)), "never", false),
        (None, "answer", true),
        (Some(Mishap::RefuseCut), "answer", false),
    ]
    .into_iter()
    .enumerate()
    {
        if let Some(mishap) = mishap.clone() {
            bench.mesh.mishap(lease, mishap);
        }
        let (status, _) = bench.chat(json!({"stop": stop})).await;
        bench.mesh.settled().await;
        let log = bench.mesh.log();
        let finish = &log.finishes[lease];
        assert_eq!(
            (status, finish.outcome, finish.worker_ended_ms_ago.is_some()),
            (200, LeaseOutcome::Finished, is_ended),
            "{mishap:?}, {stop}"
        );
        assert!(finish.emitted_tokens > 0);
    }
    // A chunk that gives way does not count either; the next one does.
    bench.mesh.mishap(4, Mishap::Drain(1));
    assert_eq!(bench.chat(json!({})).await.0, 200);
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    let is_ended = [4, 5].map(|lease| log.finishes[lease].worker_ended_ms_ago.is_some());
    assert_eq!(is_ended, [false, true]);
}

#[tokio::test]
async fn an_error_in_mid_stream_is_an_event_without_done() {
    let bench = Bench::with(tuned(|tuning| tuning.failures_max = 1)).await;
    bench.mesh.mishap(0, Mishap::Fail(2, ErrorKind::Upstream));
    let (events, done) = bench
        .stream("/v1/chat/completions", &chat(json!({"stream": true})))
        .await;
    assert!(!done);
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["type"], "server_error");
    for key in ["message", "type", "param", "code"] {
        assert!(error.get(key).is_some(), "{key}");
    }
}

#[tokio::test]
async fn a_full_queue_has_its_own_status_also_for_streams() {
    let bench = Bench::new().await;
    for stream in [false, true] {
        let full =
            ApiError::new(ErrorKind::Overloaded, "the queue is full").with_retry_after_ms(1500);
        bench.mesh.script().lease_errors.push_back(full);
        let response = bench
            .post("/v1/chat/completions", &chat(json!({"stream": stream})))
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()["retry-after"], "2");
        let body: serde_json::Value = response.json().await.unwrap();
        assert_eq!(body["error"]["type"], "rate_limit_error");
    }
}

#[tokio::test]
async fn a_scheduler_that_restarts_is_asked_again() {
    let bench = Bench::new().await;
    let gone = ApiError::new(ErrorKind::Unavailable, "no dispatcher");
    bench.mesh.script().lease_errors.push_back(gone.clone());
    assert_eq!(bench.chat(json!({})).await.0, 200);
    bench
        .mesh
        .script()
        .lease_errors
        .extend([gone.clone(), gone]);
    assert_eq!(bench.chat(json!({})).await.0, 503);
}

#[tokio::test]
async fn a_call_for_a_lease_that_an_earlier_one_overtook_is_made_again() {
    let overtaken = || {
        let message = "only the newer call goes on waiting";
        ApiError::new(ErrorKind::Conflict, message).with_code("superseded")
    };
    for stream in [false, true] {
        let bench = Bench::new().await;
        // The first call, and that for the second chunk.
        bench.mesh.mishap(0, Mishap::GiveWay(2));
        let refused = [(0, overtaken()), (2, overtaken())];
        bench.mesh.script().refused_calls.extend(refused);
        if stream {
            let body = chat(json!({"stream": true}));
            let (events, done) = bench.stream("/v1/chat/completions", &body).await;
            assert!(done);
            assert_eq!(streamed_text(&events, 0), TEXT);
        } else {
            let (status, body) = bench.chat(json!({})).await;
            assert_eq!(status, 200, "{body}");
        }
        bench.mesh.settled().await;
        let log = bench.mesh.log();
        assert_eq!((log.lease_calls, log.leases.len()), (4, 2));
        let [first, second] = &log.leases[..] else {
            panic!("there are two");
        };
        assert!(second.age_ms >= first.age_ms);
        assert_eq!([first.epoch_seen, second.epoch_seen], [0, 10]);
    }
}

#[tokio::test]
async fn the_client_gets_the_refusal_of_an_engine() {
    let bench = Bench::new().await;
    bench
        .mesh
        .mishap(0, Mishap::Refuse(ErrorKind::InvalidRequest));
    let (status, body) = bench.chat(json!({})).await;
    assert_eq!(
        (status, &body["error"]["message"]),
        (400, &json!("refused by script"))
    );
    assert_eq!(bench.mesh.log().chunks.len(), 1);
}

#[tokio::test]
async fn the_only_worker_is_tried_again() {
    let config = tuned(|tuning| tuning.models_poll = Duration::from_millis(10));
    let bench = Bench::with(config).await;
    bench.mesh.script().workers = 1;
    // The second of these polls is made after the change, and its answer is known before the third.
    let asked = bench.mesh.log().polls;
    let asks = tokio::time::timeout(Duration::from_secs(60), async {
        while bench.mesh.log().polls < asked + 3 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(
        asks.await.is_ok(),
        "the gateway asks no more what is served"
    );
    bench.mesh.mishap(0, Mishap::Lose(1));
    assert_eq!(bench.chat(json!({})).await.0, 200);
    assert!(bench.mesh.log().leases[1].exclude.is_empty());
}
