//! Following a store that has no place for another waiting follower. The clock is paused.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, StoreStats, TouchRequest,
    UnknownDocumentsReply, UnknownDocumentsRequest,
};
use refrain_protocol::{ApiError, DocumentId, Namespace, NamespaceId};
use refrain_rpc::DraftStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::DraftReplica;
use crate::replica::draft_index::DraftIndex;

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

/// Two replicas of a store behind one address. After the first reply the second one answers, which lacks document 2.
#[derive(Default)]
struct MovedStore {
    calls: AtomicUsize,
}

fn document(number: u128, tokens: &[u32]) -> FeedEvent {
    FeedEvent::Update(DocumentUpdate {
        document: DocumentId(number),
        epoch: 1,
        prev_len: 0,
        tokens: tokens.to_vec(),
        head: DocumentHead::default(),
        finish: None,
    })
}

#[async_trait]
impl DraftStore for MovedStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("nothing is appended"))
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let (generation, events) = match self.calls.fetch_add(1, Ordering::Relaxed) {
            0 => (1, vec![document(1, &[1, 2, 3]), document(2, &[4, 5, 6])]),
            // The other replica has another text of document 1.
            1 => (2, vec![document(3, &[7, 8, 9])]),
            2 => (2, vec![document(1, &[1, 2, 9, 9])]),
            _ => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                (2, Vec::new())
            }
        };
        let sequence = request.after.sequence + 1;
        Ok(FollowReply {
            reset: false,
            events,
            cursor: FeedCursor {
                generation,
                sequence,
                ..FeedCursor::default()
            },
            caught_up: true,
        })
    }

    async fn unknown_documents(
        &self,
        mut request: UnknownDocumentsRequest,
    ) -> Result<UnknownDocumentsReply, ApiError> {
        request
            .documents
            .retain(|document| *document == DocumentId(2));
        Ok(UnknownDocumentsReply {
            documents: request.documents,
        })
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
}

fn signed() -> refrain_protocol::SignedNamespace {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    signer.sign(Namespace {
        tenant: "acme".into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    })
}

#[tokio::test(start_paused = true)]
async fn a_reader_who_moves_keeps_what_the_other_replica_has() {
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let moves = metrics.moves.clone();
    let store = Arc::new(MovedStore::default());
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store, metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let len = |number| namespace.read().len_of(DocumentId(number));
    assert_eq!((len(1), len(2), len(3)), (Some(4), None, Some(3)));
    assert_eq!(moves.get(), 1);
    let index = namespace.read();
    let at = index.cursor(DocumentId(1), 4, &[1, 2, 9, 9]);
    assert_eq!(
        at,
        index.index().start(&[1, 2, 9, 9]),
        "its text is the other one"
    );
    drop(index);
    replica.stop();
}

#[tokio::test]
async fn a_request_that_begins_while_the_new_store_is_asked_keeps_its_text() {
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let store = Arc::new(MovedStore::default());
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store, metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
    let ingest = Ingest {
        namespace: namespace.clone(),
        shared: replica.registry.shared.clone(),
    };
    let first = replica.join_group(NamespaceId(1), "g", DocumentId(9));
    let group = first.unwrap().group().clone();
    for number in 1..=3 {
        let FeedEvent::Update(update) = document(number, &[1, 2, number as u32]) else {
            unreachable!("it is an update");
        };
        namespace.merge((&update).into());
        group.merge((&update).into());
    }
    // These are asked for, and meanwhile a request of the first begins, and one of the second is about to.
    let asked = namespace.read().unpinned();
    namespace.pin(DocumentId(1));
    let joined = replica.join_group(NamespaceId(1), "g", DocumentId(2));
    ingest.remove_unless_pinned(&asked);
    let kept = |index: &DraftIndex| [1, 2, 3].map(|number| index.len_of(DocumentId(number)));
    assert_eq!(kept(&namespace.read()), [Some(3), None, None]);
    assert_eq!(kept(&group.read()), [Some(3), Some(3), None]);
    drop(joined);
    replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_refused_follower_asks_ever_more_seldom_and_still_gets_news() {
    let store = Arc::new(CrowdedStore::default());
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
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
