//! The log gives space back while the store serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_clients::StoreAdmin as _;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn churn_takes_its_documents_a_few_times_over_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let store = Store::start(DraftStoreConfig {
        document_tokens_max: 1_000,
        tokens_max: 1_000_000,
        tenant_tokens_max: 1_000_000,
        rewrite_bytes_min: 1 << 20,
        ..config(dir.path())
    })
    .await;
    let done = Arc::new(AtomicBool::new(false));
    let (watched, over) = (data.clone(), done.clone());
    let peak = std::thread::spawn(move || {
        let mut peak = 0;
        while !over.load(Ordering::Relaxed) {
            peak = peak.max(disk_bytes(&watched));
            std::thread::sleep(Duration::from_millis(2));
        }
        peak
    });
    // Twelve times what the store may keep.
    for call in 0..240u128 {
        let updates = (0..50)
            .map(|lane| {
                let document = call * 50 + lane;
                finished(update(document, 0, &noise(document, 1_000)))
            })
            .collect();
        store.append("a", updates).await.unwrap();
    }
    done.store(true, Ordering::Relaxed);
    let peak = peak.join().unwrap();
    let stats = store.handle().stats().await.unwrap();
    assert!(stats.documents <= 1_000 && stats.evicted_documents >= 11_000);
    let rewrites = store.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}");
    assert!(rewrites >= 2.0, "{rewrites}");
    // What the same documents take when freshly written: for a log this small that differs by a third.
    let mut fresh = 0;
    for _ in 0..5 {
        fresh = fresh.max(store.handle().compact().await.unwrap().after_bytes);
    }
    // Twice for the log and once for its copy; and what is appended while it is copied stands in both. Here
    // that is as much as the disk takes. Without rewrites it were twelve times.
    assert!(
        peak <= 5 * fresh,
        "{peak} bytes at the peak, {fresh} freshly written"
    );
    assert!(store.metric("refrain_draft_store_reclaimed_bytes_total") > fresh as f64);
    assert!(disk_bytes(&data) <= fresh + fresh / 2);
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts.len() as u64, stats.documents);
    for (document, text) in &follower.texts {
        assert_eq!(*text, noise(*document, 1_000));
    }
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demanded_rewrite_keeps_everything_and_a_close_ends_one() {
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
    store.stop().await;
    let _ = cut_off.await.unwrap();
    let store = Store::start(config(dir.path())).await;
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a").await;
    assert_eq!(fresh.texts, follower.texts);
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
    store.stop().await;
}
