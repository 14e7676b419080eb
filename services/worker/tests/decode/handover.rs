//! Requests that are better off with the head of another worker.

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

/// A worker whose fallback is `other`, which does so well.
async fn bench_with_other(target: Target, report: Option<Eagle3Report>) -> Bench {
    let bench = bench(FakeEngine::new(target), |config| {
        config.speculation.fallback = FallbackChoice::Worker("other".into());
    })
    .await;
    *bench.scheduler.fallback.lock().unwrap() = report;
    // Two heartbeats later the worker has heard of it.
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

/// The chunk after this one, at the worker that it was handed over to.
fn next(mut request: ChunkRequest, said: &Said) -> ChunkRequest {
    request.lease.0 += 1_000_000;
    request.epoch += 1;
    request.tokens.extend(&said.tokens);
    request.max_new_tokens -= said.tokens.len() as u32;
    request.transferred = true;
    request
}

#[tokio::test]
async fn a_request_without_good_drafts_is_handed_over_once() {
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
    // Had it come back here, it would have stayed.
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
        bench.figure("refrain_worker_chunks_total{outcome=\"to_fallback\"}"),
        1.0
    );
}

#[tokio::test]
async fn requests_stay_where_suffix_drafts_serve_them_or_nobody_else_does() {
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
        let said = run(&bench, request).await;
        let reason = said.end.unwrap().reason;
        assert_eq!(reason, ChunkEndReason::Length, "{report:?} {speculation:?}");
        assert_eq!(said.tokens, plainly(target, &[1, 2, 3], 500));
    }
}

#[tokio::test]
async fn who_asks_for_the_head_goes_before_the_prompt_is_read() {
    let bench = bench_with_other(counting, Some(GOOD)).await;
    let mut request = chunk(&bench, &[1, 2, 3], 50);
    request.speculation = Speculation::Eagle3;
    let said = run(&bench, request.clone()).await;
    assert_eq!(said.end.as_ref().unwrap().reason, ChunkEndReason::Transfer);
    assert!(said.tokens.is_empty());
    assert_eq!(bench.engine.opened.lock().unwrap().len(), 0);
    // Nobody is handed over twice: it is decoded here, plainly.
    let back = run(&bench, next(request, &said)).await;
    assert_eq!(back.tokens, plainly(counting, &[1, 2, 3], 50));
    assert!(bench.decisions("plain", "no_fallback") > 0.0);
}
