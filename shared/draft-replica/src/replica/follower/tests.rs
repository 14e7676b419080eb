//! Following a store that has no place for another waiting follower. The clock is paused.

use std::sync::Arc;

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::{DocumentId, Namespace, NamespaceId};
use refrain_rpc::testing::{FakeStore, StoreCall, StoredDocument};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::DraftReplica;
use crate::replica::draft_index::DraftIndex;

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
    let store = Arc::new(FakeStore::default());
    store.content().generation = 1;
    store.push_news(document(1, &[1, 2, 3]));
    store.push_news(document(2, &[4, 5, 6]));
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(namespace.read().len_of(DocumentId(2)).is_some());
    // Another replica answers, which lacks document 2, and has another text of document 1.
    store.content().generation = 2;
    for number in [1, 3] {
        let known = StoredDocument::default();
        store.documents().insert(DocumentId(number), known);
    }
    store.push_news(document(3, &[7, 8, 9]));
    tokio::time::sleep(Duration::from_secs(10)).await;
    store.push_news(document(1, &[1, 2, 9, 9]));
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
    let store = Arc::new(FakeStore::default());
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
    // It answers only calls for which it has news, and refuses to let the others wait.
    let store = Arc::new(FakeStore::default());
    store.content().is_crowded = true;
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
    // Pauses of two to four seconds, after some short ones.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = store.content().calls.clone();
    let calls = calls
        .iter()
        .filter(|call| matches!(call, StoreCall::Follow(_)))
        .count();
    assert!((15..=40).contains(&calls), "{calls} calls in a minute");
    store.push_news(document(1, &[1, 2, 3]));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(namespace.read().len_of(DocumentId(1)), Some(3));
    replica.stop();
}

#[tokio::test(start_paused = true)]
async fn outputs_that_are_written_here_from_the_beginning_are_not_asked_for() {
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let store = Arc::new(FakeStore::default());
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
    let namespace = replica.namespace(NamespaceId(1), &signed());
    let emitted = |document, prev_len| DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len,
        tokens: vec![7, 8],
        head: DocumentHead::default(),
        finish: None,
    };
    for document in [1, 2, 3, 4] {
        namespace.pin(DocumentId(document));
    }
    // The second one was begun elsewhere, and the fourth is removed.
    for (document, prev_len) in [(1, 0), (1, 2), (2, 5), (3, 0), (4, 0)] {
        namespace.merge((&emitted(document, prev_len)).into());
    }
    namespace.write().remove(&[DocumentId(4)]);
    namespace.unpin(DocumentId(3));
    store.push_news(document(9, &[1]));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let last = store.content().calls.last().cloned();
    let Some(StoreCall::Follow(last)) = last else {
        panic!("{last:?}");
    };
    assert_eq!(last.own, [DocumentId(1)]);
    // The feed brings the text of the others.
    for number in 1..=3 {
        store.push_news(document(number, &[7, 8, 9, 10, 11, 12]));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let len = |number| namespace.read().len_of(DocumentId(number));
    assert_eq!([len(1), len(2), len(3)], [Some(4), Some(6), Some(6)]);
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
