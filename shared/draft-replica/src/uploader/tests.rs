//! Uploads to a store that refuses.

use std::collections::BTreeMap;

use async_trait::async_trait;
use refrain_protocol::Namespace;
use refrain_protocol::document::{
    AppendReply, DocumentHead, DocumentUpdate, FinishReason, FollowReply, FollowRequest,
    StoreStats, TouchRequest,
};
use refrain_service_kit::telemetry::Metrics;

use super::*;

/// Accepts whole outputs, few at a time, but never document 13.
#[derive(Default)]
struct PickyStore {
    state: Mutex<PickyState>,
}

#[derive(Default)]
struct PickyState {
    lengths: BTreeMap<DocumentId, u32>,
    calls: usize,
    /// The error that answers every call, if any.
    refuses: Option<ErrorKind>,
    updates_max: usize,
}

const UNLUCKY: DocumentId = DocumentId(13);

const ACCEPTED: FlushOutcome = FlushOutcome::Accepted { is_complete: true };

#[async_trait]
impl DraftStore for PickyStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let mut state = self.state.lock();
        state.calls += 1;
        if let Some(kind) = state.refuses {
            return Err(ApiError::new(kind, "no"));
        }
        if request.updates.len() > state.updates_max {
            return Err(ApiError::new(ErrorKind::TooLarge, "too many"));
        }
        if request
            .updates
            .iter()
            .any(|update| update.document == UNLUCKY)
        {
            return Err(ApiError::invalid("document", "unlucky"));
        }
        let mut lengths = Vec::new();
        for update in request.updates {
            let length = update.prev_len + update.tokens.len() as u32;
            state.lengths.insert(update.document, length);
            lengths.push(length);
        }
        Ok(AppendReply { lengths })
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        Err(ApiError::new(ErrorKind::Unavailable, "not here"))
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
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
fn three_pending(updates_max: usize) -> (Inner, PickyStore) {
    let metrics = UploaderMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let uploader = Inner::new(UploaderConfig::default(), metrics);
    let namespace = namespace();
    for document in 12..=14 {
        let update = two_tokens(document, Some(FinishReason::Stop));
        uploader.change(|pending| pending.push(NamespaceId(1), &namespace, (&update).into()));
    }
    let store = PickyStore::default();
    store.state.lock().updates_max = updates_max;
    (uploader, store)
}

fn stored(store: &PickyStore) -> Vec<u128> {
    let state = store.state.lock();
    state.lengths.keys().map(|document| document.0).collect()
}

#[tokio::test(start_paused = true)]
async fn only_outputs_that_are_refused_by_themselves_are_given_up() {
    for updates_max in [1, 3] {
        let (uploader, store) = three_pending(updates_max);
        assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
        assert_eq!(stored(&store), [12, 14]);
        assert_eq!(store.state.lock().calls, 4);
        assert_eq!(uploader.metrics.dropped_tokens.get(), 2);
        assert_eq!(uploader.metrics.pending_tokens.get(), 0);
        // Nothing is left to be sent again.
        assert_eq!(uploader.flush(&store, true).await, FlushOutcome::Nothing);
        assert_eq!(store.state.lock().calls, 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_reached_gets_everything_later() {
    let (uploader, store) = three_pending(3);
    store.state.lock().refuses = Some(ErrorKind::Unavailable);
    assert_eq!(uploader.flush(&store, true).await, FlushOutcome::Refused);
    assert_eq!(uploader.metrics.dropped_tokens.get(), 0);
    store.state.lock().refuses = None;
    assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
    assert_eq!(stored(&store), [12, 14]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_again_to_a_store_of_another_mesh() {
    let (uploader, store) = three_pending(3);
    store.state.lock().refuses = Some(ErrorKind::Unauthorized);
    assert_eq!(uploader.flush(&store, true).await, ACCEPTED);
    assert_eq!(store.state.lock().calls, 1);
    assert_eq!(uploader.metrics.dropped_tokens.get(), 6);
}

/// A running uploader that by itself sends growing outputs only after weeks.
fn started() -> (Uploader, Arc<PickyStore>) {
    let store = Arc::new(PickyStore::default());
    store.state.lock().updates_max = 3;
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
    store.state.lock().refuses = Some(ErrorKind::Unavailable);
    let update = two_tokens(1, None);
    uploader.push(NamespaceId(1), &namespace(), (&update).into());
    let gives_up = async {
        let calls = || store.state.lock().calls;
        eventually("the store is asked", || calls() > 0).await;
        assert!(!uploader.drain(Duration::ZERO).await);
        store.state.lock().refuses = None;
    };
    let waits = tokio::time::timeout(Duration::from_secs(60), uploader.drain(HOUR));
    let (waited, ()) = tokio::join!(waits, gives_up);
    assert_eq!(waited, Ok(true));
    assert_eq!(stored(&store), [1]);
}
