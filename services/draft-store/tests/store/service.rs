//! The service around the core: HTTP, long polling, limits, restart.

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::pull::{NamespacePull, PullReply, PullRequest, Scope, ScopeNews, ScopePull};
use refrain_rpc::{HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;

use super::*;

fn follow(store: &Store, tenant: &str, after: FeedCursor, wait_ms: u32) -> ScopeReader {
    ScopeReader {
        after,
        max_tokens: 1000,
        wait_ms,
        ..ScopeReader::new(store.sign(tenant))
    }
}

#[tokio::test]
async fn all_calls_work_over_http_and_need_the_secret_and_the_signature() {
    let dir = tempfile::tempdir().unwrap();
    let listen = Some("127.0.0.1:0".parse().unwrap());
    let store = Store::start(DraftStoreConfig {
        listen,
        ..config(dir.path())
    })
    .await;
    let url = format!("http://{}", store.server.addr().unwrap());
    let client =
        |secret: &str| HttpDraftStore::new(MeshClient::new(&url, secret, PATIENCE).unwrap());
    let http = client(&store.mesh.secret);
    let tokens: Vec<u32> = (0..3000).collect();
    let request = AppendRequest {
        namespace: store.sign("a"),
        updates: vec![finished(update(1, 0, &tokens))],
        waited_ms: 0,
        acknowledgement: None,
    };
    assert_eq!(http.append(request.clone()).await.unwrap().lengths, [3000]);
    let reply = follow(&store, "a", FeedCursor::default(), 0)
        .read(&http)
        .await
        .unwrap();
    assert!(reply.reset && reply.caught_up);
    let [FeedEvent::Update(update)] = &reply.events[..] else {
        panic!("{:?}", reply.events)
    };
    assert_eq!(
        (&update.tokens, update.finish),
        (&tokens, Some(FinishReason::Stop))
    );
    assert_eq!(update.head.left_context.len(), 16);
    http.touch(TouchRequest {
        namespace: store.sign("a"),
        documents: vec![DocumentId(1)],
    })
    .await
    .unwrap();
    let stats = http.stats().await.unwrap();
    assert_eq!(
        (stats.documents, stats.tokens, stats.namespaces),
        (1, 3000, 1)
    );
    assert!(stats.logical_bytes > 0 && stats.disk_bytes > 0);

    let stranger = client("not the secret, but as long as it");
    assert_eq!(
        stranger.stats().await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    assert_eq!(
        stranger.append(request.clone()).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    let mut forged = request;
    Arc::make_mut(&mut forged.namespace.namespace).tenant = "b".into();
    assert_eq!(
        http.append(forged).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    assert_eq!(store.metric("refrain_draft_store_documents"), 1.0);
    assert_eq!(
        store.metric("refrain_draft_store_appended_tokens_total"),
        3000.0
    );
    store.stop().await;
}

#[tokio::test]
async fn a_waiting_follower_is_woken_by_its_own_namespace_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let first = follow(&store, "a", FeedCursor::default(), 0)
        .read(&store.handle())
        .await
        .unwrap();
    let (handle, request) = (store.handle(), follow(&store, "a", first.cursor, 30_000));
    let waiting = tokio::spawn(async move { request.read(&handle).await });
    eventually(async || store.handle().observe().waiters > 0).await;
    store.append("b", vec![update(1, 0, &[1])]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    store.append("a", vec![update(1, 0, &[2])]).await.unwrap();
    let reply = waiting.await.unwrap().unwrap();
    assert_eq!((reply.events.len(), reply.reset), (1, false));
    assert_eq!(store.handle().observe().namespaces_awaited, 0);
    // The wait also ends by itself.
    let started = Instant::now();
    let reply = follow(&store, "a", reply.cursor, 30)
        .read(&store.handle())
        .await
        .unwrap();
    assert!(reply.events.is_empty() && reply.caught_up);
    assert!(started.elapsed() >= Duration::from_millis(30));
    store.stop().await;
}

#[tokio::test]
async fn a_follower_is_not_sent_what_it_writes_itself() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let own = |after, wait_ms| ScopeReader {
        own: vec![DocumentId(1)],
        ..follow(&store, "a", after, wait_ms)
    };
    let sent = vec![update(1, 0, &[1, 2]), update(2, 0, &[3])];
    store.append("a", sent).await.unwrap();
    let first = own(FeedCursor::default(), 0);
    let reply = first.read(&store.handle()).await.unwrap();
    let [FeedEvent::Update(other)] = &reply.events[..] else {
        panic!("{:?}", reply.events)
    };
    assert_eq!((other.document, reply.caught_up), (DocumentId(2), true));
    // Its growth ends no wait, and is behind the follower after that.
    let (handle, request) = (store.handle(), own(reply.cursor, 300));
    let waiting = tokio::spawn(async move { request.read(&handle).await });
    eventually(async || store.handle().observe().waiters > 0).await;
    store.append("a", vec![update(1, 2, &[5])]).await.unwrap();
    let reply = waiting.await.unwrap().unwrap();
    assert_eq!((reply.events.len(), reply.caught_up), (0, true));
    let rest = follow(&store, "a", reply.cursor, 0);
    assert_eq!(rest.read(&store.handle()).await.unwrap().events, []);
    // It is told of the removal.
    let erased = EraseRequest {
        tenant: Some("a".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(erased).await.unwrap();
    let last = own(reply.cursor, 0);
    let mut removed = last.read(&store.handle()).await.unwrap().events;
    removed.sort_by_key(|event| matches!(event, FeedEvent::Remove(DocumentId(2))));
    let all = [DocumentId(1), DocumentId(2)].map(FeedEvent::Remove);
    assert_eq!(removed, all);
    store.stop().await;
}

#[tokio::test]
async fn a_drain_releases_waiting_calls_and_keeps_what_was_sent() {
    let dir = tempfile::tempdir().unwrap();
    let slow = DraftStoreConfig {
        tuning: StoreTuning {
            commit_interval_ms: 1_000,
            ..tuning()
        },
        ..config(dir.path())
    };
    let store = Store::start(slow).await;
    let first = follow(&store, "a", FeedCursor::default(), 0)
        .read(&store.handle())
        .await
        .unwrap();
    let (handle, request) = (store.handle(), follow(&store, "a", first.cursor, 30_000));
    let waiting = tokio::spawn(async move { request.read(&handle).await });
    let handle = store.handle();
    let request = AppendRequest {
        namespace: store.sign("a"),
        updates: vec![update(1, 0, &[1])],
        waited_ms: 0,
        acknowledgement: None,
    };
    let appending = tokio::spawn(async move { handle.append(request).await });
    eventually(async || {
        let state = store.handle().observe();
        state.pending_tokens > 0 && state.waiters > 0
    })
    .await;
    let (handle, late) = (store.handle(), store.sign("a"));
    let started = Instant::now();
    store.stop().await;
    // The waiting call alone would wait for 30 s.
    assert!(started.elapsed() < Duration::from_secs(25));
    assert!(waiting.await.unwrap().is_ok());
    assert_eq!(appending.await.unwrap().unwrap().lengths, [1]);
    let refused = handle
        .append(AppendRequest {
            namespace: late,
            updates: vec![],
            waited_ms: 0,
            acknowledgement: None,
        })
        .await;
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Unavailable);
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.handle().stats().await.unwrap().documents, 1);
    store.stop().await;
}

/// A pull of several scopes, each from its beginning.
fn pull(store: &Store, of: &[(&str, &[Scope])], wait_ms: u32) -> PullRequest {
    let namespaces = of.iter().map(|(tenant, scopes)| NamespacePull {
        namespace: store.sign(tenant),
        scopes: scopes
            .iter()
            .map(|scope| ScopePull {
                scope: scope.clone(),
                after: FeedCursor::default(),
                own: Vec::new(),
            })
            .collect(),
    });
    PullRequest {
        namespaces: namespaces.collect(),
        max_tokens: 1_000,
        wait_ms,
    }
}

/// Goes on after an answer.
fn advance(request: &mut PullRequest, reply: &PullReply) {
    let scopes = request.namespaces.iter_mut().flat_map(|of| &mut of.scopes);
    let mut scopes: Vec<&mut ScopePull> = scopes.collect();
    for delta in &reply.deltas {
        if let ScopeNews::Changes { delta: changes, .. } = &delta.news {
            scopes[delta.scope as usize].after = changes.cursor;
        }
    }
}

/// The positions of the scopes that have events, with their numbers.
fn events(reply: &PullReply) -> Vec<(u32, usize)> {
    let deltas = reply.deltas.iter().filter_map(|of| match &of.news {
        ScopeNews::Changes { delta, .. } => Some((of.scope, delta.events.len())),
        _ => None,
    });
    deltas.filter(|(_, events)| *events > 0).collect()
}

#[tokio::test]
async fn one_pull_waits_for_the_news_of_all_its_namespaces_and_groups() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let group = Scope::Group("g".into());
    store
        .handle()
        .register_group(RegisterGroupRequest {
            namespace: store.sign("c"),
            group: "g".into(),
            ttl_ms: 60_000,
        })
        .await
        .unwrap();
    let of = [
        ("a", &[Scope::Namespace][..]),
        ("b", &[Scope::Namespace]),
        ("c", &[group]),
    ];
    let mut request = pull(&store, &of, 30_000);
    let first = store.handle().pull(request.clone()).await.unwrap();
    assert_eq!((first.deltas.len(), first.is_full), (3, false));
    advance(&mut request, &first);
    let wait = |request: &PullRequest| {
        let (handle, request) = (store.handle(), request.clone());
        tokio::spawn(async move { handle.pull(request).await })
    };
    let mut sample = update(7, 0, &[1, 2]);
    sample.head.group = Some("g".into());
    for (tenant, sent, expected) in [
        ("b", update(1, 0, &[1]), [(1, 1)]),
        ("c", sample, [(2, 1)]),
        ("a", update(1, 0, &[1]), [(0, 1)]),
    ] {
        let waiting = wait(&request);
        eventually(async || store.handle().observe().waiters > 0).await;
        // Another document of a group's namespace is no news of the group, and others are none at all.
        for other in ["c", "d"] {
            store.append(other, vec![update(2, 0, &[9])]).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!waiting.is_finished());
        store.append(tenant, vec![sent]).await.unwrap();
        let reply = waiting.await.unwrap().unwrap();
        assert_eq!(events(&reply), expected);
        advance(&mut request, &reply);
    }
    assert_eq!(store.handle().observe().namespaces_awaited, 0);
    store.stop().await;
}

#[tokio::test]
async fn a_scope_that_is_refused_or_unknown_answers_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    store.append("b", vec![update(1, 0, &[1])]).await.unwrap();
    let of = [
        ("a", &[Scope::Namespace, Scope::Group("g".into())][..]),
        ("b", &[Scope::Group("unknown".into()), Scope::Namespace]),
    ];
    let mut request = pull(&store, &of, 30_000);
    request.namespaces[0].namespace.issued_at_s -= 1;
    let reply = store.handle().pull(request).await.unwrap();
    let news: Vec<ScopeNews> = reply.deltas.iter().map(|of| of.news.clone()).collect();
    let [
        refused,
        refused_group,
        ScopeNews::Unregistered,
        ScopeNews::Changes { delta, .. },
    ] = &news[..]
    else {
        panic!("{news:?}");
    };
    assert_eq!(delta.events.len(), 1);
    for news in [refused, refused_group] {
        let is_refused = matches!(
            news,
            ScopeNews::Refused {
                kind: ErrorKind::Unauthorized,
                ..
            }
        );
        assert!(is_refused, "{news:?}");
    }
    store.stop().await;
}

#[tokio::test]
async fn a_full_answer_leaves_the_last_scopes_to_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let limited = DraftStoreConfig {
        tuning: StoreTuning {
            // Some three documents.
            pull_bytes_max: 3 * 230,
            pull_scopes_max: 3,
            ..tuning()
        },
        ..config(dir.path())
    };
    let store = Store::start(limited).await;
    for tenant in ["a", "b", "c"] {
        let documents = (0..2).map(|document| update(document, 0, &[1; 10]));
        store.append(tenant, documents.collect()).await.unwrap();
    }
    let scopes = &[Scope::Namespace][..];
    let mut request = pull(&store, &[("a", scopes), ("b", scopes), ("c", scopes)], 0);
    let mut read = Vec::new();
    for _ in 0..3 {
        let reply = store.handle().pull(request.clone()).await.unwrap();
        advance(&mut request, &reply);
        read.push((events(&reply), reply.is_full));
    }
    assert_eq!(
        read,
        [
            (vec![(0, 2), (1, 1)], true),
            (vec![(1, 1), (2, 2)], false),
            (vec![], false)
        ]
    );
    assert_eq!(store.metric("refrain_draft_store_full_pulls_total"), 1.0);
    let too_many = pull(
        &store,
        &[
            ("a", scopes),
            ("b", &[Scope::Namespace, Scope::Namespace]),
            ("c", scopes),
        ],
        0,
    );
    let refused = store.handle().pull(too_many).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::TooLarge);
    let count = "refrain_draft_store_rejections_total{limit=\"pull_scopes_max\"}";
    assert_eq!(store.metric(count), 1.0);
    store.stop().await;
}

