//! Following a store that has no place for another waiting follower. The clock is paused.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, DocumentId, Namespace, NamespaceId};
use refrain_rpc::DraftStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::DraftReplica;

/// A store that answers only calls for which it has news, and refuses to let the others wait.
#[derive(Default)]
struct CrowdedStore {
    documents: AtomicUsize,
    calls: AtomicUsize,
}

#[async_trait]
impl DraftStore for CrowdedStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("nothing is appended"))
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let number = self.documents.load(Ordering::Relaxed) as u64;
        if request.after.sequence == number {
            return Err(ApiError::new(ErrorKind::Overloaded, "too many wait"));
        }
        Ok(FollowReply {
            reset: false,
            events: vec![FeedEvent::Update(DocumentUpdate {
                document: DocumentId(number.into()),
                epoch: 1,
                prev_len: 0,
                tokens: vec![1, 2, 3],
                head: DocumentHead::default(),
                finish: None,
            })],
            cursor: FeedCursor {
                generation: 1,
                sequence: number,
                ..FeedCursor::default()
            },
            caught_up: true,
        })
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_follower_asks_ever_more_seldom_and_still_gets_news() {
    let store = Arc::new(CrowdedStore::default());
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let signed = signer.sign(Namespace {
        tenant: "acme".into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    });
    let namespace = replica.namespace(NamespaceId(1), &signed);
    // Pauses of two to four seconds, after some short ones.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = store.calls.load(Ordering::Relaxed);
    assert!((15..=40).contains(&calls), "{calls} calls in a minute");
    store.documents.store(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(namespace.read().len_of(DocumentId(1)), Some(3));
    replica.stop();
}

#[test]
fn each_outage_is_logged_once_and_refusals_once_for_all() {
    use ErrorKind::{Overloaded, Unavailable};
    let mut outage = Outage::default();
    assert!(outage.is_news(Unavailable) && !outage.is_news(Unavailable));
    assert!(outage.is_news(Overloaded) && !outage.is_news(Overloaded));
    assert!(outage.end() && !outage.end());
    assert!(outage.is_news(Unavailable));
    assert!(!outage.is_news(Overloaded));
}
