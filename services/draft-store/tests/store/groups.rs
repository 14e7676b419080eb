//! Groups of samples: the logs that a rollout's workers draft from.

use refrain_protocol::ErrorKind;
use refrain_protocol::document::FeedDelta;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::pull::{NamespacePull, PullRequest, Scope, ScopeNews, ScopePull};
use refrain_rpc::HttpDraftStore;
use refrain_service_kit::http::MeshClient;

use super::*;

fn register(store: &Store, group: &str, ttl_ms: u64) -> RegisterGroupRequest {
    RegisterGroupRequest {
        namespace: store.sign("a"),
        group: group.into(),
        ttl_ms,
    }
}

fn of_group(group: &str, weight_version: u64, update: DocumentUpdate) -> DocumentUpdate {
    let mut update = update;
    update.head.group = Some(group.into());
    update.head.weight_version = weight_version;
    update
}

/// A reader's copy of one group.
#[derive(Default)]
struct Group {
    cursor: FeedCursor,
    own: Vec<u128>,
    texts: BTreeMap<u128, Vec<TokenId>>,
    is_registered: bool,
    resets: usize,
    tokens: usize,
    ages_ms: Vec<u32>,
}

impl Group {
    async fn catch_up(&mut self, client: &dyn DraftStore, store: &Store, group: &str) {
        loop {
            let reader = ScopeReader {
                scope: Scope::Group(group.into()),
                after: self.cursor,
                own: self.own.iter().copied().map(DocumentId).collect(),
                max_tokens: 100,
                ..ScopeReader::new(store.sign("a"))
            };
            let log = reader.log(client).await.unwrap();
            self.is_registered = log.is_some();
            if log.is_none_or(|(delta, age_ms)| self.take(&delta, age_ms)) {
                return;
            }
        }
    }

    /// Applies a log. Returns whether it reaches to the end.
    fn take(&mut self, delta: &FeedDelta, age_ms: Option<u32>) -> bool {
        self.ages_ms.extend(age_ms);
        if delta.reset {
            self.resets += 1;
            self.texts.clear();
        }
        for event in &delta.events {
            match event {
                FeedEvent::Remove(document) => {
                    self.texts.remove(&document.0);
                }
                FeedEvent::Update(update) => {
                    self.tokens += update.tokens.len();
                    let text = self.texts.entry(update.document.0).or_default();
                    let start = update.prev_len as usize;
                    assert!(start <= text.len(), "gap in the log");
                    text.truncate(start);
                    text.extend(&update.tokens);
                }
            }
        }
        self.cursor = delta.cursor;
        delta.caught_up
    }

    fn documents(&self) -> Vec<u128> {
        self.texts.keys().copied().collect()
    }
}

#[tokio::test]
async fn a_groups_log_consists_of_the_updates_of_its_documents() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        ..config(dir.path())
    })
    .await;
    let url = format!("http://{}", store.server.addr().unwrap());
    let client = MeshClient::new(&url, &store.mesh.secret, PATIENCE).unwrap();
    let http = HttpDraftStore::new(client);
    let mut group = Group::default();
    // This one writes document 1 itself.
    let mut writer = Group {
        own: vec![1],
        ..Group::default()
    };
    group.catch_up(&http, &store, "g").await;
    assert!(!group.is_registered);
    http.register_group(register(&store, "g", 60_000))
        .await
        .unwrap();
    let piece = |document, from: u32, tokens: &[TokenId]| AppendRequest {
        namespace: store.sign("a"),
        updates: vec![of_group("g", 1, update(document, from, tokens))],
        waited_ms: 70,
        acknowledgement: None,
    };
    // Two samples that grow in turn, with repeats, an update too far ahead, and other documents around them.
    for step in 0..6 {
        for document in [1, 2] {
            let tokens = vec![document as u32 * 100 + step; 20];
            let sent = piece(document, step * 20, &tokens);
            http.append(sent.clone()).await.unwrap();
            assert_eq!(http.append(sent).await.unwrap().lengths, [step * 20 + 20]);
        }
        let early = http.append(piece(1, 5_000, &[9])).await.unwrap();
        assert_eq!(early.lengths, [step * 20 + 20]);
        let other = of_group("h", 1, update(3, step * 5, &[7; 5]));
        store
            .append("a", vec![other, update(4, step * 5, &[8; 5])])
            .await
            .unwrap();
        group.catch_up(&http, &store, "g").await;
        writer.catch_up(&http, &store, "g").await;
    }
    assert_eq!((group.documents(), group.resets), (vec![1, 2], 1));
    assert_eq!(group.tokens, 240, "each token once");
    assert_eq!((writer.documents(), writer.tokens), (vec![2], 120));
    // The age counts from when the tokens were emitted, which was before they were sent.
    assert!(group.ages_ms.len() >= 6 && group.ages_ms.iter().all(|age_ms| *age_ms >= 70));
    let whole: Vec<u32> = (0..120).map(|at| 200 + at / 20).collect();
    assert_eq!(group.texts[&2], whole);
    // A higher epoch shortens the text. The namespace gets the same events.
    let mut cut = piece(2, 30, &[5, 5]);
    cut.updates[0].epoch = 2;
    assert_eq!(http.append(cut).await.unwrap().lengths, [32]);
    group.catch_up(&http, &store, "g").await;
    assert_eq!(group.texts[&2][28..], [201, 201, 5, 5]);
    let mut all = Follower::default();
    all.catch_up(&store, "a").await;
    assert_eq!(all.texts.into_keys().collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(store.metric("refrain_draft_store_groups"), 1.0);
    assert_eq!(store.metric("refrain_draft_store_group_documents"), 2.0);
    assert!(store.metric("refrain_draft_store_group_tokens_total") >= 362.0);
    store.stop().await;
}

