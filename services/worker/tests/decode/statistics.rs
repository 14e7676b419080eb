//! Acceptance statistics are saved in the store, and a worker that starts goes on from there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::chunk::Speculation;
use refrain_protocol::{ErrorKind, Namespace, TokenId};
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_speculation::draft::Setting;
use refrain_worker::ExpansionChoice;

use crate::bench::*;
use crate::fakes::FakeEngine;

/// A few tokens in no order: earlier text does not predict later text.
fn misleading(text: &[TokenId]) -> TokenId {
    let mixed = (text.len() as u32 ^ 0x9e37).wrapping_mul(0x9e37_79b1);
    1 + (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77) % 23
}

const ANSWERED: &str = "refrain_spec_statistics_calls_total{model=\"fake\",outcome=\"answered\"}";

fn refuse_statistics(store: &FakeStore) {
    store.refuse(|call| {
        let is_refused = matches!(call, StoreCall::AcceptanceStats(_));
        is_refused.then_some(ErrorKind::Unavailable)
    });
}

async fn worker(store: Arc<FakeStore>, interval_ms: u64) -> Bench {
    let mut engine = FakeEngine::new(misleading);
    engine.verify_s = 0.000_01;
    bench_on(store, engine, |config| {
        config.speculation.gain_min = 0.0;
        // Short chains are verified to the end. In a large tree the part that is left out is learnt to be worthless
        // at once.
        config.speculation.expansion = ExpansionChoice::Linear;
        config.speculation.max_spec_tokens = 16;
        config.speculation.min_token_prob = Setting::Fixed(0.45);
        config.speculation.statistics_interval_ms = interval_ms;
    })
    .await
}

/// Expected tokens per drafted token of one request; 0 if it expects too little of any to draft it.
async fn expects(bench: &Bench) -> f64 {
    run(bench, chunk(bench, &[1, 2, 3], 120)).await;
    let expected =
        bench.figure("refrain_spec_expected_tokens_total{model=\"fake\",source=\"suffix\"}");
    let drafted =
        bench.figure("refrain_spec_budget_tokens_total{model=\"fake\",outcome=\"admitted\"}");
    match drafted > 0.0 {
        true => expected / drafted,
        false => 0.0,
    }
}

/// The same of a worker that has asked the store and learnt nothing by itself.
async fn expects_at_first(new: Bench) -> f64 {
    // It asks with the first request of the namespace.
    let mut first = chunk(&new, &[7, 8], 2);
    first.speculation = Speculation::Off;
    run(&new, first).await;
    eventually("the store has answered", || new.figure(ANSWERED) >= 1.0).await;
    expects(&new).await
}

#[tokio::test]
async fn a_new_worker_expects_as_much_as_a_warm_one() {
    let store = Arc::new(FakeStore::default());
    let warm = worker(store.clone(), 5).await;
    let cold = expects(&warm).await;
    assert!(cold > 0.0);
    run(&warm, chunk(&warm, &[4, 5, 6], 1000)).await;
    eventually("the store has the statistics", || {
        store.content().statistics_saved > 2
    })
    .await;
    let known = expects_at_first(worker(store, 5).await).await;
    // The cold one learns most of it within its first request.
    assert!(known < 0.8 * cold, "{known} expected after {cold}");
}

/// Tokens that are expected of the draft of a request's first step, the only one that has one.
async fn expects_in_first_step(bench: &Bench) -> f64 {
    run(bench, chunk(bench, &[1, 2, 3, 4, 1, 2, 3], 2)).await;
    bench.figure("refrain_spec_expected_tokens_total{model=\"fake\",source=\"suffix\"}")
}

#[tokio::test]
async fn the_first_step_after_an_idle_time_uses_the_answer_of_the_store() {
    let cold = worker(Arc::new(FakeStore::default()), NEVER_MS).await;
    let cold = expects_in_first_step(&cold).await;
    assert!(cold > 0.0);

    let store = Arc::new(FakeStore::default());
    let warm = worker(store.clone(), NEVER_MS).await;
    run(&warm, chunk(&warm, &[4, 5, 6], 1000)).await;
    warm.worker.drain().await;
    assert_eq!(store.content().statistics_saved, 1);

    let new = worker(store.clone(), NEVER_MS).await;
    let gate = Arc::new(tokio::sync::Mutex::new(()));
    let closed = gate.clone().lock_owned().await;
    store.set_hook(move |call| {
        let is_question =
            matches!(call, StoreCall::AcceptanceStats(of) if of.statistics.is_empty());
        let gate = gate.clone();
        async move {
            if is_question {
                drop(gate.lock().await);
            }
            Ok(())
        }
    });
    let mut first = chunk(&new, &[7, 8], 2);
    first.speculation = Speculation::Off;
    run(&new, first).await;
    eventually("nothing runs", || {
        new.figure("refrain_worker_chunks_running") == 0.0
    })
    .await;
    assert_eq!(new.figure(ANSWERED), 0.0);
    drop(closed);
    eventually("the store has answered", || new.figure(ANSWERED) == 1.0).await;
    let known = expects_in_first_step(&new).await;
    // The cold one learns most of it within its first request.
    assert!(known < 0.8 * cold, "{known} expected after {cold}");
}

