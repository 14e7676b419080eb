//! Orders of trainers to a worker with a verifying engine: pauses, and weights that change.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::chunk::*;
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine_order::*;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, TokenId};
use refrain_rpc::{ChunkStream, Worker};
use tokio::task::JoinHandle;

use crate::bench::*;
use crate::continued;
use crate::fakes::FakeEngine;

/// Limits on time in these tests. The work within them takes milliseconds on an idle machine.
pub(crate) const LIMIT_MS: u64 = 5_000;

/// Longer than every such limit.
pub(crate) const LONG: Duration = Duration::from_millis(LIMIT_MS + 500);

pub(crate) fn pause(mode: PauseMode) -> EngineOrder {
    EngineOrder::Pause {
        mode,
        clears_cache: false,
    }
}

pub(crate) async fn order<E>(
    bench: &Bench<E>,
    order: EngineOrder,
) -> Result<EngineState, ApiError> {
    let reply = bench.worker.handle().order(order).await?;
    Ok(reply.state)
}

pub(crate) async fn state<E>(bench: &Bench<E>) -> EngineState {
    order(bench, EngineOrder::Report).await.unwrap()
}

/// An engine whose steps take a millisecond.
fn slow(target: crate::fakes::Target) -> FakeEngine {
    let mut engine = FakeEngine::new(target);
    engine.step_time = Duration::from_millis(1);
    engine
}

/// A stream that has begun, and what has been read of it.
pub(crate) async fn begun<E>(
    bench: &Bench<E>,
    request: ChunkRequest,
) -> (Vec<TokenId>, ChunkStream) {
    let mut stream = bench.worker.handle().chunk(request).await.unwrap();
    let mut tokens = Vec::new();
    while tokens.len() < 3 {
        if let ChunkEvent::Step(step) = stream.next().await.unwrap().unwrap() {
            tokens.extend(step.tokens);
        }
    }
    (tokens, stream)
}

pub(crate) fn reading(begun: (Vec<TokenId>, ChunkStream)) -> JoinHandle<(Vec<TokenId>, Received)> {
    let (first, stream) = begun;
    tokio::spawn(async move {
        let mut received = Received::default();
        read_on(stream, None, &mut received).await;
        let all = [first, received.tokens.clone()].concat();
        (all, received)
    })
}

fn reason(received: &Received) -> ChunkEndReason {
    let end = received.end.as_ref();
    end.unwrap_or_else(|| panic!("{:?}", received.error)).reason
}

#[tokio::test]
async fn a_kept_pause_outlasts_every_limit_and_changes_no_output() {
    let bench = bench(slow(erratic), |config| {
        config.parked_ms_max = LIMIT_MS;
        config.evacuate_after_ms = 50;
        config.running_max = 3;
    })
    .await;
    let timed = |prompt: &[TokenId]| {
        let mut request = chunk(&bench, prompt, 20);
        request.budget.time_left_ms = Some(LIMIT_MS);
        request
    };
    // A request that is parked between two chunks.
    let mut parked = chunk(&bench, &[3, 1, 4], 20);
    parked.chunk_tokens = Some(10);
    let first = run(&bench, parked.clone()).await;
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
    let running = timed(&[1, 2]);
    let (tokens, stream) = begun(&bench, running.clone()).await;
    let paused = order(&bench, pause(PauseMode::Keep)).await.unwrap();
    assert_eq!((paused.pause, paused.running), (Some(PauseMode::Keep), 1));
    let steps = bench.engine.steps.load(Ordering::Relaxed);
    let new = timed(&[5, 6]);
    let held = bench.worker.handle().chunk(new.clone()).await.unwrap();
    let held = tokio::spawn(read(held));
    let running_reader = reading((tokens, stream));
    // A scheduler that wants slots back is told nothing, and sees the leases.
    *bench.scheduler.give_way.lock().unwrap() = vec![running.lease, new.lease];
    tokio::time::sleep(LONG).await;
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), steps);
    assert_eq!(bench.figure("refrain_worker_parked_requests"), 1.0);
    assert_eq!(bench.figure("refrain_worker_paused"), 1.0);
    assert_eq!(bench.figure("refrain_worker_held_chunks"), 1.0);
    let expected = EngineState {
        weight_version: 3,
        pause: Some(PauseMode::Keep),
        running: 1,
        held: 1,
    };
    assert_eq!(state(&bench).await, expected);
    {
        let last = bench.scheduler.last.lock().unwrap();
        let beat = last.as_ref().unwrap();
        assert_eq!(beat.state, Some(expected));
        assert_eq!(beat.running, [running.lease, new.lease]);
        assert!(!beat.draining);
    }
    bench.scheduler.give_way.lock().unwrap().clear();
    // A repeat is harmless.
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    let resumed = order(&bench, EngineOrder::Resume).await.unwrap();
    assert_eq!(resumed.pause, None);
    let (all, ended) = running_reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 20));
    assert!(ended.held_ms >= LIMIT_MS, "{} ms", ended.held_ms);
    let held = held.await.unwrap();
    assert_eq!(held.tokens, plainly(erratic, &[5, 6], 20));
    order(&bench, EngineOrder::Resume).await.unwrap();
    // The parked request had no time to expire, and goes on with what is here.
    let next = continued(&parked, &first.tokens, 1);
    let rest = run(&bench, next).await;
    let all = [first.tokens, rest.tokens].concat();
    assert_eq!(all, plainly(erratic, &[3, 1, 4], all.len()));
    assert_eq!(
        bench.figure("refrain_worker_parking_total{outcome=\"expired\"}"),
        0.0
    );
    let orders = "refrain_worker_orders_total{order=\"pause\",outcome=\"done\"}";
    assert_eq!(bench.figure(orders), 2.0);
}