#[tokio::test]
async fn one_call_reads_several_groups_up_to_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let handle = store.handle();
    let names = ["g", "h", "i"];
    for (document, group) in (1..).zip(names) {
        handle
            .register_group(register(&store, group, 60_000))
            .await
            .unwrap();
        let sent = of_group(group, 0, update(document, 0, &[document as u32; 60]));
        store.append("a", vec![sent]).await.unwrap();
    }
    let mut groups = names.map(|_| Group::default());
    let mut calls = 0;
    loop {
        let scopes = names.iter().zip(&groups).map(|(name, group)| ScopePull {
            scope: Scope::Group((*name).into()),
            after: group.cursor,
            own: Vec::new(),
        });
        let request = PullRequest {
            namespaces: vec![NamespacePull {
                namespace: store.sign("a"),
                scopes: scopes.collect(),
            }],
            max_tokens: 100,
            wait_ms: 0,
        };
        let reply = handle.pull(request).await.unwrap();
        calls += 1;
        let mut tokens = 0;
        for delta in reply.deltas {
            let ScopeNews::Changes { delta: log, age_ms } = delta.news else {
                panic!("{delta:?}");
            };
            tokens += log.tokens();
            groups[delta.scope as usize].take(&log, age_ms);
        }
        assert!((1..=100).contains(&tokens), "{tokens}");
        if !reply.is_full {
            break;
        }
    }
    assert_eq!(calls, 3);
    for (document, group) in (1..).zip(&groups) {
        assert_eq!(group.texts[&document], [document as u32; 60]);
    }
    store.stop().await;
}

#[tokio::test]
async fn samples_of_all_weights_stay_in_a_groups_log_until_its_time_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let handle = store.handle();
    handle
        .register_group(register(&store, "g", 60_000))
        .await
        .unwrap();
    let mut group = Group::default();
    let old = [1, 2].map(|document| of_group("g", 1, update(document, 0, &[1; 10])));
    store.append("a", old.to_vec()).await.unwrap();
    group.catch_up(&handle, &store, "g").await;
    assert_eq!(group.documents(), [1, 2]);
    // A sample of newer weights, and one of older weights that goes on: outputs of older weights remain good drafts.
    let new = of_group("g", 2, update(3, 0, &[3; 10]));
    store.append("a", vec![new]).await.unwrap();
    let with_old_weights = of_group("g", 1, update(1, 10, &[1; 10]));
    store.append("a", vec![with_old_weights]).await.unwrap();
    group.catch_up(&handle, &store, "g").await;
    assert_eq!((group.documents(), group.resets), (vec![1, 2, 3], 1));
    assert_eq!(group.texts[&1], [1; 20]);
    let with_new_weights = of_group("g", 2, update(1, 20, &[2; 10]));
    store.append("a", vec![with_new_weights]).await.unwrap();
    group.catch_up(&handle, &store, "g").await;
    assert_eq!((group.documents(), group.resets), (vec![1, 2, 3], 1));
    assert_eq!(group.texts[&1], [vec![1; 20], vec![2; 10]].concat());
    // A document that began before its group was registered enters whole as well.
    store
        .append("a", vec![of_group("late", 0, update(7, 0, &[7; 10]))])
        .await
        .unwrap();
    handle
        .register_group(register(&store, "late", 60_000))
        .await
        .unwrap();
    let mut late = Group::default();
    late.catch_up(&handle, &store, "late").await;
    assert!(late.is_registered && late.texts.is_empty());
    store
        .append("a", vec![of_group("late", 0, update(7, 10, &[8; 10]))])
        .await
        .unwrap();
    late.catch_up(&handle, &store, "late").await;
    assert_eq!(late.texts[&7].len(), 20);
    // The time to live is over, and so is the log.
    handle
        .register_group(register(&store, "short", 1))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let mut short = Group::default();
    short.catch_up(&handle, &store, "short").await;
    assert!(!short.is_registered && short.texts.is_empty());
    assert_eq!(handle.stats().await.unwrap().documents, 4);
    store.stop().await;
}

#[tokio::test]
async fn groups_are_bounded_in_number_and_in_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        tuning: StoreTuning {
            groups_max: 2,
            group_tokens_max: 25,
            ..tuning()
        },
        ..config(dir.path())
    })
    .await;
    let handle = store.handle();
    for group in ["g", "h", "g"] {
        handle
            .register_group(register(&store, group, 60_000))
            .await
            .unwrap();
    }
    let third = handle.register_group(register(&store, "i", 60_000)).await;
    assert_eq!(third.unwrap_err().kind, ErrorKind::Overloaded);
    for document in 1..4 {
        let sent = of_group("g", 0, update(document, 0, &[document as u32; 10]));
        store.append("a", vec![sent]).await.unwrap();
    }
    let mut group = Group::default();
    group.catch_up(&handle, &store, "g").await;
    assert_eq!(group.documents(), [1, 2]);
    // A member that outgrows the log leaves it, and makes room.
    let grown = of_group("g", 0, update(1, 10, &[1; 10]));
    store.append("a", vec![grown]).await.unwrap();
    let smaller = of_group("g", 0, update(5, 0, &[5; 10]));
    store.append("a", vec![smaller]).await.unwrap();
    group.catch_up(&handle, &store, "g").await;
    assert_eq!((group.documents(), group.resets), (vec![2, 5], 1));
    let count = |limit: &str| {
        store.metric(&format!(
            "refrain_draft_store_rejections_total{{limit=\"{limit}\"}}"
        ))
    };
    assert_eq!((count("groups_max"), count("group_tokens_max")), (1.0, 2.0));
    assert_eq!(handle.stats().await.unwrap().documents, 4);
    store.stop().await;
}
