//! The log gives space back while the store serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::ErrorKind;
use refrain_rpc::StoreAdmin as _;

use super::*;

fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => disk_bytes(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Bytes of all logs: the one in use, and the one in the making.
fn log_bytes(data: &Path) -> u64 {
    let entries = std::fs::read_dir(data).into_iter().flatten().flatten();
    let logs = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("log"));
    logs.map(|entry| disk_bytes(&entry.path())).sum()
}

/// Tokens that do not compress.
pub(super) fn noise(document: u128, len: u32) -> Vec<TokenId> {
    let mut state = document as u64 + 1;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 % 50_000
        })
        .collect()
}

/// Bytes that an empty sled takes: eight of its segments of 512 KiB.
const OWN_BYTES: u64 = 4 << 20;

/// The largest sizes seen on disk.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    logs: u64,
    segments: u64,
    /// The largest segment that ever existed.
    largest_segment: u64,
}

impl Peak {
    fn bytes(&self) -> u64 {
        self.logs + self.segments
    }

    fn look(&mut self, data: &Path) {
        let segments = data.join("segments");
        let files = std::fs::read_dir(&segments).into_iter().flatten().flatten();
        let lens: Vec<u64> = files
            .filter_map(|file| Some(file.metadata().ok()?.len()))
            .collect();
        let seen = Peak {
            logs: log_bytes(data),
            segments: lens.iter().sum(),
            largest_segment: lens
                .iter()
                .fold(self.largest_segment, |most, len| most.max(*len)),
        };
        if seen.bytes() > self.bytes() {
            *self = seen;
        }
        self.largest_segment = seen.largest_segment;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_churn_the_disk_holds_at_most_twice_the_documents_and_a_merge() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let store = Store::start(DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 2_000_000,
        tenant_tokens_max: 2_000_000,
        seal_after_s: 0,
        seal_tokens: 100_000,
        tuning: StoreTuning {
            segments_max: 4,
            segment_tokens_max: 500_000,
            rewrite_bytes_min: 1 << 20,
            ..tuning()
        },
        log_bytes_max: 6 << 20,
        ..config(dir.path())
    })
    .await;
    let done = Arc::new(AtomicBool::new(false));
    let (watched, over) = (data.clone(), done.clone());
    let peak = std::thread::spawn(move || {
        let mut peak = Peak::default();
        while !over.load(Ordering::Relaxed) {
            peak.look(&watched);
            std::thread::sleep(Duration::from_millis(2));
        }
        peak
    });
    // Six times what the store may keep.
    let mut refused = 0;
    for call in 0..240u128 {
        let updates = (0..50)
            .map(|lane| {
                let document = call * 50 + lane;
                finished(update(document, 0, &noise(document, 1_000)))
            })
            .collect::<Vec<_>>();
        // A store that lags refuses for a while.
        while let Err(error) = store.append("a", updates.clone()).await {
            assert_eq!(error.kind, ErrorKind::Overloaded);
            refused += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Some documents are used again and stay, so that segments wear unevenly.
        let used = noise(call, 20)
            .into_iter()
            .map(|at| DocumentId((call * 50).saturating_sub(u128::from(at) % 2_000)));
        let touch = TouchRequest {
            namespace: store.sign("a"),
            documents: used.collect(),
        };
        store.handle().touch(touch).await.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    let peak = peak.join().unwrap();
    let stats = store.handle().stats().await.unwrap();
    assert!(stats.documents <= 2_000 && stats.evicted_documents >= 10_000);
    let rewrites = store.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}");
    assert!(rewrites >= 2.0, "{rewrites}");
    // The size of these documents at rest.
    store.handle().compact().await.unwrap();
    let live_bytes = store.handle().stats().await.unwrap().logical_bytes;
    let most = 2 * live_bytes + peak.largest_segment + OWN_BYTES;
    assert!(
        peak.bytes() <= most,
        "{peak:?}, {live_bytes} bytes live, {refused} times refused"
    );
    assert!(disk_bytes(&data) <= live_bytes + live_bytes / 2 + OWN_BYTES);
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts.len() as u64, stats.documents);
    for (document, text) in &follower.texts {
        assert_eq!(*text, noise(*document, 1_000));
    }
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compaction_keeps_everything_and_a_close_interrupts_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let mut follower = Follower::default();
    for document in 0..300 {
        store
            .append("a", vec![update(document, 0, &noise(document, 700))])
            .await
            .unwrap();
    }
    follower.catch_up(&store, "a").await;
    // Two at once: the second begins after the first.
    let (one, two) = (store.handle(), store.handle());
    let (one, two) = tokio::join!(one.compact(), two.compact());
    assert!(one.unwrap().after_bytes > 0 && two.unwrap().after_bytes > 0);
    store
        .append("a", vec![update(0, 700, &[1, 2, 3])])
        .await
        .unwrap();
    follower.catch_up(&store, "a").await;
    assert_eq!(
        (follower.resets, follower.texts[&0].len()),
        (1, 703),
        "cursors outlive a rewrite"
    );
    let handle = store.handle();
    let cut_off = tokio::spawn(async move { handle.compact().await });
    // No grace: the close interrupts the compaction unless that has ended already.
    store.server.drain(Duration::ZERO).await;
    match cut_off.await.unwrap() {
        Ok(reply) => assert!(reply.after_bytes > 0),
        Err(error) => assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}"),
    }
    let store = Store::start(config(dir.path())).await;
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a").await;
    assert_eq!(fresh.texts, follower.texts);
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
    store.stop().await;
}

/// Documents that run cannot be sealed, and their text is in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsealed_text_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        log_bytes_max: 1 << 20,
        tuning: StoreTuning {
            rewrite_bytes_min: 1 << 20,
            ..tuning()
        },
        ..config(dir.path())
    })
    .await;
    let running = |document| update(document, 0, &noise(document, 4_000));
    let mut document = 0;
    let refused = loop {
        match store.append("a", vec![running(document)]).await {
            Ok(_) => document += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    assert!(refused.message.contains("log_bytes_max"), "{refused:?}");
    assert!(document > 40, "{document} documents");
    let everything = refrain_protocol::admin::EraseRequest {
        tenant: Some("a".into()),
        ..Default::default()
    };
    let erased = store.handle().erase(everything).await.unwrap();
    assert_eq!(u128::from(erased.documents), document);
    store.append("b", vec![running(0)]).await.unwrap();
    store.stop().await;
}
