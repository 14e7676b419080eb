//! Exports show one moment, whatever happens meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::{EraseRequest, ExportCursor, ExportReply, ExportRequest};
use refrain_rpc::StoreAdmin as _;

use super::rewrite::noise;
use super::*;

impl Store {
    async fn page(&self, tenant: &str, after: ExportCursor) -> Result<ExportReply, ApiError> {
        let request = ExportRequest {
            tenant: tenant.into(),
            model: None,
            after,
            max_tokens: 1_500,
        };
        self.handle().export(request).await
    }

    /// Stores finished documents of 400 tokens in one call.
    async fn finish(&self, tenant: &str, documents: std::ops::Range<u128>) {
        let updates = documents.map(|document| {
            let mut sent = finished(update(document, 0, &noise(document, 400)));
            sent.head.session = Some(format!("s{document}"));
            sent
        });
        self.append(tenant, updates.collect()).await.unwrap();
    }

    async fn running(&self, documents: std::ops::Range<u128>) {
        let updates = documents.map(|document| update(document, 0, &noise(document, 100)));
        self.append("a", updates.collect()).await.unwrap();
    }
}

fn budgeted(dir: &Path) -> DraftStoreConfig {
    DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 40_000,
        ..sealing(dir)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_export_shows_one_moment_whatever_happens_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::start(budgeted(dir.path())).await);
    store.finish("a", 0..30).await;
    store.handle().compact().await.unwrap();
    // These are in a segment. The others stay in the log, and some of them end there.
    store.running(100..120).await;
    store.finish("a", 200..210).await;
    let mut then = Follower::default();
    then.catch_up(&store, "a").await;
    assert_eq!(then.texts.len(), 60);
    let first = store.page("a", ExportCursor::default()).await.unwrap();
    let mut after = first.next.unwrap();
    assert!(after.snapshot != 0);
    let mut exported = first.documents;
    // Documents grow, are cut, and are overwritten.
    let more = noise(7, 50);
    let grown = (100..110).map(|document| update(document, 100, &more));
    let cut = (110..113).map(|document| DocumentUpdate {
        epoch: 2,
        ..update(document, 10, &more)
    });
    let begun_again = (200..203).map(|document| DocumentUpdate {
        epoch: 2,
        ..update(document, 0, &[5])
    });
    let updates = grown.chain(cut).chain(begun_again).collect();
    store.append("a", updates).await.unwrap();
    let second = store.page("a", after).await.unwrap();
    exported.extend(second.documents);
    after = second.next.unwrap();
    // All of them are evicted or sealed, and all segments are merged or gone.
    for from in (1_000..1_200).step_by(20) {
        store.finish("a", from..from + 20).await;
    }
    store.handle().compact().await.unwrap();
    let mut now = Follower::default();
    now.catch_up(&store, "a").await;
    assert!(now.texts.keys().all(|document| *document >= 1_000));
    // The store goes on like this.
    let done = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn({
        let (store, done) = (store.clone(), done.clone());
        async move {
            let mut from = 2_000;
            while !done.load(Ordering::Relaxed) {
                store.finish("a", from..from + 10).await;
                if from % 50 == 0 {
                    store.handle().compact().await.unwrap();
                }
                from += 10;
            }
        }
    });
    let mut next = Some(after);
    while let Some(after) = next {
        let page = store.page("a", after).await.unwrap();
        exported.extend(page.documents);
        next = page.next;
    }
    done.store(true, Ordering::Relaxed);
    writer.await.unwrap();
    let finishes = |document: u128| (100..120).contains(&document);
    for document in &exported {
        let update = &document.update;
        assert_eq!((update.epoch, update.prev_len), (1, 0));
        assert_eq!(update.finish.is_none(), finishes(update.document.0));
        assert_eq!(update.head.left_context.len(), 16);
    }
    let count = exported.len();
    let texts: BTreeMap<u128, Vec<TokenId>> = exported
        .into_iter()
        .map(|document| (document.update.document.0, document.update.tokens))
        .collect();
    assert_eq!(count, texts.len(), "a document was exported twice");
    assert_eq!(texts, then.texts);
    // The export is complete, and holds nothing.
    let gone = store.page("a", after).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::Conflict);
    let store = Arc::into_inner(store).unwrap();
    eventually(async || store.metric("refrain_draft_store_exports") == 0.0).await;
    assert_eq!(store.metric("refrain_draft_store_export_held_bytes"), 0.0);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erasure_ends_the_exports_of_its_tenant_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    for tenant in ["a", "b"] {
        store.finish(tenant, 0..20).await;
    }
    store.handle().compact().await.unwrap();
    let begun = async |tenant: &str| {
        let page = store.page(tenant, ExportCursor::default()).await.unwrap();
        page.next.unwrap()
    };
    let (ours, theirs) = (begun("a").await, begun("b").await);
    // Nobody holds what was removed, not even what was evicted before it could be erased.
    let session = EraseRequest {
        tenant: Some("a".into()),
        session: Some("s19".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(session).await.unwrap();
    #[cfg(target_os = "linux")]
    {
        let namespace = store.sign("a").namespace.id();
        let held = takeover::deleted_files_held(dir.path());
        assert_eq!(held, [""; 0], "{namespace}");
    }
    let error = store.page("a", ours).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(error.message.contains("erased"), "{error:?}");
    assert_eq!(store.page("b", theirs).await.unwrap().documents.len(), 3);
    let again = store.page("a", ExportCursor::default()).await.unwrap();
    assert_eq!(again.documents.len(), 3);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_and_disk_of_an_export_are_bounded() {
    let refused = async |change: fn(&mut DraftStoreConfig), limit: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = budgeted(dir.path());
        change(&mut config);
        let store = Store::start(config).await;
        store.finish("a", 0..30).await;
        store.handle().compact().await.unwrap();
        store.running(100..150).await;
        let after = store.page("a", ExportCursor::default()).await.unwrap();
        for from in (1_000..1_200).step_by(20) {
            store.finish("a", from..from + 20).await;
        }
        let mut outcome = store.page("a", after.next.unwrap()).await;
        while let Ok(page) = &outcome {
            outcome = store.page("a", page.next.expect("is ended")).await;
        }
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.message.contains(limit), "{error:?}");
        let labels = format!("{{limit=\"{limit}\"}}");
        let rejections = format!("refrain_draft_store_rejections_total{labels}");
        assert_eq!(store.metric(&rejections), 1.0);
        store.stop().await;
    };
    // The list takes about 13 KB, and the texts of fifty documents twice that.
    refused(
        |config| config.export_held_bytes_max = 20_000,
        "export_held_bytes_max",
    )
    .await;
    refused(
        |config| config.export_disk_bytes_max = 1_000,
        "export_disk_bytes_max",
    )
    .await;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        export_held_bytes_max: 100,
        ..budgeted(dir.path())
    })
    .await;
    store.finish("a", 0..30).await;
    let error = store.page("a", ExportCursor::default()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge);
    assert!(error.message.contains("export_held_bytes_max"), "{error:?}");
    store.stop().await;
    let start = async |idle_s: u64| {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::start(DraftStoreConfig {
            tuning: StoreTuning {
                exports_max: 1,
                export_idle_s: idle_s,
                ..sealing(dir.path()).tuning
            },
            ..sealing(dir.path())
        })
        .await;
        store.finish("a", 0..10).await;
        let page = store.page("a", ExportCursor::default()).await.unwrap();
        (dir, store, page.next.unwrap())
    };
    let (_dir, store, first) = start(300).await;
    let second = store.page("a", ExportCursor::default()).await.unwrap_err();
    assert_eq!(second.kind, ErrorKind::Overloaded);
    assert!(store.page("a", first).await.is_ok());
    store.stop().await;
    let (_dir, store, first) = start(1).await;
    let waited = tokio::time::timeout(PATIENCE, async {
        while let Err(error) = store.page("a", ExportCursor::default()).await {
            assert_eq!(error.kind, ErrorKind::Overloaded);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    waited.await.unwrap();
    let idle = store.page("a", first).await.unwrap_err();
    assert_eq!(idle.kind, ErrorKind::Conflict);
    store.stop().await;
}