#[tokio::test]
async fn a_reader_may_leave_a_paused_worker() {
    let bench = bench(slow(erratic), |_| {}).await;
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    let stream = bench.worker.handle().chunk(chunk(&bench, &[1], 9)).await;
    assert_eq!(state(&bench).await.held, 1);
    drop(stream);
    eventually("its place is free", || {
        bench.figure("refrain_worker_chunks_running") == 0.0
    })
    .await;
    assert_eq!(state(&bench).await.held, 0);
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_pause_that_waits_lets_running_requests_end_and_holds_new_ones() {
    let bench = bench(slow(erratic), |_| {}).await;
    let running = chunk(&bench, &[1, 2], 200);
    let running_reader = reading(begun(&bench, running).await);
    let handle = bench.worker.handle();
    let pausing = tokio::spawn(async move { handle.order(pause(PauseMode::Wait)).await });
    eventually("the worker pauses", || {
        bench.figure("refrain_worker_paused") == 1.0
    })
    .await;
    let new = chunk(&bench, &[5, 6], 20);
    let held = tokio::spawn(read(bench.worker.handle().chunk(new).await.unwrap()));
    // A request with output has run before, although not here.
    let mut older = chunk(&bench, &[7, 8, 9], 20);
    older.prompt_len = 1;
    let older = run(&bench, older).await;
    assert_eq!(older.tokens, plainly(erratic, &[7, 8, 9], 20));
    assert!(!pausing.is_finished());
    let (all, ended) = running_reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 200));
    let state = pausing.await.unwrap().unwrap().state;
    assert_eq!(
        (state.pause, state.running, state.held),
        (Some(PauseMode::Wait), 0, 1)
    );
    let steps = bench.engine.steps.load(Ordering::Relaxed);
    // A repeat of a pause that is complete is answered at once, and what comes now waits, with output or without.
    order(&bench, pause(PauseMode::Wait)).await.unwrap();
    let mut late = chunk(&bench, &[4, 4], 20);
    late.prompt_len = 1;
    let late = tokio::spawn(read(bench.worker.handle().chunk(late).await.unwrap()));
    order(&bench, pause(PauseMode::Wait)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), steps);
    order(&bench, EngineOrder::Resume).await.unwrap();
    assert_eq!(held.await.unwrap().tokens, plainly(erratic, &[5, 6], 20));
    assert_eq!(late.await.unwrap().tokens, plainly(erratic, &[4, 4], 20));
}

