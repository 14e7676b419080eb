//! The primer of an engine that drafts from a table of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedEvent, FinishReason};
use refrain_protocol::{DocumentId, ErrorKind, Namespace, TokenId};
use refrain_worker::{EngineSlots, WorkerConfig};

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening, stored};

/// A worker with a primer, and with outputs of others in its store.
async fn primed(tokens_max: u32, outputs: &[&[TokenId]]) -> (Arc<FakeStream>, Bench<FakeStream>) {
    let with_primer = |config: &mut WorkerConfig| {
        config.engine.primer.tokens_max = tokens_max;
        config.engine.primer.pause_ms = 1;
    };
    let (engine, bench) = listening(FakeStream::new(repetitive), with_primer).await;
    for (number, output) in (0..).zip(outputs) {
        bench.store.push_news(ended(number, output));
    }
    (engine, bench)
}

fn ended(number: u128, output: &[TokenId]) -> FeedEvent {
    FeedEvent::Update(DocumentUpdate {
        document: DocumentId(number),
        epoch: 1,
        prev_len: 0,
        tokens: output.to_vec(),
        head: DocumentHead {
            left_context: vec![90],
            ..DocumentHead::default()
        },
        finish: Some(FinishReason::Stop),
    })
}

/// Has a request use the namespace, and checks its output.
async fn ask(bench: &Bench<FakeStream>) {
    let received = run(bench, chunk(bench, &[1, 2, 3], 20)).await;
    assert_eq!(received.tokens, plainly(repetitive, &[1, 2, 3], 20));
}

fn tell(engine: &FakeStream, change: impl FnOnce(&mut EngineSlots)) {
    let mut slots = engine.table.slots.lock().unwrap();
    change(slots.as_mut().unwrap());
}

/// All texts with which the engine was primed.
fn texts(engine: &FakeStream) -> Vec<TokenId> {
    engine.table.primed.lock().unwrap().concat()
}

async fn primed_with(engine: &FakeStream, expected: &[TokenId]) {
    eventually("the engine is primed", || texts(engine) == expected).await;
}

#[tokio::test]
async fn an_engine_is_primed_at_its_start_and_whenever_it_has_started_anew() {
    let (engine, bench) = primed(100, &[&[1, 2], &[3]]).await;
    // A worker knows no namespace before its first request.
    assert_eq!(engine.table.looks.load(Ordering::SeqCst), 0);
    ask(&bench).await;
    let mut expected = vec![90, 1, 2, 90, 3];
    primed_with(&engine, &expected).await;
    // Another worker's output comes once.
    tell(&engine, |slots| slots.last_request = Some(9));
    bench.store.push_news(ended(7, &[4]));
    expected.extend([90, 4]);
    primed_with(&engine, &expected).await;
    assert_eq!(bench.figure("refrain_worker_primer_starts_total"), 0.0);
    // It was away.
    *engine.table.slots.lock().unwrap() = Err(ErrorKind::Unavailable);
    let seen = engine.table.looks.load(Ordering::SeqCst);
    let looks = || engine.table.looks.load(Ordering::SeqCst);
    eventually("it is looked at", || looks() > seen + 1).await;
    let slots = EngineSlots {
        last_request: Some(50),
        is_free: true,
        has_others: true,
    };
    *engine.table.slots.lock().unwrap() = Ok(slots);
    expected.extend([90, 1, 2, 90, 3, 90, 4]);
    primed_with(&engine, &expected).await;
    // Nobody saw it go, but it has had fewer requests.
    tell(&engine, |slots| slots.last_request = Some(2));
    expected.extend([90, 1, 2, 90, 3, 90, 4]);
    primed_with(&engine, &expected).await;
    eventually("all is counted", || {
        bench.figure("refrain_worker_primer_tokens_total") == expected.len() as f64
            && bench.figure("refrain_worker_primer_documents_total") == 9.0
    })
    .await;
    assert_eq!(bench.figure("refrain_worker_primer_starts_total"), 2.0);
}

#[tokio::test]
async fn only_the_newest_outputs_are_sent_while_the_slot_is_free() {
    let (engine, bench) = primed(7, &[&[1, 2], &[3, 4], &[5, 6]]).await;
    tell(&engine, |slots| slots.is_free = false);
    ask(&bench).await;
    let looks = || engine.table.looks.load(Ordering::SeqCst);
    eventually("it is looked at", || looks() > 2).await;
    assert!(texts(&engine).is_empty());
    tell(&engine, |slots| slots.is_free = true);
    primed_with(&engine, &[90, 3, 4, 90, 5, 6]).await;
}

#[tokio::test]
async fn requests_do_not_notice_a_primer_that_fails() {
    let (engine, bench) = primed(100, &[&[1]]).await;
    *engine.table.slots.lock().unwrap() = Err(ErrorKind::InvalidRequest);
    let failures = |call| {
        let series = format!("refrain_worker_primer_failures_total{{call=\"{call}\"}}");
        bench.figure(&series)
    };
    bench.store.refuse(|call| {
        matches!(call, refrain_rpc::testing::StoreCall::Pull(_)).then_some(ErrorKind::Unavailable)
    });
    ask(&bench).await;
    eventually("both fail", || {
        failures("look") > 1.0 && failures("store") > 1.0
    })
    .await;
    ask(&bench).await;
    bench.store.remove_hook();
    engine.table.refuses.store(true, Ordering::SeqCst);
    *engine.table.slots.lock().unwrap() = Ok(EngineSlots {
        last_request: Some(1),
        is_free: true,
        has_others: false,
    });
    eventually("a text is refused", || failures("prime") == 1.0).await;
    engine.table.refuses.store(false, Ordering::SeqCst);
    // A refused text is not sent again, since it may be refused for ever. Others are.
    bench.store.push_news(ended(5, &[8]));
    primed_with(&engine, &[90, 1, 90, 8]).await;
    ask(&bench).await;
    eventually("what was taken is counted", || {
        bench.figure("refrain_worker_primer_tokens_total") == 2.0
    })
    .await;
}

#[tokio::test]
async fn nothing_is_primed_by_default_or_with_texts_that_are_kept_apart() {
    for (tokens_max, tenant, isolated) in [(0, "acme", 0.0), (100, "acme\u{1f}key:k", 1.0)] {
        let (engine, bench) = primed(tokens_max, &[&[1, 2]]).await;
        let mut request = chunk(&bench, &[1, 2, 3], 20);
        request.namespace = bench.signer.sign(Namespace {
            tenant: tenant.into(),
            model: "fake".into(),
            tokenizer: "fake".into(),
        });
        run(&bench, request.clone()).await;
        eventually("the output is stored", || {
            stored(&bench, &request).is_some_and(|(_, finish)| finish.is_some())
        })
        .await;
        assert_eq!(engine.table.looks.load(Ordering::SeqCst), 0);
        let counted = bench.figure("refrain_worker_primer_isolated_chunks_total");
        assert_eq!(counted, isolated);
    }
}
