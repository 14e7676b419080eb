//! Requests that are parked between two chunks, and the work that their next chunk saves.

use std::sync::atomic::Ordering;

use refrain_protocol::chunk::*;
use refrain_protocol::engine::Sampling;
use refrain_protocol::error::code;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, LeaseId, TokenId};
use refrain_rpc::Worker;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening};
use crate::fakes::FakeEngine;

const PROMPT: [TokenId; 5] = [3, 1, 4, 1, 5];

/// The chunk after `nth` others, which names the context that they left.
fn resuming<E>(
    bench: &Bench<E>,
    first: &ChunkRequest,
    output: &[TokenId],
    nth: u64,
) -> ChunkRequest {
    let context = [&first.tokens, output].concat();
    let mut hasher = PrefixHasher::new(&first.namespace.namespace.id());
    hasher.extend(&context);
    // Fresh, since a signature does not last for ever.
    let namespace = bench.signer.sign(first.namespace.namespace.clone());
    ChunkRequest {
        lease: LeaseId(first.lease.0 + u128::from(nth) * 1_000_000),
        epoch: first.epoch + nth,
        namespace,
        resumes: Some(ParkedContext {
            epoch: first.epoch + nth - 1,
            tokens: context.len() as u32,
            hash: hasher.whole(),
        }),
        tokens: Vec::new(),
        sampling: Sampling::default(),
        max_new_tokens: first.max_new_tokens - output.len() as u32,
        ..first.clone()
    }
}

/// The same chunk with its whole context.
fn whole(first: &ChunkRequest, output: &[TokenId], resuming: ChunkRequest) -> ChunkRequest {
    ChunkRequest {
        resumes: None,
        tokens: [&first.tokens, output].concat(),
        sampling: first.sampling.clone(),
        ..resuming
    }
}

/// A request of 100 tokens in chunks of 20 or a few more.
fn first<E>(bench: &Bench<E>) -> ChunkRequest {
    ChunkRequest {
        chunk_tokens: Some(20),
        ..chunk(bench, &PROMPT, 100)
    }
}

fn tokens<E>(bench: &Bench<E>, origin: &str) -> f64 {
    bench.figure(&format!(
        "refrain_worker_context_tokens_total{{origin=\"{origin}\"}}"
    ))
}

fn outcomes<E>(bench: &Bench<E>, outcome: &str) -> f64 {
    bench.figure(&format!(
        "refrain_worker_parking_total{{outcome=\"{outcome}\"}}"
    ))
}

async fn refused<E>(bench: &Bench<E>, request: &ChunkRequest) -> ApiError {
    match bench.worker.handle().chunk(request.clone()).await {
        Ok(_) => panic!("the chunk was not refused"),
        Err(error) => error,
    }
}

#[tokio::test]
async fn a_chunk_that_stays_costs_only_its_new_tokens() {
    for target in [repetitive as crate::fakes::Target, erratic, counting] {
        let bench = bench(FakeEngine::new(target), |_| {}).await;
        let request = first(&bench);
        let received = run(&bench, request.clone()).await;
        let (mut output, mut chunks) = (received.tokens, 1);
        let mut reason = received.end.unwrap().reason;
        while reason == ChunkEndReason::ChunkLimit {
            assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
            let held = (PROMPT.len() + output.len()) as f64;
            assert_eq!(bench.figure("refrain_worker_parked_tokens"), held);
            let next = run(&bench, resuming(&bench, &request, &output, chunks)).await;
            let end = next.end.unwrap();
            assert_eq!(end.cached_tokens as usize, PROMPT.len() + output.len() - 1);
            (reason, chunks) = (end.reason, chunks + 1);
            output.extend(next.tokens);
        }
        assert!(chunks >= 4);
        assert_eq!(output, plainly(target, &PROMPT, 100));
        // The context was sent, indexed and read once, in one session, whatever the number of chunks.
        assert_eq!(tokens(&bench, "sent"), PROMPT.len() as f64);
        assert_eq!(
            bench.engine.sent.load(Ordering::Relaxed),
            PROMPT.len() as u64
        );
        assert_eq!(bench.engine.opened.lock().unwrap().len(), 1);
        assert_eq!(outcomes(&bench, "resumed"), chunks as f64 - 1.0);
        assert_eq!(bench.figure("refrain_worker_parked_requests"), 0.0);
        eventually("the session is closed", || {
            bench.engine.closed.load(Ordering::Relaxed) == 1
        })
        .await;
        bench.worker.drain().await;
        let stored = bench.store.documents();
        assert_eq!(stored[&DocumentId::from(request.request)].tokens, output);
    }
}

#[tokio::test]
async fn a_context_that_is_gone_is_sent_under_the_same_lease() {
    let bench = bench(FakeEngine::new(erratic), |config| {
        config.parked_requests_max = 1;
    })
    .await;
    let (one, other) = (first(&bench), first(&bench));
    let of_one = run(&bench, one.clone()).await.tokens;
    let of_other = run(&bench, other.clone()).await.tokens;
    assert_eq!(outcomes(&bench, "evicted"), 1.0);
    let next = resuming(&bench, &one, &of_one, 1);
    let gone = refused(&bench, &next).await;
    assert!(gone.has_code(code::CONTEXT_GONE), "{gone}");
    assert_eq!(outcomes(&bench, "gone"), 1.0);
    let rest = run(&bench, whole(&one, &of_one, next)).await;
    let all = [of_one, rest.tokens].concat();
    assert_eq!(all, plainly(erratic, &PROMPT, all.len()));
    // Its end needed the place. Another context than the parked one is no better than none.
    assert!(
        refused(&bench, &resuming(&bench, &other, &of_other, 1))
            .await
            .has_code(code::CONTEXT_GONE)
    );
    let mut wrong = all.clone();
    wrong[7] += 1;
    let next = resuming(&bench, &one, &wrong, 2);
    assert!(refused(&bench, &next).await.has_code(code::CONTEXT_GONE));
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 0.0);
    let end = run(&bench, whole(&one, &all, next)).await;
    assert_eq!(
        [all, end.tokens].concat()[..60],
        plainly(erratic, &PROMPT, 60)[..]
    );
}

