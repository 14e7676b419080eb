//! Tests of what logs of groups bring, with a store that is a list of logs.

use std::sync::atomic::{AtomicUsize, Ordering};

use refrain_protocol::Namespace;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedCursor, FollowReply};
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_suffix_index::IndexConfig;

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::DraftReplica;

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

    /// The calls for logs of groups so far.
    fn calls(&self) -> Vec<FetchGroupsRequest> {
        let content = self.store.content();
        let calls = content.calls.iter().filter_map(|call| match call {
            StoreCall::FetchGroups(request) => Some(request.clone()),
            _ => None,
        });
        calls.collect()
    }
}

#[tokio::test(start_paused = true)]
async fn samples_elsewhere_come_while_they_run_and_own_ones_are_not_asked_for() {
    let fixture = fixture();
    let store = &fixture.store;
    fixture.turn().await;
    assert_eq!(fixture.calls(), [], "no group runs");
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
    let mut asked: Vec<_> = last
        .groups
        .iter()
        .map(|asked| (&*asked.group, asked.own.clone()))
        .collect();
    asked.sort();
    assert_eq!(
        asked,
        [("g", vec![DocumentId(1)]), ("h", vec![DocumentId(2)])]
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
    fixture.turn().await;
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
        let is_fetch = matches!(call, StoreCall::FetchGroups(_));
        let fails = is_fetch && failures.fetch_add(1, Ordering::Relaxed) < 3;
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
    let failed = fixture.metrics.group_calls.with_label_values(&[FAILED]);
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
    let running = RunningGroup {
        name: "g".to_owned(),
        group: member.group().clone(),
        own: vec![DocumentId(1)],
    };
    let group = &running.group;
    let log = || GroupLog {
        is_registered: true,
        log: FollowReply {
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
        },
        age_ms: Some(80),
    };
    let lens = || [7, 8].map(|document| group.read().len_of(DocumentId(document)));
    let position = group.log_position();
    {
        let mut applying =
            std::pin::pin!(registry.apply(&running, position, log(), Instant::now()));
        // It lets others run after each part.
        tokio::select! {
            biased;
            _ = &mut applying => panic!("both updates were applied at once"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(lens(), [Some(2), None]);
        groups.reset(fixture.namespace);
        assert!(!applying.await);
    }
    assert_eq!(lens(), [None, None]);
    assert_eq!(group.log_position().cursor, FeedCursor::default());
    // So does a log that arrives after that.
    assert!(
        !registry
            .apply(&running, position, log(), Instant::now())
            .await
    );
    assert_eq!(lens(), [None, None]);
    let position = group.log_position();
    assert!(
        registry
            .apply(&running, position, log(), Instant::now())
            .await
    );
    assert_eq!(lens(), [Some(2), Some(1)]);
    assert_eq!(group.log_position().cursor.sequence, 2);
    assert_eq!(fixture.metrics.group_tokens_received.get(), 2 + 3);
}

#[test]
fn a_call_names_a_limited_number_of_groups_and_documents() {
    let groups: Vec<RunningGroup> = (0..300)
        .map(|number| RunningGroup {
            name: number.to_string(),
            group: super::super::groups::tests::group(),
            own: vec![DocumentId(1); if number == 100 { 2_000 } else { 7 }],
        })
        .collect();
    let sizes: Vec<usize> = calls(&groups).map(<[RunningGroup]>::len).collect();
    assert_eq!(sizes, [100, 1, 128, 71]);
    assert_eq!(calls(&[]).count(), 0);
}
