//! Following a store that moves, refuses or has no place for another pull that waits. The clock is paused.

use std::sync::Arc;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedEvent};
use refrain_protocol::{DocumentId, Namespace, NamespaceId, SignedNamespace};
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

fn signed() -> SignedNamespace {
    sign("acme")
}

fn sign(tenant: &str) -> SignedNamespace {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    signer.sign(Namespace {
        tenant: tenant.into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    })
}

fn last_pull(store: &FakeStore) -> PullRequest {
    let content = store.content();
    let mut latest = content.calls.iter().rev();
    let pull = latest.find_map(|call| match call {
        StoreCall::Pull(request) => Some(request),
        _ => None,
    });
    pull.unwrap().clone()
}

fn replica_of(store: &Arc<FakeStore>, config: ReplicaConfig) -> (DraftReplica, ReplicaMetrics) {
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let replica = DraftReplica::new(config, 64, store.clone(), metrics.clone());
    (replica, metrics)
}

/// Groups of a pull by the namespace's tenant; `None` is the namespace.
fn scopes(pull: &PullRequest) -> Vec<(String, Option<String>)> {
    let namespaces = pull.namespaces.iter();
    let scopes = namespaces.flat_map(|of| {
        let tenant = &of.namespace.namespace.tenant;
        of.scopes.iter().map(|asked| match &asked.scope {
            Scope::Namespace => (tenant.clone(), None),
            Scope::Group(name) => (tenant.clone(), Some(name.clone())),
        })
    });
    let mut scopes: Vec<_> = scopes.collect();
    scopes.sort();
    scopes
}

fn named<const N: usize>(scopes: [(&str, Option<&str>); N]) -> Vec<(String, Option<String>)> {
    scopes
        .map(|(tenant, group)| (tenant.to_owned(), group.map(str::to_owned)))
        .to_vec()
}

#[tokio::test(start_paused = true)]
async fn all_namespaces_and_groups_wait_for_news_with_one_call() {
    let store = Arc::new(FakeStore::default());
    let (replica, metrics) = replica_of(&store, ReplicaConfig::default());
    let (one, two) = (sign("one"), sign("two"));
    let namespaces = [&one, &two].map(|of| replica.namespace(of.namespace.id(), of));
    let group = replica.join_group(two.namespace.id(), "g", DocumentId(1));
    let is_waiting = |store: &FakeStore| last_pull(store).wait_ms > 0;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let all = named([("one", None), ("two", None), ("two", Some("g"))]);
    assert_eq!(scopes(&last_pull(&store)), all);
    assert!(is_waiting(&store));
    assert_eq!(metrics.groups_followed.get(), 1);
    // While nothing happens there is one call at a time, and it waits.
    let pulls = || {
        let content = store.content();
        let calls = content.calls.iter();
        calls
            .filter(|call| matches!(call, StoreCall::Pull(_)))
            .count()
    };
    let before = pulls();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!((2..=4).contains(&(pulls() - before)));
    // News come at once.
    store.push_news(document(7, &[1, 2, 3]));
    tokio::time::sleep(Duration::from_millis(1)).await;
    for namespace in &namespaces {
        assert_eq!(namespace.read().len_of(DocumentId(7)), Some(3));
    }
    store.push_to_group("g", document(8, &[1]));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let len = group.as_ref().unwrap().group().read().len_of(DocumentId(8));
    assert_eq!(len, Some(1));
    // A further namespace does not have to wait for the answer.
    let three = sign("three");
    replica.namespace(three.namespace.id(), &three);
    drop(group);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let all = named([("one", None), ("three", None), ("two", None)]);
    assert_eq!(scopes(&last_pull(&store)), all);
    replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_refused_scope_holds_up_no_other_one() {
    let store = Arc::new(FakeStore::default());
    let (replica, metrics) = replica_of(&store, ReplicaConfig::default());
    let signed = signed();
    let id = signed.namespace.id();
    let namespace = replica.namespace(id, &signed);
    let group = replica.join_group(id, "g", DocumentId(1)).unwrap();
    let refuse = |kind| {
        let mut content = store.content();
        content.refused.insert(Scope::Namespace, kind);
    };
    // The signature is too old. The group has another call's signature, for the store's own reasons.
    refuse(ErrorKind::Unauthorized);
    store.push_to_group("g", document(8, &[1]));
    store.push_news(document(7, &[1, 2]));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(group.group().read().len_of(DocumentId(8)), Some(1));
    assert_eq!(namespace.read().len_of(DocumentId(7)), None);
    assert_eq!(scopes(&last_pull(&store)), named([("acme", Some("g"))]));
    assert_eq!(metrics.follow_failures.get(), 1);
    // A newer one comes with a request, and then the store cannot read the namespace for a while.
    refuse(ErrorKind::Unavailable);
    let mut newer = signed.clone();
    newer.issued_at_s += 1;
    replica.namespace(id, &newer);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(metrics.follow_failures.get() > 5);
    store.push_to_group("g", document(9, &[1]));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(group.group().read().len_of(DocumentId(9)), Some(1));
    store.content().refused.clear();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(namespace.read().len_of(DocumentId(7)), Some(2));
    replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_namespace_that_is_taken_over_for_long_holds_up_no_other_one() {
    let store = Arc::new(FakeStore::default());
    let slow = sign("slow");
    let tenant = slow.namespace.tenant.clone();
    store.set_hook(move |call| {
        let is_slow = matches!(call, StoreCall::Segments(request) if request.namespace.namespace.tenant == tenant);
        async move {
            if is_slow {
                tokio::time::sleep(Duration::from_secs(300)).await;
            }
            Ok(())
        }
    });
    let (replica, _) = replica_of(&store, ReplicaConfig::default());
    let slow = replica.namespace(slow.namespace.id(), &slow);
    let quick = sign("quick");
    let quick = replica.namespace(quick.namespace.id(), &quick);
    store.push_news(document(7, &[1, 2]));
    tokio::time::sleep(Duration::from_secs(10)).await;
    let has = |of: &NamespaceReplica| of.read().len_of(DocumentId(7)).is_some();
    assert!(has(&quick) && !has(&slow));
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(has(&slow));
    replica.stop();
}

#[tokio::test(start_paused = true)]
async fn an_evicted_namespace_is_asked_for_no_more_and_begins_anew() {
    let store = Arc::new(FakeStore::default());
    let config = ReplicaConfig {
        namespaces_max: 1,
        ..ReplicaConfig::default()
    };
    let (replica, _) = replica_of(&store, config);
    let (one, two) = (sign("one"), sign("two"));
    let follow = |of: &SignedNamespace| replica.namespace(of.namespace.id(), of);
    let evicted = follow(&one);
    tokio::time::sleep(Duration::from_secs(1)).await;
    follow(&two);
    store.push_news(document(7, &[1, 2]));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(scopes(&last_pull(&store)), named([("two", None)]));
    let again = follow(&one);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let len = |of: &NamespaceReplica| of.read().len_of(DocumentId(7));
    assert_eq!((len(&evicted), len(&again)), (None, Some(2)));
    assert_eq!(Arc::strong_count(&evicted), 1);
    replica.stop();
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
        .filter(|call| matches!(call, StoreCall::Pull(_)))
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
    let last = last_pull(&store);
    assert_eq!(last.namespaces[0].scopes[0].own, [DocumentId(1)]);
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
