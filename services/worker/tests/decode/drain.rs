//! What a worker still does while it stops.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::document::FinishReason;
use refrain_protocol::{DocumentId, TokenId};
use refrain_rpc::Worker;
use refrain_worker::WorkerHandle;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening};
use crate::fakes::{FakeEngine, FakeStore};

/// Shortens an output whose chunk has ended to two tokens.
async fn cut(handle: &WorkerHandle, request: &ChunkRequest) {
    let cut = ChunkCut {
        lease: request.lease,
        output_len: 2,
    };
    let answer = tokio::time::timeout(Duration::from_secs(60), handle.cut(cut));
    answer.await.expect("an answer").expect("a cut");
}

fn stored(store: &FakeStore, request: &ChunkRequest) -> Vec<TokenId> {
    let documents = store.documents.lock().unwrap();
    let document = &documents[&DocumentId::from(request.request)];
    assert_eq!(document.finish, Some(FinishReason::Stop));
    document.tokens.clone()
}

/// A reader cuts while the store is to take the outputs.
async fn is_cut_while_outputs_wait<E>(bench: Bench<E>) {
    let (store, handle) = (bench.store.clone(), bench.worker.handle());
    store.refuses_outputs.store(true, Ordering::SeqCst);
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let said = run(&bench, request.clone()).await;
    assert!(said.tokens.len() > 2);
    let drained = tokio::spawn(bench.worker.drain());
    eventually("the worker stops", || handle.readiness().is_err()).await;
    // It waits for the store, and for nothing else.
    let refused = store.refused_outputs.load(Ordering::SeqCst);
    eventually("outputs are sent again", || {
        store.refused_outputs.load(Ordering::SeqCst) >= refused + 2
    })
    .await;
    cut(&handle, &request).await;
    store.refuses_outputs.store(false, Ordering::SeqCst);
    drained.await.unwrap();
    assert_eq!(stored(&store, &request), said.tokens[..2]);
}

#[tokio::test]
async fn a_worker_that_waits_for_the_store_still_shortens() {
    is_cut_while_outputs_wait(bench(FakeEngine::new(stopping), |_| {}).await).await;
    let (_, bench) = listening(FakeStream::new(stopping), |_| {}).await;
    is_cut_while_outputs_wait(bench).await;
}

#[tokio::test]
async fn a_worker_that_tells_what_it_learnt_still_shortens() {
    let store = Arc::new(FakeStore::default());
    let bench = bench_on(store.clone(), FakeEngine::new(stopping), |config| {
        // Told at the end alone.
        config.speculation.chances_interval_ms = 24 * 3_600 * 1_000;
    })
    .await;
    // The second one says what the first one did.
    run(&bench, chunk(&bench, &[1, 2, 3], 1000)).await;
    let request = chunk(&bench, &[1, 2, 3], 1000);
    let said = run(&bench, request.clone()).await;
    let handle = bench.worker.handle();
    let gate = store.chances_gate.lock().await;
    let drained = tokio::spawn(bench.worker.drain());
    eventually("what was learnt is told", || {
        store.chances_waiting.load(Ordering::SeqCst) > 0
    })
    .await;
    // The outputs are in the store already.
    assert_eq!(stored(&store, &request), said.tokens);
    cut(&handle, &request).await;
    drop(gate);
    drained.await.unwrap();
    assert_eq!(stored(&store, &request), said.tokens[..2]);
    assert!(handle.readiness().is_err());
}
