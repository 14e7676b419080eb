//! Uploads to a store that refuses.

use refrain_protocol::Namespace;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_service_kit::telemetry::Metrics;

use super::*;

const UNLUCKY: DocumentId = DocumentId(13);

const ACCEPTED: FlushOutcome = FlushOutcome::Accepted { is_complete: true };

/// Has a store accept so many outputs at a time, but never document 13.
fn pick(store: &FakeStore, updates_max: usize) {
    store.refuse(move |call| {
        let StoreCall::Append(request) = call else {
            return None;
        };
        if request.updates.len() > updates_max {
            return Some(ErrorKind::TooLarge);
        }
        let mut documents = request.updates.iter().map(|update| update.document);
        let is_unlucky = documents.any(|document| document == UNLUCKY);
        is_unlucky.then_some(ErrorKind::InvalidRequest)
    });
}

fn refuse_all(store: &FakeStore, kind: ErrorKind) {
    store.refuse(move |_| Some(kind));
}

fn calls(store: &FakeStore) -> usize {
    store.content().calls.len()
}

fn namespace() -> SignedNamespace {
    SignedNamespace::unsigned(Namespace {
        tenant: "t".into(),
        model: "m".into(),
        tokenizer: "k".into(),
    })
}

fn two_tokens(document: u128, finish: Option<FinishReason>) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len: 0,
        tokens: vec![1, 2],
        head: DocumentHead::default(),
        finish,
    }
}

/// Three finished outputs of two tokens, 12 to 14, and a store that accepts `updates_max` at a time.
fn three_pending(updates_max: usize) -> (Inner, FakeStore) {
    let metrics = UploaderMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let uploader = Inner::new(UploaderConfig::default(), metrics);
    let namespace = namespace();
    for document in 12..=14 {
        let update = two_tokens(document, Some(FinishReason::Stop));
        uploader.change(|pending| pending.push(NamespaceId(1), &namespace, (&update).into()));
    }
    let store = FakeStore::default();
    pick(&store, updates_max);
    (uploader, store)
}

fn stored(store: &FakeStore) -> Vec<u128> {
    let documents = store.documents();
    let mut stored: Vec<u128> = documents.keys().map(|document| document.0).collect();
    stored.sort_unstable();
    stored
}

#[tokio::test(start_paused = true)]
async fn only_outputs_that_are_refused_by_themselves_are_given_up() {
    for updates_max in [1, 3] {
        let (uploader, store) = three_pending(updates_max);
        assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
        assert_eq!(stored(&store), [12, 14]);
        assert_eq!(calls(&store), 4);
        assert_eq!(uploader.metrics.dropped_tokens.get(), 2);
        assert_eq!(uploader.metrics.pending_tokens.get(), 0);
        // Nothing is left to be sent again.
        assert_eq!(uploader.flush(&store, true).await, FlushOutcome::Nothing);
        assert_eq!(calls(&store), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_reached_gets_everything_later() {
    let (uploader, store) = three_pending(3);
    refuse_all(&store, ErrorKind::Unavailable);
    assert_eq!(uploader.flush(&store, true).await, FlushOutcome::Refused);
    assert_eq!(uploader.metrics.dropped_tokens.get(), 0);
    pick(&store, 3);
    assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
    assert_eq!(stored(&store), [12, 14]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_again_to_a_store_of_another_mesh() {
    let (uploader, store) = three_pending(3);
    refuse_all(&store, ErrorKind::Unauthorized);
    assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
    assert_eq!(calls(&store), 1);
    assert_eq!(uploader.metrics.dropped_tokens.get(), 6);
}

/// A running uploader that by itself sends growing outputs only after weeks.
fn started() -> (Uploader, Arc<FakeStore>) {
    let store = Arc::new(FakeStore::default());
    pick(&store, 3);
    let config = UploaderConfig {
        interval_ms: 1,
        growing_every: u32::MAX,
        ..UploaderConfig::default()
    };
    let metrics = UploaderMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    (Uploader::start(config, store.clone(), metrics), store)
}

/// Longer than any test waits.
const HOUR: Duration = Duration::from_secs(3_600);

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

#[tokio::test(start_paused = true)]
async fn a_drain_sends_outputs_that_still_grow() {
    let (uploader, store) = started();
    let push = |document, finish| {
        let update = two_tokens(document, finish);
        uploader.push(NamespaceId(1), &namespace(), (&update).into());
    };
    let is_idle = || uploader.inner.is_idle.load(Ordering::Relaxed);
    push(1, Some(FinishReason::Stop));
    eventually("the ended output is stored, and nothing is left", || {
        stored(&store) == [1] && is_idle()
    })
    .await;
    // The task wakes for this one, and has nothing urgent to send.
    push(2, None);
    assert!(!is_idle());
    push(3, Some(FinishReason::Stop));
    eventually("the ended output is stored", || stored(&store) == [1, 3]).await;
    let drained = tokio::time::timeout(Duration::from_secs(60), uploader.drain(HOUR));
    assert_eq!(drained.await, Ok(true));
    assert_eq!(stored(&store), [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_ends_does_not_slow_down_another_one() {
    let (uploader, store) = started();
    refuse_all(&store, ErrorKind::Unavailable);
    let update = two_tokens(1, None);
    uploader.push(NamespaceId(1), &namespace(), (&update).into());
    let gives_up = async {
        eventually("the store is asked", || calls(&store) > 0).await;
        assert!(!uploader.drain(Duration::ZERO).await);
        pick(&store, 3);
    };
    let waits = tokio::time::timeout(Duration::from_secs(60), uploader.drain(HOUR));
    let (waited, ()) = tokio::join!(waits, gives_up);
    assert_eq!(waited, Ok(true));
    assert_eq!(stored(&store), [1]);
}

#[tokio::test]
async fn outputs_are_sent_again_after_a_panic() {
    let store = Arc::new(FakeStore::default());
    let panicked = AtomicBool::new(false);
    store.refuse(move |call| {
        let sends = matches!(call, StoreCall::Append(_));
        assert!(
            !sends || panicked.swap(true, Ordering::Relaxed),
            "planned panic"
        );
        None
    });
    let metrics = UploaderMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let uploader = Uploader::start(UploaderConfig::default(), store.clone(), metrics);
    let namespace = namespace();
    let update = two_tokens(12, Some(FinishReason::Stop));
    uploader.push(namespace.namespace.id(), &namespace, (&update).into());
    assert!(uploader.drain(Duration::from_secs(60)).await);
    assert_eq!(store.content().documents.len(), 1);
}