#[tokio::test]
async fn statistics_that_the_store_refuses_are_saved_later() {
    let store = Arc::new(FakeStore::default());
    refuse_statistics(&store);
    let bench = worker(store.clone(), 2).await;
    let failed = "refrain_spec_statistics_calls_total{model=\"fake\",outcome=\"failed\"}";
    run(&bench, chunk(&bench, &[1, 2, 3], 400)).await;
    eventually("calls fail", || bench.figure(failed) >= 2.0).await;
    assert_eq!(store.content().statistics_saved, 0);
    store.remove_hook();
    // Requests without drafts teach nothing, so the statistics that arrive are those that were refused before.
    let arrives = tokio::time::timeout(PATIENCE, async {
        while store.content().statistics_saved == 0 {
            let mut plain = chunk(&bench, &[4, 5, 6], 10);
            plain.speculation = Speculation::Off;
            run(&bench, plain).await;
        }
    });
    assert!(
        arrives.await.is_ok(),
        "the refused statistics never arrived"
    );
}

#[tokio::test]
async fn statistics_over_which_a_call_panics_are_saved_later() {
    let store = Arc::new(FakeStore::default());
    let panicked = AtomicBool::new(false);
    store.refuse(move |call| {
        let saves = matches!(call, StoreCall::AcceptanceStats(of) if !of.statistics.is_empty());
        assert!(
            !saves || panicked.swap(true, Ordering::Relaxed),
            "planned panic"
        );
        None
    });
    let bench = worker(store.clone(), 2).await;
    run(&bench, chunk(&bench, &[1, 2, 3], 400)).await;
    let arrives = tokio::time::timeout(PATIENCE, async {
        while store.content().statistics_saved == 0 {
            let mut plain = chunk(&bench, &[4, 5, 6], 10);
            plain.speculation = Speculation::Off;
            run(&bench, plain).await;
        }
    });
    assert!(arrives.await.is_ok(), "the statistics never arrived");
}

/// So long that there is no second turn in a test.
const NEVER_MS: u64 = 24 * 3_600 * 1_000;

#[tokio::test]
async fn a_worker_that_stops_saves_its_statistics() {
    let store = Arc::new(FakeStore::default());
    let bench = worker(store.clone(), NEVER_MS).await;
    let cold = expects(&bench).await;
    assert!(cold > 0.0);
    run(&bench, chunk(&bench, &[4, 5, 6], 1000)).await;
    // It has only asked so far.
    assert_eq!(store.content().statistics_saved, 0);
    bench.worker.drain().await;
    assert_eq!(store.content().statistics_saved, 1);
    let known = expects_at_first(worker(store, NEVER_MS).await).await;
    // The cold one learns most of it within its first request.
    assert!(known < 0.8 * cold, "{known} expected after {cold}");
}

#[tokio::test]
async fn a_worker_stops_although_the_store_refuses_everything() {
    let store = Arc::new(FakeStore::default());
    refuse_statistics(&store);
    let bench = worker(store.clone(), NEVER_MS).await;
    run(&bench, chunk(&bench, &[1, 2, 3], 100)).await;
    let drained = tokio::time::timeout(PATIENCE, bench.worker.drain()).await;
    assert!(drained.is_ok());
    assert_eq!(store.content().statistics_saved, 0);
}

/// The queue of calls is much shorter than the list of namespaces, and a worker that stops reads no answers.
#[tokio::test]
async fn a_worker_that_stops_saves_the_statistics_of_all_its_namespaces() {
    const NAMESPACES: u32 = 60;
    let store = Arc::new(FakeStore::default());
    let warm = worker(store.clone(), NEVER_MS).await;
    for tenant in 0..NAMESPACES {
        let mut request = chunk(&warm, &[4, 5, 6], 60);
        request.namespace = warm.signer.sign(Namespace {
            tenant: format!("tenant-{tenant}"),
            model: "fake".into(),
            tokenizer: "fake".into(),
        });
        run(&warm, request).await;
    }
    eventually("the store was asked for all of them", || {
        warm.figure(ANSWERED) == f64::from(NAMESPACES)
    })
    .await;
    warm.worker.drain().await;
    assert_eq!(store.content().statistics_saved, NAMESPACES);
}
