//! The service around the core: HTTP, long polling, limits, restart.

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::EraseRequest;
use refrain_rpc::{HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;

use super::*;

fn follow(store: &Store, tenant: &str, after: FeedCursor, wait_ms: u32) -> FollowRequest {
    FollowRequest {
        namespace: store.sign(tenant),
        after,
        own: Vec::new(),
        max_tokens: 1000,
        wait_ms,
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
    let reply = http
        .follow(follow(&store, "a", FeedCursor::default(), 0))
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
    let first = store
        .handle()
        .follow(follow(&store, "a", FeedCursor::default(), 0))
        .await
        .unwrap();
    let (handle, request) = (store.handle(), follow(&store, "a", first.cursor, 30_000));
    let waiting = tokio::spawn(async move { handle.follow(request).await });
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
    let reply = store
        .handle()
        .follow(follow(&store, "a", reply.cursor, 30))
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
    let own = |after, wait_ms| FollowRequest {
        own: vec![DocumentId(1)],
        ..follow(&store, "a", after, wait_ms)
    };
    let sent = vec![update(1, 0, &[1, 2]), update(2, 0, &[3])];
    store.append("a", sent).await.unwrap();
    let first = own(FeedCursor::default(), 0);
    let reply = store.handle().follow(first).await.unwrap();
    let [FeedEvent::Update(other)] = &reply.events[..] else {
        panic!("{:?}", reply.events)
    };
    assert_eq!((other.document, reply.caught_up), (DocumentId(2), true));
    // Its growth ends no wait, and is behind the follower after that.
    let (handle, request) = (store.handle(), own(reply.cursor, 300));
    let waiting = tokio::spawn(async move { handle.follow(request).await });
    eventually(async || store.handle().observe().waiters > 0).await;
    store.append("a", vec![update(1, 2, &[5])]).await.unwrap();
    let reply = waiting.await.unwrap().unwrap();
    assert_eq!((reply.events.len(), reply.caught_up), (0, true));
    let rest = follow(&store, "a", reply.cursor, 0);
    assert_eq!(store.handle().follow(rest).await.unwrap().events, []);
    // It is told of the removal.
    let erased = EraseRequest {
        tenant: Some("a".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(erased).await.unwrap();
    let last = own(reply.cursor, 0);
    let mut removed = store.handle().follow(last).await.unwrap().events;
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
    let first = store
        .handle()
        .follow(follow(&store, "a", FeedCursor::default(), 0))
        .await
        .unwrap();
    let (handle, request) = (store.handle(), follow(&store, "a", first.cursor, 30_000));
    let waiting = tokio::spawn(async move { handle.follow(request).await });
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

#[tokio::test]
async fn the_default_limit_lets_twenty_workers_follow_as_many_namespaces_as_they_hold() {
    const WORKERS: i64 = 20;
    // The default of `worker.replica.namespaces_max`.
    const NAMESPACES: i64 = 64;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let mut calls = Vec::new();
    for namespace in 0..NAMESPACES {
        let tenant = format!("tenant-{namespace}");
        let first = follow(&store, &tenant, FeedCursor::default(), 0);
        let cursor = store.handle().follow(first).await.unwrap().cursor;
        for _ in 0..WORKERS {
            let (handle, request) = (store.handle(), follow(&store, &tenant, cursor, 30_000));
            calls.push(tokio::spawn(async move { handle.follow(request).await }));
        }
    }
    eventually(async || store.handle().observe().waiters == WORKERS * NAMESPACES).await;
    assert_eq!(store.handle().observe().namespaces_awaited, 64);
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
        let reply = store
            .handle()
            .follow(follow(&store, "a", cursor, 0))
            .await
            .unwrap();
        cursor = reply.cursor;
        if reply.caught_up {
            break;
        }
    }
    // The first one waits until the second one is refused, however long that takes.
    let (handle, request) = (store.handle(), follow(&store, "a", cursor, 60_000));
    let waiting = tokio::spawn(async move { handle.follow(request).await });
    eventually(async || store.handle().observe().waiters > 0).await;
    let second = store
        .handle()
        .follow(follow(&store, "a", cursor, 300))
        .await;
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
