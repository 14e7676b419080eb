//! Tests of what logs of groups bring, with a store that is a list of logs. The clock is paused.

use std::sync::atomic::{AtomicUsize, Ordering};

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::pull::{Scope, ScopePull};
use refrain_protocol::{Namespace, NamespaceId, SignedNamespace};
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_suffix_index::IndexConfig;

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::{FAILED, ReplicaMetrics};
use crate::replica::DraftReplica;
use crate::replica::registry::Registry;

fn update(document: u128, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead::default(),
        finish: None,
    }
}

struct Fixture {
    store: Arc<FakeStore>,
    replica: DraftReplica,
    namespace: NamespaceId,
    signed: SignedNamespace,
    metrics: ReplicaMetrics,
}

fn fixture() -> Fixture {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let signed = signer.sign(Namespace {
        tenant: "tenant".into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    });
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let store = Arc::new(FakeStore::default());
    store.content().generation = 1;
    store.content().age_ms = Some(80);
    let config = ReplicaConfig::default();
    let replica = DraftReplica::new(config, 64, store.clone(), metrics.clone());
    let namespace = signed.namespace.id();
    replica.namespace(namespace, &signed);
    Fixture {
        store,
        replica,
        namespace,
        signed,
        metrics,
    }
}

impl Fixture {
    /// Lets the task make some more calls.
    async fn turn(&self) {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The groups of each pull that asked for some.
    fn calls(&self) -> Vec<Vec<ScopePull>> {
        let content = self.store.content();
        let pulls = content.calls.iter().filter_map(|call| match call {
            StoreCall::Pull(request) => Some(request),
            _ => None,
        });
        let groups = pulls.map(|pull| {
            let scopes = pull.namespaces.iter().flat_map(|of| of.scopes.clone());
            scopes
                .filter(|asked| asked.scope != Scope::Namespace)
                .collect()
        });
        groups
            .filter(|groups: &Vec<_>| !groups.is_empty())
            .collect()
    }
}

#[tokio::test(start_paused = true)]
async fn samples_elsewhere_come_while_they_run_and_own_ones_are_not_asked_for() {
    let fixture = fixture();
    let store = &fixture.store;
    fixture.turn().await;
    assert!(fixture.calls().is_empty(), "no group runs");
    let join = |group: &str, document| {
        let document = DocumentId(document);
        fixture
            .replica
            .join_group(fixture.namespace, group, document)
    };
    let (first, second) = (join("g", 1).unwrap(), join("h", 2).unwrap());
    first.group().merge((&update(1, 0, &[1, 2, 3])).into());
    fixture.turn().await;
    // One call for both groups, each registered once.
    assert_eq!(store.content().registered.len(), 2);
    let last = fixture.calls().pop().unwrap();
    let asked = last.iter().map(|asked| (asked.scope.clone(), &*asked.own));
    let group = |name: &str| Scope::Group(name.into());
    let own = [[DocumentId(1)], [DocumentId(2)]];
    assert_eq!(
        asked.collect::<Vec<_>>(),
        [(group("g"), &own[0][..]), (group("h"), &own[1][..])]
    );
    store.push_to_group("g", FeedEvent::Update(update(7, 0, &[4, 5])));
    store.push_to_group("h", FeedEvent::Update(update(8, 0, &[6])));
    fixture.turn().await;
    let len = |group: &GroupReplica, document| group.read().len_of(DocumentId(document));
    assert_eq!(
        (len(first.group(), 7), len(second.group(), 8)),
        (Some(2), Some(1))
    );
    // News are appended; what the tree has already counts as received by nobody.
    store.push_to_group("g", FeedEvent::Update(update(7, 1, &[5, 9])));
    store.push_to_group("g", FeedEvent::Update(update(1, 0, &[1, 2])));
    fixture.turn().await;
    assert_eq!(
        (len(first.group(), 7), len(first.group(), 1)),
        (Some(3), Some(3))
    );
    assert_eq!(fixture.metrics.group_tokens_received.get(), 4);
    assert_eq!(fixture.metrics.group_lag_seconds.get_sample_count(), 3);
    assert_eq!(fixture.metrics.groups_followed.get(), 2);
    // Gone elsewhere, but not here.
    store.push_to_group("g", FeedEvent::Remove(DocumentId(7)));
    store.push_to_group("g", FeedEvent::Remove(DocumentId(1)));
    fixture.turn().await;
    assert_eq!(
        (len(first.group(), 7), len(first.group(), 1)),
        (None, Some(3))
    );
    drop((first, second));
    // The call that waits has them still.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let calls = fixture.calls().len();
    fixture.turn().await;
    assert_eq!(fixture.calls().len(), calls, "no group runs any more");
    // The next member goes on where the last one was.
    let again = join("g", 3).unwrap();
    store.push_to_group("g", FeedEvent::Update(update(9, 0, &[1])));
    fixture.turn().await;
    assert_eq!(len(again.group(), 9), Some(1));
    assert_eq!(len(again.group(), 1), Some(3));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_away_or_forgot_a_group_costs_only_time() {
    let fixture = fixture();
    let store = &fixture.store;
    let failures = AtomicUsize::new(0);
    store.refuse(move |call| {
        let is_pull = matches!(call, StoreCall::Pull(_));
        let fails = is_pull && failures.fetch_add(1, Ordering::Relaxed) < 3;
        fails.then_some(ErrorKind::Unavailable)
    });
    let member = fixture
        .replica
        .join_group(fixture.namespace, "g", DocumentId(1))
        .unwrap();
    member.group().merge((&update(1, 0, &[1, 2, 3])).into());
    store.push_to_group("g", FeedEvent::Update(update(7, 0, &[4, 5])));
    tokio::time::sleep(Duration::from_secs(30)).await;
    let len = |document| member.group().read().len_of(DocumentId(document));
    assert_eq!(len(7), Some(2));
    let failed = fixture.metrics.pulls.with_label_values(&[FAILED]);
    assert_eq!(failed.get(), 3);
    // It restarts with nothing: the group is registered again, and its log begins anew.
    store.content().registered.clear();
    store.content().groups.clear();
    store.push_to_group("g", FeedEvent::Update(update(8, 0, &[6])));
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(store.content().registered.len(), 1);
    assert_eq!((len(1), len(7), len(8)), (Some(3), None, Some(1)));
}

#[tokio::test]
async fn a_log_that_is_begun_anew_while_it_is_applied_is_read_from_its_beginning() {
    let fixture = fixture();
    // One that does not follow groups by itself.
    let registry = Registry::new(
        ReplicaConfig::default(),
        IndexConfig::default(),
        fixture.store.clone(),
        fixture.metrics.clone(),
    );
    let groups = &registry.shared.groups;
    let member = groups.join(fixture.namespace, "g", DocumentId(1)).unwrap();
    let group = member.group();
    let namespace =
        NamespaceReplica::new(fixture.namespace, &fixture.signed, IndexConfig::default());
    let shared = registry.shared.clone();
    let mut log = GroupLog::begin(shared, namespace.into(), "g".to_owned(), group.clone()).await;
    let delta = || FeedDelta {
        reset: true,
        events: vec![
            FeedEvent::Update(update(7, 0, &[4, 5])),
            FeedEvent::Update(update(8, 0, &[6])),
        ],
        cursor: FeedCursor {
            generation: 1,
            sequence: 2,
            ..FeedCursor::default()
        },
        caught_up: true,
    };
    let lens = || [7, 8].map(|document| group.read().len_of(DocumentId(document)));
    log.ask();
    {
        let mut applying = std::pin::pin!(log.apply(delta(), Some(80), Instant::now()));
        // It lets others run after each part.
        tokio::select! {
            biased;
            _ = &mut applying => panic!("both updates were applied at once"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(lens(), [Some(2), None]);
        groups.reset(fixture.namespace);
        applying.await;
    }
    assert_eq!(lens(), [None, None]);
    assert_eq!(group.log_position().cursor, FeedCursor::default());
    // So does a log that arrives after that.
    log.apply(delta(), Some(80), Instant::now()).await;
    assert_eq!(lens(), [None, None]);
    log.ask();
    log.apply(delta(), Some(80), Instant::now()).await;
    assert_eq!(lens(), [Some(2), Some(1)]);
    assert_eq!(group.log_position().cursor.sequence, 2);
    assert_eq!(fixture.metrics.group_tokens_received.get(), 2 + 3);
}

#[tokio::test(start_paused = true)]
async fn a_group_that_the_store_has_no_room_for_is_registered_again_after_a_pause() {
    let fixture = fixture();
    let registrations = Arc::new(AtomicUsize::new(0));
    let count = registrations.clone();
    fixture.store.refuse(move |call| {
        let is_registration = matches!(call, StoreCall::RegisterGroup(_));
        count.fetch_add(usize::from(is_registration), Ordering::Relaxed);
        is_registration.then_some(ErrorKind::Overloaded)
    });
    let member = fixture
        .replica
        .join_group(fixture.namespace, "g", DocumentId(1))
        .unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let count = registrations.load(Ordering::Relaxed);
    assert!((10..=13).contains(&count), "{count} registrations");
    fixture.store.remove_hook();
    fixture
        .store
        .push_to_group("g", FeedEvent::Update(update(7, 0, &[4, 5])));
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(member.group().read().len_of(DocumentId(7)), Some(2));
}