#[tokio::test]
async fn workers_wait_with_one_call_each_for_all_namespaces_that_they_hold() {
    const WORKERS: i64 = 200;
    // The default of `worker.replica.namespaces_max`.
    const NAMESPACES: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let tenants: Vec<String> = (0..NAMESPACES)
        .map(|number| format!("tenant-{number}"))
        .collect();
    let of: Vec<(&str, &[Scope])> = tenants
        .iter()
        .map(|tenant| (&**tenant, &[Scope::Namespace][..]))
        .collect();
    let mut request = pull(&store, &of, 30_000);
    let first = store.handle().pull(request.clone()).await.unwrap();
    advance(&mut request, &first);
    let calls: Vec<_> = (0..WORKERS)
        .map(|_| {
            let (handle, request) = (store.handle(), request.clone());
            tokio::spawn(async move { handle.pull(request).await })
        })
        .collect();
    eventually(async || store.handle().observe().waiters == WORKERS).await;
    assert_eq!(store.handle().observe().namespaces_awaited, NAMESPACES);
    // The end of the store releases them, and none was refused.
    store.stop().await;
    for call in calls {
        assert!(call.await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn limits_may_be_as_large_as_a_number_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let unlimited = DraftStoreConfig {
        waiters_max: usize::MAX,
        ..config(dir.path())
    };
    let store = Store::start(unlimited).await;
    assert_eq!(store.handle().stats().await.unwrap().documents, 0);
    store.stop().await;
}

#[tokio::test]
async fn limits_refuse_calls_and_count_them() {
    let dir = tempfile::tempdir().unwrap();
    let limited = DraftStoreConfig {
        document_tokens_max: 10,
        pending_tokens_max: 1_024,
        waiters_max: 1,
        tuning: StoreTuning {
            updates_max: 2,
            commit_interval_ms: 1_000,
            ..tuning()
        },
        ..config(dir.path())
    };
    let store = Store::start(limited).await;
    let kind = |result: Result<Vec<u32>, ApiError>| result.unwrap_err().kind;
    let three = vec![update(1, 0, &[1]); 3];
    assert_eq!(kind(store.append("a", three).await), ErrorKind::TooLarge);
    let long = vec![update(1, 5, &[1; 6])];
    assert_eq!(kind(store.append("a", long).await), ErrorKind::TooLarge);
    let far = vec![update(1, u32::MAX, &[1])];
    assert_eq!(kind(store.append("a", far).await), ErrorKind::TooLarge);
    let mut named = update(1, 0, &[1]);
    named.head.session = Some("s".repeat(513));
    assert_eq!(
        kind(store.append("a", vec![named]).await),
        ErrorKind::InvalidRequest
    );
    let namespace = store.sign("a");
    let mut refused = 0;
    // 1,024 tokens may wait, and 2,000 come. On a busy machine some commits may come in between.
    for _ in 0..20 {
        let mut calls = Vec::new();
        for document in 0..200 {
            let (handle, namespace) = (store.handle(), namespace.clone());
            let updates = vec![update(document, 0, &[1; 10])];
            calls.push(tokio::spawn(async move {
                let request = AppendRequest {
                    namespace,
                    updates,
                    waited_ms: 0,
                    acknowledgement: None,
                };
                handle.append(request).await
            }));
        }
        for call in calls {
            match call.await.unwrap() {
                Ok(reply) => assert_eq!(reply.lengths, [10]),
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::Overloaded);
                    assert!(error.retry_after_ms.is_some());
                    refused += 1;
                }
            }
        }
        if refused > 0 {
            break;
        }
    }
    assert!(refused > 0, "no call was refused");
    let count = |limit: &str| {
        store.metric(&format!(
            "refrain_draft_store_rejections_total{{limit=\"{limit}\"}}"
        ))
    };
    assert_eq!(count("updates_max"), 1.0);
    assert_eq!(count("document_tokens_max"), 2.0);
    assert_eq!(count("head"), 1.0);
    assert_eq!(count("pending_tokens_max"), f64::from(refused));

    let mut cursor = FeedCursor::default();
    loop {
        let reply = follow(&store, "a", cursor, 0)
            .read(&store.handle())
            .await
            .unwrap();
        cursor = reply.cursor;
        if reply.caught_up {
            break;
        }
    }
    // The first one waits until the second one is refused, however long that takes.
    let (handle, request) = (store.handle(), follow(&store, "a", cursor, 60_000));
    let waiting = tokio::spawn(async move { request.read(&handle).await });
    eventually(async || store.handle().observe().waiters > 0).await;
    let second = follow(&store, "a", cursor, 300).read(&store.handle()).await;
    assert_eq!(second.unwrap_err().kind, ErrorKind::Overloaded);
    waiting.abort();
    store.stop().await;
}

