//! Transfers of requests to a worker whose head serves them better.

use refrain_protocol::WorkerId;
use refrain_protocol::chunk::{ChunkEndReason, ChunkRequest, Speculation};
use refrain_protocol::scheduling::Eagle3Report;
use refrain_worker::FallbackChoice;

use crate::bench::*;
use crate::fakes::{FakeEngine, Target};

const GOOD: Eagle3Report = Eagle3Report {
    accepted_length: 3.0,
    speedup: 2.0,
};

/// A worker with the fallback worker `other`, which has this report.
async fn bench_with_other(target: Target, report: Option<Eagle3Report>) -> Bench {
    let bench = bench(FakeEngine::new(target), |config| {
        config.speculation.fallback = FallbackChoice::Worker("other".into());
    })
    .await;
    *bench.scheduler.fallback.lock().unwrap() = report;
    // The worker knows the report after two heartbeats.
    for _ in 0..2 {
        bench.scheduler.last.lock().unwrap().take();
        eventually("a heartbeat names the fallback", || {
            let last = bench.scheduler.last.lock().unwrap();
            last.as_ref()
                .is_some_and(|heartbeat| heartbeat.fallback == Some(WorkerId("other".into())))
        })
        .await;
    }
    bench
}

/// The next chunk of the request, at the worker that it was transferred to.
fn next(mut request: ChunkRequest, received: &Received) -> ChunkRequest {
    request.lease.0 += 1_000_000;
    request.epoch += 1;
    request.tokens.extend(&received.tokens);
    request.max_new_tokens -= received.tokens.len() as u32;
    request.transferred = true;
    request
}

#[tokio::test]
async fn a_request_without_good_drafts_is_transferred_once() {
    let bench = bench_with_other(counting, Some(GOOD)).await;
    let prompt: Vec<_> = (1..=16).collect();
    let request = chunk(&bench, &prompt, 600);
    let first = run(&bench, request.clone()).await;
    let end = first.end.clone().unwrap();
    assert_eq!(end.reason, ChunkEndReason::Transfer);
    assert_eq!(end.next_worker, Some(WorkerId("other".into())));
    assert!(
        (64..200).contains(&first.tokens.len()),
        "{}",
        first.tokens.len()
    );
    // A request that comes back stays here.
    let request = next(request, &first);
    let second = run(&bench, request).await;
    let end = second.end.unwrap();
    assert_eq!(
        (end.reason, end.next_worker),
        (ChunkEndReason::Length, None)
    );
    let output = [first.tokens, second.tokens].concat();
    assert_eq!(output, plainly(counting, &prompt, 600));
    assert_eq!(
        bench.figure("refrain_worker_chunks_total{outcome=\"transferred\"}"),
        1.0
    );
}

#[tokio::test]
async fn requests_stay_if_suffix_drafts_serve_them_or_no_other_worker_does() {
    let report = |speedup| Some(Eagle3Report { speedup, ..GOOD });
    for (target, report, speculation) in [
        (repetitive as Target, Some(GOOD), Speculation::Auto),
        (counting, None, Speculation::Auto),
        (counting, None, Speculation::Eagle3),
        (counting, report(0.9), Speculation::Auto),
        (counting, Some(GOOD), Speculation::Suffix),
        (counting, Some(GOOD), Speculation::Off),
    ] {
        let bench = bench_with_other(target, report).await;
        let mut request = chunk(&bench, &[1, 2, 3], 500);
        request.speculation = speculation;
        let received = run(&bench, request).await;
        let reason = received.end.unwrap().reason;
        assert_eq!(reason, ChunkEndReason::Length, "{report:?} {speculation:?}");
        assert_eq!(received.tokens, plainly(target, &[1, 2, 3], 500));
    }
}

#[tokio::test]
async fn a_request_that_asks_for_the_head_is_transferred_before_its_prompt_is_read() {
    let bench = bench_with_other(counting, Some(GOOD)).await;
    let mut request = chunk(&bench, &[1, 2, 3], 50);
    request.speculation = Speculation::Eagle3;
    let received = run(&bench, request.clone()).await;
    assert_eq!(
        received.end.as_ref().unwrap().reason,
        ChunkEndReason::Transfer
    );
    assert!(received.tokens.is_empty());
    assert_eq!(bench.engine.opened.lock().unwrap().len(), 0);
    // A request is transferred only once: it is decoded here, without drafts.
    let back = run(&bench, next(request, &received)).await;
    assert_eq!(back.tokens, plainly(counting, &[1, 2, 3], 50));
    assert!(bench.decisions("plain", "no_fallback") > 0.0);
}
