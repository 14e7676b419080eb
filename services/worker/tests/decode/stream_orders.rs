//! Orders of trainers to a worker in front of an engine that generates by itself.

use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::ErrorKind;
use refrain_protocol::chunk::*;
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine_order::*;
use refrain_rpc::Worker;
use refrain_worker::WorkerConfig;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening, stored};
use crate::orders::{LIMIT_MS, LONG, begun, order, pause, reading, state};

/// An engine that takes a few milliseconds for each token.
fn slow() -> FakeStream {
    FakeStream {
        pause: Duration::from_millis(4),
        ..FakeStream::new(erratic)
    }
}

/// Limits on time that are shorter than [`LONG`], and a breaker that opens with the first failure.
fn strict(config: &mut WorkerConfig) {
    config.engine.first_token_ms_max = LIMIT_MS;
    config.engine.idle_ms_max = LIMIT_MS;
    config.engine.breaker_failures_max = 1;
    config.engine.breaker_open_ms = 3_600_000;
}

fn reason(received: &Received) -> ChunkEndReason {
    let end = received.end.as_ref();
    end.unwrap_or_else(|| panic!("{:?}", received.error)).reason
}

fn failures<E>(bench: &Bench<E>) -> f64 {
    bench.figure("refrain_worker_engine_failures_total")
        + bench.figure("refrain_worker_engine_breaker_open{model=\"fake\"}")
}

#[tokio::test]
async fn no_limit_of_the_worker_ends_a_call_of_a_paused_engine() {
    let (engine, bench) = listening(slow(), strict).await;
    let mut running = chunk(&bench, &[1, 2], 40);
    running.budget.time_left_ms = Some(LIMIT_MS);
    let running_reader = reading(begun(&bench, running).await);
    let paused = order(&bench, pause(PauseMode::Keep)).await.unwrap();
    assert_eq!((paused.pause, paused.running), (Some(PauseMode::Keep), 1));
    let asked = engine.asked.lock().unwrap().len();
    let mut new = chunk(&bench, &[5, 6], 20);
    new.budget.time_left_ms = Some(LIMIT_MS);
    let held = tokio::spawn(read(bench.worker.handle().chunk(new).await.unwrap()));
    tokio::time::sleep(LONG).await;
    assert_eq!(state(&bench).await.held, 1);
    assert_eq!(engine.asked.lock().unwrap().len(), asked);
    assert!(bench.worker.handle().readiness().is_ok());
    order(&bench, EngineOrder::Resume).await.unwrap();
    let (all, ended) = running_reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 40));
    let held = held.await.unwrap();
    assert_eq!(held.tokens, plainly(erratic, &[5, 6], 20));
    assert!(held.held_ms >= LIMIT_MS, "{} ms", held.held_ms);
    assert_eq!(failures(&bench), 0.0);
}

#[tokio::test]
async fn an_abort_ends_running_streams_and_trips_no_breaker() {
    let (engine, bench) = listening(slow(), strict).await;
    let running = chunk(&bench, &[1, 2], 1000);
    let reader = reading(begun(&bench, running.clone()).await);
    let state = order(&bench, pause(PauseMode::Abort)).await.unwrap();
    assert_eq!((state.running, state.held), (0, 0));
    let (all, ended) = reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Aborted);
    assert_eq!(all, plainly(erratic, &[1, 2], all.len()));
    engine.becomes_free().await;
    eventually("what it had is stored", || {
        stored(&bench, &running) == Some((all.clone(), Some(FinishReason::Cancelled)))
    })
    .await;
    let new = chunk(&bench, &[5, 6], 20);
    let held = tokio::spawn(read(bench.worker.handle().chunk(new).await.unwrap()));
    order(&bench, pause(PauseMode::Abort)).await.unwrap();
    order(&bench, EngineOrder::Resume).await.unwrap();
    assert_eq!(held.await.unwrap().tokens, plainly(erratic, &[5, 6], 20));
    assert_eq!(failures(&bench), 0.0);
}

#[tokio::test]
async fn a_pause_that_waits_tells_the_engine_once_its_requests_have_ended() {
    let (engine, bench) = listening(slow(), |_| {}).await;
    let reader = reading(begun(&bench, chunk(&bench, &[1, 2], 60)).await);
    let handle = bench.worker.handle();
    let pausing = tokio::spawn(async move { handle.order(pause(PauseMode::Wait)).await });
    let (all, _) = reader.await.unwrap();
    assert_eq!(all, plainly(erratic, &[1, 2], 60));
    let state = pausing.await.unwrap().unwrap().state;
    assert_eq!((state.pause, state.running), (Some(PauseMode::Wait), 0));
    assert_eq!(
        engine.orders.received.lock().unwrap()[..],
        [pause(PauseMode::Wait)]
    );
}

#[tokio::test]
async fn an_engine_that_aborts_by_itself_has_failed_and_is_asked_again_after_a_pause() {
    let (engine, bench) = listening(slow(), |config| {
        strict(config);
        config.engine.breaker_failures_max = 2;
    })
    .await;
    engine.orders.aborts.store(true, Ordering::SeqCst);
    let failed = run(&bench, chunk(&bench, &[1, 2], 50)).await;
    assert_eq!(failed.error.unwrap().kind, ErrorKind::Upstream);
    assert_eq!(failures(&bench), 1.0);
    engine.orders.aborts.store(false, Ordering::SeqCst);
    let reader = reading(begun(&bench, chunk(&bench, &[1, 2], 60)).await);
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    // The engine gives up what it was told to keep, so it is asked again after the pause.
    engine.orders.aborts.store(true, Ordering::SeqCst);
    engine.orders.is_paused.send_replace(false);
    engine.becomes_free().await;
    engine.orders.aborts.store(false, Ordering::SeqCst);
    assert_eq!(state(&bench).await.running, 1);
    order(&bench, EngineOrder::Resume).await.unwrap();
    let (all, ended) = reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 60));
    assert_eq!(failures(&bench), 1.0);
}

