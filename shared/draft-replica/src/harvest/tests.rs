//! The sending, against a store that refuses.

use std::collections::BTreeMap;

use async_trait::async_trait;
use refrain_protocol::Namespace;
use refrain_protocol::document::{
    AppendReply, DocumentHead, FinishReason, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_service_kit::telemetry::Metrics;

use super::*;

/// Takes whole outputs, few at a time, but never document 13.
#[derive(Default)]
struct Picky {
    state: Mutex<PickyState>,
}

#[derive(Default)]
struct PickyState {
    lengths: BTreeMap<DocumentId, u32>,
    calls: usize,
    /// What every call is answered with, if anything.
    refuses: Option<ErrorKind>,
    updates_max: usize,
}

const UNLUCKY: DocumentId = DocumentId(13);

const TAKEN: Flushed = Flushed::Taken { is_complete: true };

#[async_trait]
impl DraftStore for Picky {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let mut state = self.state.lock().unwrap();
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
    SignedNamespace {
        namespace: Namespace {
            tenant: "t".into(),
            model: "m".into(),
            tokenizer: "k".into(),
        },
        issued_at_s: 0,
        signature: String::new(),
    }
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

/// Three finished outputs of two tokens, 12 to 14, and a store that takes `updates_max` at a time.
fn gathered(updates_max: usize) -> (HarvestInner, Picky) {
    let metrics = HarvestMetrics::new(&Metrics::new().unwrap()).unwrap();
    let harvest = HarvestInner {
        gathered: Mutex::default(),
        rests: AtomicBool::new(false),
        in_a_hurry: AtomicUsize::new(0),
        work: Arc::default(),
        config: HarvestConfig::default(),
        metrics,
        flushed: Notify::new(),
    };
    let namespace = namespace();
    for document in 12..=14 {
        let update = two_tokens(document, Some(FinishReason::Stop));
        harvest.gather(|gathered| gathered.push(NamespaceId(1), &namespace, (&update).into()));
    }
    let store = Picky::default();
    store.state.lock().unwrap().updates_max = updates_max;
    (harvest, store)
}

fn stored(store: &Picky) -> Vec<u128> {
    let state = store.state.lock().unwrap();
    state.lengths.keys().map(|document| document.0).collect()
}

#[tokio::test]
async fn only_what_is_refused_by_itself_is_given_up() {
    for updates_max in [1, 3] {
        let (harvest, store) = gathered(updates_max);
        assert_eq!(harvest.flush(&store, true).await, TAKEN);
        assert_eq!(stored(&store), [12, 14]);
        assert_eq!(store.state.lock().unwrap().calls, 4);
        assert_eq!(harvest.metrics.dropped_tokens.get(), 2);
        assert_eq!(harvest.metrics.pending_tokens.get(), 0);
        // Nothing is left to be sent again.
        assert_eq!(harvest.flush(&store, true).await, Flushed::Nothing);
        assert_eq!(store.state.lock().unwrap().calls, 4);
    }
}

#[tokio::test]
async fn a_store_that_is_away_gets_everything_later() {
    let (harvest, store) = gathered(3);
    store.state.lock().unwrap().refuses = Some(ErrorKind::Unavailable);
    assert_eq!(harvest.flush(&store, true).await, Flushed::Refused);
    assert_eq!(harvest.metrics.dropped_tokens.get(), 0);
    store.state.lock().unwrap().refuses = None;
    assert_eq!(harvest.flush(&store, true).await, TAKEN);
    assert_eq!(stored(&store), [12, 14]);
}

#[tokio::test]
async fn a_store_of_another_mesh_is_not_asked_again() {
    let (harvest, store) = gathered(3);
    store.state.lock().unwrap().refuses = Some(ErrorKind::Unauthorized);
    assert_eq!(harvest.flush(&store, true).await, TAKEN);
    assert_eq!(store.state.lock().unwrap().calls, 1);
    assert_eq!(harvest.metrics.dropped_tokens.get(), 6);
}

/// The task that sends, which by itself would send what merely grows in weeks.
fn started() -> (Harvest, Arc<Picky>) {
    let store = Arc::new(Picky::default());
    store.state.lock().unwrap().updates_max = 3;
    let config = HarvestConfig {
        interval_ms: 1,
        growing_every: u32::MAX,
        ..HarvestConfig::default()
    };
    let metrics = HarvestMetrics::new(&Metrics::new().unwrap()).unwrap();
    (Harvest::start(config, store.clone(), metrics), store)
}

/// Nobody waits for that.
const HOUR: Duration = Duration::from_secs(3_600);

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

#[tokio::test]
async fn who_drains_has_outputs_sent_that_still_grow() {
    let (harvest, store) = started();
    let push = |document, finish| {
        let update = two_tokens(document, finish);
        harvest.push(NamespaceId(1), &namespace(), (&update).into());
    };
    let rests = || harvest.inner.rests.load(Ordering::Relaxed);
    push(1, Some(FinishReason::Stop));
    eventually("what has ended is stored, and nothing is left", || {
        stored(&store) == [1] && rests()
    })
    .await;
    // It wakes for this one, and has nothing to send that presses.
    push(2, None);
    assert!(!rests());
    push(3, Some(FinishReason::Stop));
    eventually("what has ended is stored", || stored(&store) == [1, 3]).await;
    let drained = tokio::time::timeout(Duration::from_secs(60), harvest.drain(HOUR));
    assert_eq!(drained.await, Ok(true));
    assert_eq!(stored(&store), [1, 2, 3]);
}

#[tokio::test]
async fn who_stops_waiting_does_not_slow_down_who_still_waits() {
    let (harvest, store) = started();
    store.state.lock().unwrap().refuses = Some(ErrorKind::Unavailable);
    let update = two_tokens(1, None);
    harvest.push(NamespaceId(1), &namespace(), (&update).into());
    let gives_up = async {
        let calls = || store.state.lock().unwrap().calls;
        eventually("the store is asked", || calls() > 0).await;
        assert!(!harvest.drain(Duration::ZERO).await);
        store.state.lock().unwrap().refuses = None;
    };
    let waits = tokio::time::timeout(Duration::from_secs(60), harvest.drain(HOUR));
    let (waited, ()) = tokio::join!(waits, gives_up);
    assert_eq!(waited, Ok(true));
    assert_eq!(stored(&store), [1]);
}
