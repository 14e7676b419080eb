//! Sealed segments through the public interface.

use refrain_draft_store::ClosedStore;
use refrain_protocol::admin::ExportRequest;
use refrain_protocol::document::StoreStats;
use refrain_protocol::segment::SegmentsRequest;
use refrain_rpc::StoreAdmin as _;

use super::rewrite::noise;
use super::*;

impl Store {
    /// Waits until the statistics fulfil a condition.
    pub(super) async fn sealed(&self, is_so: impl Fn(&StoreStats) -> bool) -> StoreStats {
        for _ in 0..30_000 {
            let stats = self.handle().stats().await.unwrap();
            if is_so(&stats) {
                return stats;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!(
            "the condition never holds: {:?}",
            self.handle().stats().await
        );
    }

    async fn fill(&self, documents: std::ops::Range<u128>) {
        for document in documents {
            let mut sent = finished(update(document, 0, &noise(document, 500)));
            sent.head.session = Some(format!("s{document}"));
            self.append("a", vec![sent]).await.unwrap();
        }
    }

    async fn exported(&self) -> BTreeMap<u128, DocumentUpdate> {
        let mut request = ExportRequest {
            tenant: "a".into(),
            model: None,
            after: Default::default(),
            max_tokens: 2_000,
        };
        let mut documents = BTreeMap::new();
        loop {
            let page = self.handle().export(request.clone()).await.unwrap();
            for exported in page.documents {
                documents.insert(exported.update.document.0, exported.update);
            }
            match page.next {
                Some(next) => request.after = next,
                None => return documents,
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealed_documents_are_followed_exported_verified_and_outlive_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    store.fill(0..100).await;
    let stats = store
        .sealed(|stats| stats.segment_bytes > 100 * 500 * 8 * 9 / 10)
        .await;
    assert!(stats.disk_bytes >= stats.segment_bytes + stats.log_bytes);
    let done = |from: &str| {
        let labels = format!("{{from=\"{from}\",outcome=\"done\"}}");
        store.metric(&format!("refrain_draft_store_segments_made_total{labels}"))
    };
    // The number of seals depends on how far sealing lags.
    assert!(done("log") >= 1.0);
    // More of them are merged.
    eventually(async || {
        let are_few = store.metric("refrain_draft_store_segments") <= 2.0;
        are_few && (done("log") <= 2.0 || done("segments") >= 1.0)
    })
    .await;
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts.len(), 100);
    assert!(
        follower
            .texts
            .iter()
            .all(|(id, text)| *text == noise(*id, 500))
    );
    let exported = store.exported().await;
    assert_eq!(exported.len(), 100);
    assert_eq!(exported[&7].head.session.as_deref(), Some("s7"));
    assert_eq!(
        (exported[&7].head.left_context.len(), exported[&7].finish),
        (16, Some(FinishReason::Stop))
    );
    let verified = store.handle().verify().await.unwrap();
    assert_eq!(
        (verified.documents, verified.tokens, verified.damaged),
        (100, 50_000, 0)
    );
    store.stop().await;
    let store = Store::start(sealing(dir.path())).await;
    let (resets, events) = (follower.resets, follower.events);
    follower.catch_up(&store, "a").await;
    assert_eq!((follower.resets, follower.events), (resets, events));
    assert_eq!(store.exported().await, exported);
    store.fill(100..101).await;
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts.len(), 101);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicting_sealed_documents_gives_their_space_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 25_000,
        tenant_tokens_max: 25_000,
        ..sealing(dir.path())
    };
    let store = Store::start(config.clone()).await;
    let mut follower = Follower::default();
    for part in 0..6u128 {
        store.fill(part * 50..part * 50 + 50).await;
        follower.catch_up(&store, "a").await;
        let texts: Vec<_> = follower.texts.keys().copied().collect();
        assert_eq!(texts, (part * 50..part * 50 + 50).collect::<Vec<_>>());
        store.sealed(|stats| stats.segment_bytes > 25_000 * 6).await;
    }
    // 25,000 live tokens at nine bytes each. A quarter of them may be removed and not given back yet.
    let stats = store
        .sealed(|stats| stats.segment_bytes < 25_000 * 9 * 4 / 3 + 10_000)
        .await;
    assert_eq!((stats.documents, stats.evicted_documents), (50, 250));
    assert_eq!(follower.resets, 1);
    store.stop().await;
    let store = Store::start(config).await;
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a").await;
    assert_eq!(fresh.texts, follower.texts);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compacting_removes_gone_documents_from_segments_and_log() {
    let dir = tempfile::tempdir().unwrap();
    let config = DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 50_000,
        ..sealing(dir.path())
    };
    let store = Store::start(config).await;
    store.fill(0..100).await;
    store.handle().compact().await.unwrap();
    // Too few to make the store rewrite a segment on its own.
    store.fill(100..110).await;
    store.handle().compact().await.unwrap();
    // Nothing is left of the ten that were evicted. Documents that ended before the last of them came may have been
    // sealed separately, and then as many stay in the log as do not fill a file.
    let namespace = store.sign("a");
    let request = SegmentsRequest { namespace };
    let listed = store.handle().segments(request).await.unwrap();
    assert!(listed.segments.iter().all(|info| info.masked.is_empty()));
    assert!(listed.unsealed.len() <= 2, "{:?}", listed.unsealed);
    let stats = store.handle().stats().await.unwrap();
    assert_eq!((stats.documents, stats.evicted_documents), (100, 10));
    let tokens = (100 - listed.unsealed.len() as u64) * 516;
    assert!((8 * tokens..9 * tokens).contains(&stats.segment_bytes));
    let verified = store.handle().verify().await.unwrap();
    assert_eq!(verified.documents, 100);
    store.stop().await;
}

#[tokio::test]
async fn small_namespaces_are_sealed_by_age_and_for_space() {
    let dir = tempfile::tempdir().unwrap();
    let base = DraftStoreConfig {
        seal_tokens: 1 << 20,
        ..sealing(dir.path())
    };
    let store = Store::start(DraftStoreConfig {
        tuning: StoreTuning {
            unsealed_tokens_max: 4_000,
            ..base.tuning.clone()
        },
        ..base.clone()
    })
    .await;
    store.fill(0..8).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(store.handle().stats().await.unwrap().segment_bytes, 0);
    store.fill(8..9).await;
    store
        .sealed(|stats| stats.segment_bytes > 9 * 500 * 8)
        .await;
    store.fill(9..12).await;
    assert_eq!(store.metric("refrain_draft_store_unsealed_tokens"), 1_500.0);
    store.stop().await;
    // Old enough at the first check.
    let store = Store::start(DraftStoreConfig {
        tuning: StoreTuning {
            seal_age_s: 0,
            ..base.tuning
        },
        ..base
    })
    .await;
    store
        .sealed(|stats| stats.segment_bytes > 12 * 500 * 8)
        .await;
    assert_eq!(store.exported().await.len(), 12);
    store.stop().await;
}

#[tokio::test]
async fn verify_names_the_damaged_segment() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        tuning: StoreTuning {
            segments_max: 100,
            ..tuning()
        },
        ..sealing(dir.path())
    })
    .await;
    store.fill(0..40).await;
    store.sealed(|stats| stats.segment_bytes > 100_000).await;
    store.stop().await;
    let segments = dir.path().join("data/segments");
    let files: Vec<_> = std::fs::read_dir(&segments).unwrap().flatten().collect();
    let sound = ClosedStore::open(dir.path().join("data")).unwrap();
    assert_eq!(sound.verify().await.unwrap().documents, 40);
    let stats = sound.store_stats().await.unwrap();
    let lens = files.iter().map(|file| file.metadata().unwrap().len());
    assert_eq!(stats.segment_bytes, lens.sum::<u64>());
    // While it is open: the map shows what is written to the file.
    let path = files[0].path();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[400] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let found = sound.verify().await.unwrap();
    assert_eq!(found.damaged, 1, "{found:?}");
    assert!(found.damage[0].what.starts_with("segment "), "{found:?}");
}