#[tokio::test]
async fn a_stream_that_is_given_up_before_it_begins_hides_no_cached_tokens() {
    let (engine, bench) = listening(slow(), |_| {}).await;
    engine.orders.is_paused.send_replace(true);
    let request = chunk(&bench, &[1, 2, 3], 20);
    let stream = bench.worker.handle().chunk(request).await.unwrap();
    let reader = tokio::spawn(read(stream));
    eventually("the engine has the request", || {
        engine.at_work.load(Ordering::SeqCst) == 1
    })
    .await;
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    // It gives the request up without an answer, and is asked again after the pause.
    engine.orders.aborts.store(true, Ordering::SeqCst);
    engine.orders.is_paused.send_replace(false);
    engine.becomes_free().await;
    engine.orders.aborts.store(false, Ordering::SeqCst);
    order(&bench, EngineOrder::Resume).await.unwrap();
    let received = reader.await.unwrap();
    assert_eq!(received.tokens, plainly(erratic, &[1, 2, 3], 20));
    assert_eq!(received.end.unwrap().cached_tokens, 2);
    assert_eq!(engine.asked.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn streams_wait_while_the_engine_loads_weights_and_have_the_next_version() {
    let (engine, bench) = listening(slow(), strict).await;
    *engine.orders.load_time.lock().unwrap() = LONG;
    let load = |version| EngineOrder::LoadWeights {
        directory: "/new".into(),
        version,
    };
    let reader = reading(begun(&bench, chunk(&bench, &[1, 2], 60)).await);
    let state = order(&bench, load(None)).await.unwrap();
    assert_eq!((state.weight_version, state.pause), (1, None));
    let clears = EngineOrder::Pause {
        mode: PauseMode::Keep,
        clears_cache: true,
    };
    let expected = [clears.clone(), load(Some(1)), EngineOrder::Resume];
    assert_eq!(engine.orders.received.lock().unwrap()[..], expected);
    let (all, ended) = reader.await.unwrap();
    assert_eq!(reason(&ended), ChunkEndReason::Length);
    assert_eq!(all, plainly(erratic, &[1, 2], 60));
    assert!(ended.versions.is_sorted() && ended.versions.last() == Some(&1));
    // A load that fails leaves the version, and the engine goes on.
    *engine.orders.load_time.lock().unwrap() = Duration::ZERO;
    engine.orders.load_fails.store(true, Ordering::SeqCst);
    assert!(order(&bench, load(Some(9))).await.is_err());
    assert_eq!(state_of(&bench).await, (1, None));
    let after = run(&bench, chunk(&bench, &[3, 4], 20)).await;
    assert_eq!(after.tokens, plainly(erratic, &[3, 4], 20));
    assert!(after.versions.iter().all(|version| *version == 1));
    // It may have its first weights then. Nothing generates before it was told to go on, which may take some calls.
    engine.orders.begins_anew.store(true, Ordering::SeqCst);
    engine.orders.resumes_lost.store(4, Ordering::SeqCst);
    let handle = bench.worker.handle();
    let loading = tokio::spawn(async move { handle.order(load(Some(9))).await });
    eventually("a call to go on was lost", || {
        engine.orders.resumes_lost.load(Ordering::SeqCst) < 4
    })
    .await;
    let asked = engine.asked.lock().unwrap().len();
    let new = bench.worker.handle().chunk(chunk(&bench, &[5], 5)).await;
    let held = tokio::spawn(read(new.unwrap()));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(engine.asked.lock().unwrap().len(), asked);
    assert_eq!(
        loading.await.unwrap().unwrap_err().message,
        "planned failure"
    );
    assert_eq!(held.await.unwrap().versions, [0; 5]);
    assert_eq!(state_of(&bench).await, (0, None));
    // A paused worker stays so.
    engine.orders.load_fails.store(false, Ordering::SeqCst);
    order(&bench, pause(PauseMode::Keep)).await.unwrap();
    order(&bench, load(Some(9))).await.unwrap();
    assert_eq!(state_of(&bench).await, (9, Some(PauseMode::Keep)));
    let received = engine.orders.received.lock().unwrap();
    assert_eq!(received.last(), Some(&load(Some(9))));
    assert_eq!(failures(&bench), 0.0);
}

async fn state_of<E>(bench: &Bench<E>) -> (u64, Option<PauseMode>) {
    let state = state(bench).await;
    (state.weight_version, state.pause)
}

#[tokio::test]
async fn calls_are_passed_on_and_engines_without_orders_refuse_before_anything_changes() {
    let (engine, bench) = listening(slow(), |_| {}).await;
    let call = EngineCall {
        is_post: true,
        path: "/init".into(),
        body: "{}".into(),
    };
    let reply = bench.worker.handle().order(EngineOrder::PassOn(call)).await;
    let answer = reply.unwrap().answer.unwrap();
    assert_eq!((answer.status, &*answer.body), (202, "/init"));
    let set = EngineOrder::SetVersion { version: 7 };
    assert_eq!(order(&bench, set).await.unwrap().weight_version, 7);
    let run_seven = run(&bench, chunk(&bench, &[1], 5)).await;
    assert_eq!(run_seven.versions, [7; 5]);
    engine.orders.refuses.store(true, Ordering::SeqCst);
    let reader = reading(begun(&bench, chunk(&bench, &[1, 2], 40)).await);
    let error = order(&bench, pause(PauseMode::Abort)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert_eq!(state_of(&bench).await, (7, None));
    assert_eq!(reader.await.unwrap().0, plainly(erratic, &[1, 2], 40));
}
