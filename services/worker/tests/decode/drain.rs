//! Cuts of outputs while the worker stops, and drains that an operator orders.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason, ChunkRequest};
use refrain_protocol::document::FinishReason;
use refrain_protocol::error::code;
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::{DocumentId, ErrorKind, TokenId};
use refrain_rpc::Worker;
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_worker::WorkerHandle;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening};
use crate::fakes::FakeEngine;

/// Shortens an output whose chunk has ended to two tokens.
async fn cut(handle: &WorkerHandle, request: &ChunkRequest) {
    let cut = ChunkCut {
        lease: request.lease,
        output_len: 2,
        aborted: false,
    };
    let answer = tokio::time::timeout(PATIENCE, handle.cut(cut));
    answer.await.expect("an answer").expect("a cut");
}

fn stored(store: &FakeStore, request: &ChunkRequest) -> Vec<TokenId> {
    let documents = store.documents();
    let document = &documents[&DocumentId::from(request.request)];
    assert_eq!(document.finish, Some(FinishReason::Stop));
    document.tokens.clone()
}

/// A reader cuts an output while the worker waits for the store.
async fn is_cut_while_outputs_wait<E>(bench: Bench<E>) {
    let (store, handle) = (bench.store.clone(), bench.worker.handle());
    let refused = Arc::new(AtomicUsize::new(0));
    let count = refused.clone();
    store.refuse(move |call| {
        let is_append = matches!(call, StoreCall::Append(_));
        count.fetch_add(usize::from(is_append), Ordering::SeqCst);
        is_append.then_some(ErrorKind::Unavailable)
    });
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let received = run(&bench, request.clone()).await;
    assert!(received.tokens.len() > 2);
    let drained = tokio::spawn(bench.worker.drain());
    eventually("the worker stops", || handle.readiness().is_err()).await;
    // The worker now waits for the store alone.
    let before = refused.load(Ordering::SeqCst);
    eventually("outputs are sent again", || {
        refused.load(Ordering::SeqCst) >= before + 2
    })
    .await;
    cut(&handle, &request).await;
    store.remove_hook();
    drained.await.unwrap();
    assert_eq!(stored(&store, &request), received.tokens[..2]);
}

#[tokio::test]
async fn outputs_are_cut_while_the_worker_waits_for_uploads() {
    is_cut_while_outputs_wait(bench(FakeEngine::new(stopping), |_| {}).await).await;
    let (_, bench) = listening(FakeStream::new(stopping), |_| {}).await;
    is_cut_while_outputs_wait(bench).await;
}

#[tokio::test]
async fn outputs_are_cut_while_the_worker_uploads_statistics() {
    let store = Arc::new(FakeStore::default());
    let bench = bench_on(store.clone(), FakeEngine::new(stopping), |config| {
        // The statistics are sent only at the end.
        config.speculation.statistics_interval_ms = 24 * 3_600 * 1_000;
    })
    .await;
    // The second output is equal to the first one, so it is drafted.
    run(&bench, chunk(&bench, &[1, 2, 3], 1000)).await;
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let received = run(&bench, request.clone()).await;
    let handle = bench.worker.handle();
    let gate = Arc::new(tokio::sync::Mutex::new(()));
    let closed = gate.clone().lock_owned().await;
    let is_saving = |call: &StoreCall| matches!(call, StoreCall::AcceptanceStats(of) if !of.statistics.is_empty());
    store.set_hook(move |call| {
        let (waits, gate) = (is_saving(call), gate.clone());
        async move {
            if waits {
                drop(gate.lock().await);
            }
            Ok(())
        }
    });
    let drained = tokio::spawn(bench.worker.drain());
    eventually("the statistics are uploaded", || {
        store.content().calls.iter().any(is_saving)
    })
    .await;
    // The store has the outputs already.
    assert_eq!(stored(&store, &request), received.tokens);
    cut(&handle, &request).await;
    drop(closed);
    drained.await.unwrap();
    assert_eq!(stored(&store, &request), received.tokens[..2]);
    assert!(handle.readiness().is_err());
}

/// Gives the order, and waits until the scheduler knows of it.
async fn order<E>(bench: &Bench<E>, drains: bool) {
    let order = WorkerDrain { drains };
    bench.worker.handle().drain(order).await.unwrap();
    eventually("the scheduler knows", || {
        let last = bench.scheduler.last.lock().unwrap();
        last.as_ref().is_some_and(|beat| beat.draining == drains)
    })
    .await;
}

#[tokio::test]
async fn an_ordered_drain_moves_requests_away_until_it_is_taken_back() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(2);
    let bench = bench(engine, |config| config.evacuate_after_ms = 20).await;
    let handle = bench.worker.handle();
    let stream = handle.chunk(chunk(&bench, &[1], 1900)).await.unwrap();
    let reader = tokio::spawn(read(stream));
    order(&bench, true).await;
    let received = reader.await.unwrap();
    let end = received.end.map(|end| end.reason);
    assert_eq!(end, Some(ChunkEndReason::Draining));
    assert_eq!(handle.readiness(), Err("drained by an operator".into()));
    let refused = handle.chunk(chunk(&bench, &[1], 5)).await.err().unwrap();
    assert!(refused.has_code(code::DRAINING));
    order(&bench, false).await;
    assert_eq!(handle.readiness(), Ok(()));
    assert_eq!(run(&bench, chunk(&bench, &[1], 5)).await.tokens.len(), 5);
}

#[tokio::test]
async fn a_drain_that_is_taken_back_in_its_grace_ends_no_request() {
    let mut engine = FakeEngine::new(erratic);
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |config| config.evacuate_after_ms = 3_600_000).await;
    let handle = bench.worker.handle();
    let stream = handle.chunk(chunk(&bench, &[1], 300)).await.unwrap();
    let reader = tokio::spawn(read(stream));
    order(&bench, true).await;
    order(&bench, true).await;
    order(&bench, false).await;
    let received = reader.await.unwrap();
    assert_eq!(received.tokens, plainly(erratic, &[1], 300));
}