#[tokio::test]
async fn parked_requests_expire_and_a_full_worker_parks_them_again() {
    let bench = bench(FakeEngine::new(erratic), |config| {
        config.running_max = 1;
        config.slot_wait_ms = 1;
        config.parked_ms_max = 5_000;
    })
    .await;
    let request = first(&bench);
    let output = run(&bench, request.clone()).await.tokens;
    let next = resuming(&bench, &request, &output, 1);
    let long = bench
        .worker
        .handle()
        .chunk(chunk(&bench, &[9], 1_900))
        .await
        .unwrap();
    let full = refused(&bench, &next).await;
    assert!(full.has_code(code::WORKER_FULL), "{full}");
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
    drop(long);
    eventually("the heartbeats find that its time is up", || {
        outcomes(&bench, "expired") == 1.0
    })
    .await;
    assert!(refused(&bench, &next).await.has_code(code::CONTEXT_GONE));
    eventually("its session is closed", || {
        bench.engine.closed.load(Ordering::Relaxed) == 2
    })
    .await;
}

#[tokio::test]
async fn an_engine_that_lost_the_session_reads_the_context_again() {
    let bench = bench(FakeEngine::new(repetitive), |_| {}).await;
    let request = first(&bench);
    let output = run(&bench, request.clone()).await.tokens;
    bench.engine.amnesia.store(1, Ordering::Relaxed);
    let next = run(&bench, resuming(&bench, &request, &output, 1)).await;
    assert_eq!(next.end.unwrap().cached_tokens, 0);
    let all = [output, next.tokens].concat();
    assert_eq!(all, plainly(repetitive, &PROMPT, all.len()));
    assert_eq!(bench.engine.opened.lock().unwrap().len(), 2);
    assert_eq!(tokens(&bench, "sent"), PROMPT.len() as f64);
}

#[tokio::test]
async fn what_nobody_goes_on_with_is_let_go() {
    let bench = bench(FakeEngine::new(erratic), |_| {}).await;
    let (cut, anew, old) = (first(&bench), first(&bench), first(&bench));
    let mut outputs = Vec::new();
    for request in [&cut, &anew, &old] {
        outputs.push(run(&bench, request.clone()).await.tokens);
    }
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 3.0);
    let lease = cut.lease;
    let end = ChunkCut {
        lease,
        output_len: 12,
        aborted: false,
    };
    bench.worker.handle().cut(end).await.unwrap();
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 2.0);
    let next = resuming(&bench, &anew, &outputs[1], 1);
    run(
        &bench,
        ChunkRequest {
            chunk_tokens: None,
            ..whole(&anew, &outputs[1], next)
        },
    )
    .await;
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
    // The chunk of an older lease leaves alone what is parked.
    let stale = ChunkRequest {
        epoch: old.epoch,
        ..resuming(&bench, &old, &outputs[2], 1)
    };
    assert_eq!(refused(&bench, &stale).await.kind, ErrorKind::Conflict);
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
    assert_eq!(outcomes(&bench, "dropped"), 2.0);
    let malformed = ChunkRequest {
        tokens: vec![1],
        ..resuming(&bench, &old, &outputs[2], 1)
    };
    assert_eq!(
        refused(&bench, &malformed).await.kind,
        ErrorKind::InvalidRequest
    );
    bench.worker.drain().await;
    let page = String::from_utf8(bench.metrics.render()).unwrap();
    assert!(page.contains("\nrefrain_worker_parked_requests 0\n"));
    let stored = bench.store.documents();
    assert_eq!(
        stored[&DocumentId::from(cut.request)].tokens,
        outputs[0][..12]
    );
    assert_eq!(stored[&DocumentId::from(old.request)].tokens, outputs[2]);
}

#[tokio::test]
async fn an_engine_that_generates_by_itself_gets_the_parked_context() {
    let (engine, bench) = listening(FakeStream::new(erratic), |_| {}).await;
    let request = first(&bench);
    let mut output = run(&bench, request.clone()).await.tokens;
    for nth in 1..5 {
        let next = run(&bench, resuming(&bench, &request, &output, nth)).await;
        output.extend(next.tokens);
    }
    assert_eq!(output, plainly(erratic, &PROMPT, 100));
    assert_eq!(tokens(&bench, "sent"), PROMPT.len() as f64);
    let asked = engine.asked.lock().unwrap();
    assert_eq!(asked.len(), 5);
    let is_first = |call: &refrain_worker::GenerateRequest| call.tokens.len() == PROMPT.len();
    assert_eq!(asked.iter().filter(|call| is_first(call)).count(), 1);
    assert!(asked.iter().all(|call| call.sampling == request.sampling));
}

#[tokio::test]
async fn heartbeats_tell_the_kv_cache_of_a_streaming_engine() {
    let (_, bench) = listening(FakeStream::new(erratic), |_| {}).await;
    let last = bench.scheduler.last.lock().unwrap().clone();
    let report = last.unwrap().kv.unwrap();
    assert_eq!(
        (report.capacity_tokens, report.running_tokens),
        (1_000, 250)
    );
    assert_eq!(report.held, None);
}