#[tokio::test]
async fn a_restart_keeps_documents_removals_and_cursors() {
    let dir = tempfile::tempdir().unwrap();
    let small = DraftStoreConfig {
        document_tokens_max: 100,
        tokens_max: 500,
        tenant_tokens_max: 300,
        ..config(dir.path())
    };
    let store = Store::start(small.clone()).await;
    let mut follower = Follower::default();
    for document in 0..10 {
        store
            .append("a", vec![update(document, 0, &[document as u32; 60])])
            .await
            .unwrap();
        store
            .append("b", vec![update(document, 0, &[7; 20])])
            .await
            .unwrap();
        if document == 4 {
            follower.catch_up(&store, "a").await;
        }
    }
    let stats = store.handle().stats().await.unwrap();
    assert_eq!((stats.tokens, stats.evicted_documents), (500, 5));
    store.stop().await;
    let store = Store::start(small).await;
    let again = store.handle().stats().await.unwrap();
    assert_eq!(
        (
            again.documents,
            again.tokens,
            again.logical_bytes,
            again.namespaces
        ),
        (stats.documents, stats.tokens, stats.logical_bytes, 2)
    );
    follower.catch_up(&store, "a").await;
    assert_eq!(
        follower.texts.keys().copied().collect::<Vec<_>>(),
        [5, 6, 7, 8, 9]
    );
    assert_eq!(follower.resets, 1);
    store.stop().await;
}