#[tokio::test]
async fn an_abort_ends_running_requests_with_their_tokens_and_holds_new_ones() {
    let bench = bench(slow(erratic), |_| {}).await;
    let running = chunk(&bench, &[1, 2], 1900);
    let document: DocumentId = running.request.into();
    let running_reader = reading(begun(&bench, running).await);
    let state = order(&bench, pause(PauseMode::Abort)).await.unwrap();
    assert_eq!(
        (state.pause, state.running, state.held),
        (Some(PauseMode::Abort), 0, 0)
    );
    let (all, ended) = running_reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Aborted);
    assert_eq!(all, plainly(erratic, &[1, 2], all.len()));
    eventually("what it had is stored", || {
        let documents = bench.store.documents();
        documents.get(&document).is_some_and(|stored| {
            stored.tokens == all && stored.finish == Some(FinishReason::Cancelled)
        })
    })
    .await;
    let aborted = "refrain_worker_chunks_total{outcome=\"aborted\"}";
    assert_eq!(bench.figure(aborted), 1.0);
    let new = chunk(&bench, &[5, 6], 20);
    let held = tokio::spawn(read(bench.worker.handle().chunk(new).await.unwrap()));
    // A request that was between two chunks ends as well, and a second abort spares what waits.
    let mut older = chunk(&bench, &[7, 8, 9], 20);
    older.prompt_len = 1;
    let older = run(&bench, older).await;
    assert_eq!(
        (reason(&older), older.tokens.len()),
        (ChunkEndReason::Aborted, 0)
    );
    let state = order(&bench, pause(PauseMode::Abort)).await.unwrap();
    assert_eq!((state.running, state.held), (0, 1));
    order(&bench, EngineOrder::Resume).await.unwrap();
    assert_eq!(held.await.unwrap().tokens, plainly(erratic, &[5, 6], 20));
}

#[tokio::test]
async fn a_pause_stays_without_its_caller_and_ends_by_another_order() {
    let bench = bench(slow(erratic), |_| {}).await;
    let running = chunk(&bench, &[1, 2], 1900);
    let running_reader = reading(begun(&bench, running).await);
    let handle = bench.worker.handle();
    let waiting = handle.order(pause(PauseMode::Wait));
    // The caller gives up while requests still run.
    assert!(
        tokio::time::timeout(Duration::from_millis(20), waiting)
            .await
            .is_err()
    );
    assert_eq!(state(&bench).await.pause, Some(PauseMode::Wait));
    // Another caller waits, and is told that it was replaced.
    let second = tokio::spawn(async move { handle.order(pause(PauseMode::Wait)).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    let replaced = second.await.unwrap().unwrap_err();
    assert!(replaced.has_code("order_replaced"), "{replaced}");
    assert_eq!(replaced.kind, ErrorKind::Conflict);
    assert_eq!(state(&bench).await.running, 1);
    order(&bench, pause(PauseMode::Abort)).await.unwrap();
    let (all, ended) = running_reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Aborted);
    assert_eq!(all, plainly(erratic, &[1, 2], all.len()));
}

fn load(directory: &str) -> EngineOrder {
    EngineOrder::LoadWeights {
        directory: directory.into(),
        version: None,
    }
}

#[tokio::test]
async fn running_requests_go_on_with_new_weights_and_drafts_are_kept() {
    let mut engine = slow(stopping_late);
    engine.next_target = Some(repetitive);
    let bench = bench(engine, |_| {}).await;
    let request = chunk(&bench, &[1, 2], 400);
    let document: DocumentId = request.request.into();
    let (mut all, mut stream) = begun(&bench, request).await;
    let state = order(&bench, load("new")).await.unwrap();
    assert_eq!(state.weight_version, 4);
    assert_eq!(bench.figure("refrain_worker_weight_version"), 4.0);
    let mut versions = Vec::new();
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            ChunkEvent::Step(step) => {
                versions.extend(step.tokens.iter().map(|_| step.weight_version));
                all.extend(step.tokens);
            }
            ChunkEvent::End(end) => assert_eq!(end.reason, ChunkEndReason::Length),
            other => panic!("{other:?}"),
        }
    }
    assert!(versions.is_sorted() && versions.contains(&4));
    let old = all.len() - versions.iter().filter(|version| **version == 4).count();
    assert_eq!(all[..old], plainly(stopping_late, &[1, 2], old));
    let text = [&[1, 2], &all[..old]].concat();
    assert_eq!(all[old..], plainly(repetitive, &text, 400 - old));
    // The output is stored with the version of its first token.
    eventually("the store has it", || {
        let documents = bench.store.documents();
        documents
            .get(&document)
            .is_some_and(|stored| stored.tokens == all && stored.head.weight_version == 3)
    })
    .await;
    // Weights that come often are no reason to give a request up.
    let long = chunk(&bench, &[4, 4], 300);
    let reader = reading(begun(&bench, long).await);
    for version in 5..12 {
        let state = order(&bench, load("again")).await.unwrap();
        assert_eq!(state.weight_version, version);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let (all, ended) = reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(repetitive, &[4, 4], 300));
}

#[tokio::test]
async fn weights_that_cannot_be_loaded_change_nothing() {
    let bench = bench(slow(erratic), |_| {}).await;
    let reader = reading(begun(&bench, chunk(&bench, &[1, 2], 200)).await);
    let error = order(&bench, load("damaged")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert!(error.message.contains("damaged"), "{error}");
    assert_eq!(state(&bench).await.weight_version, 3);
    let (all, ended) = reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 200));
    let failed = "refrain_worker_orders_total{order=\"load_weights\",outcome=\"failed\"}";
    assert_eq!(bench.figure(failed), 1.0);
}

#[tokio::test]
async fn one_load_at_a_time_and_a_pause_beside_it() {
    let mut engine = slow(erratic);
    engine.next_target = Some(erratic);
    // Far longer than what comes beside it.
    engine.load_time = Duration::from_secs(5);
    let bench = bench(engine, |_| {}).await;
    let handle = bench.worker.handle();
    let first = tokio::spawn(async move { handle.order(load("new")).await });
    eventually("the engine loads", || {
        bench.engine.loading.load(Ordering::SeqCst) == 1
    })
    .await;
    let error = order(&bench, load("other")).await.unwrap_err();
    assert!(error.has_code("order_under_way"), "{error}");
    let paused = order(&bench, pause(PauseMode::Keep)).await.unwrap();
    assert_eq!(paused.weight_version, 3);
    assert_eq!(first.await.unwrap().unwrap().state.weight_version, 4);
    assert_eq!(state(&bench).await.pause, Some(PauseMode::Keep));
}

#[tokio::test]
async fn versions_are_set_and_foreign_calls_are_refused() {
    let bench = bench(slow(erratic), |_| {}).await;
    let version = EngineOrder::SetVersion { version: 77 };
    assert_eq!(order(&bench, version).await.unwrap().weight_version, 77);
    order(&bench, EngineOrder::FlushCache).await.unwrap();
    let call = EngineCall {
        is_post: false,
        path: "/x".into(),
        body: String::new(),
    };
    let error = order(&bench, EngineOrder::PassOn(call)).await.unwrap_err();
    assert!(error.has_code("unsupported_by_engine"), "{error}");
}

#[tokio::test]
async fn a_worker_that_stops_sends_held_requests_elsewhere() {
    let bench = bench(slow(erratic), |config| config.evacuate_after_ms = 20).await;
    let running = reading(begun(&bench, chunk(&bench, &[1, 2], 1900)).await);
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    let new = bench.worker.handle().chunk(chunk(&bench, &[3], 9)).await;
    let held = tokio::spawn(read(new.unwrap()));
    let handle = bench.worker.handle();
    bench.worker.drain().await;
    assert_eq!(reason(&running.await.unwrap().1), ChunkEndReason::Draining);
    assert_eq!(reason(&held.await.unwrap()), ChunkEndReason::Draining);
    let error = handle.order(EngineOrder::Report).await.unwrap_err();
    assert!(!error.has_code(code::DRAINING) && error.kind == ErrorKind::Unavailable);
}

/// A target that counts up and does not stop before a length of 300.
fn stopping_late(text: &[TokenId]) -> TokenId {
    100 + text.len() as u32 % 500
}
