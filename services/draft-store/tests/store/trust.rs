//! The store does not trust its clock, its directory, or that everything is there.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use refrain_draft_store::ClosedStore;
use refrain_protocol::ErrorKind;
use refrain_protocol::admin::{ConfirmRequest, EraseRequest};
use refrain_rpc::StoreAdmin as _;

use super::full_disk::SmallDisk;
use super::*;

const DAY_MS: u64 = 24 * 3_600_000;

async fn fill(store: &Store, documents: std::ops::Range<u128>) {
    for document in documents {
        let sent = finished(update(document, 0, &[document as u32 + 1; 200]));
        store.append("a", vec![sent]).await.unwrap();
    }
}

/// Makes a closed store believe that it last ran long ago. Its clock then jumps ahead.
fn age(dir: &Path, by_ms: u64) {
    let path = dir.join("data/manifest.json");
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let known_ms = manifest["known_ms"].as_u64().unwrap();
    assert!(known_ms > 1_700_000_000_000, "the manifest tells the time");
    manifest["known_ms"] = (known_ms - by_ms).into();
    fs::write(&path, manifest.to_string()).unwrap();
}

#[tokio::test]
async fn a_clock_that_jumps_ahead_evicts_nothing_until_it_is_confirmed() {
    let dir = tempfile::tempdir().unwrap();
    let retention = DraftStoreConfig {
        retention_days: 1,
        ..config(dir.path())
    };
    let store = Store::start(retention.clone()).await;
    fill(&store, 0..30).await;
    store.stop().await;
    age(dir.path(), 40 * DAY_MS);
    let store = Store::start(retention.clone()).await;
    fill(&store, 30..34).await;
    let offset = || store.metric("refrain_draft_store_clock_offset_seconds");
    eventually(async || offset() > 0.0).await;
    assert!((offset() - 40.0 * 86_400.0).abs() < 600.0, "{}", offset());
    // Some ticks later all documents are there. The new ones are 40 days younger than the old ones seem to be.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(store.handle().stats().await.unwrap().documents, 34);
    // The meaning of a time is in doubt.
    let by_time = EraseRequest {
        until_ms: Some(1),
        ..EraseRequest::default()
    };
    let refused = store.handle().erase(by_time).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    let confirm = ConfirmRequest {
        clock: true,
        ..ConfirmRequest::default()
    };
    let reply = store.handle().confirm(confirm).await.unwrap();
    assert!(
        reply
            .clock_offset_ms
            .is_some_and(|ms| ms.abs_diff(40 * DAY_MS as i64) < 600_000)
    );
    // By the confirmed time the documents of 40 days ago are too old, and those stored since are as old as they
    // seemed.
    eventually(async || store.handle().stats().await.unwrap().documents == 30).await;
    eventually(async || offset() == 0.0).await;
    assert_eq!(store.handle().stats().await.unwrap().documents, 30);
    store.stop().await;
}

#[tokio::test]
async fn a_store_that_lost_its_log_is_not_ready_until_the_loss_is_confirmed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    fill(&store, 0..40).await;
    store.stop().await;
    fs::remove_dir_all(dir.path().join("data/log")).unwrap();
    for _ in 0..2 {
        let store = Store::start(config(dir.path())).await;
        let refused = store.ready().unwrap_err();
        assert!(refused.contains("0 of 40 documents"), "{refused}");
        eventually(async || store.metric("refrain_draft_store_missing_documents") == 40.0).await;
        assert_eq!(store.metric("refrain_draft_store_missing_documents"), 40.0);
        store.stop().await;
    }
    let store = Store::start(config(dir.path())).await;
    let confirm = ConfirmRequest {
        loss: true,
        ..ConfirmRequest::default()
    };
    let reply = store.handle().confirm(confirm).await.unwrap();
    assert_eq!((reply.lost_documents, store.ready()), (Some(40), Ok(())));
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.ready(), Ok(()));
    store.stop().await;
}

#[tokio::test]
async fn a_directory_that_vanishes_ends_all_acknowledgements_and_is_not_recreated() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    fill(&store, 0..5).await;
    let (data, aside) = (dir.path().join("data"), dir.path().join("aside"));
    fs::rename(&data, &aside).unwrap();
    let sent = |document| finished(update(document, 0, &[7; 50]));
    for _ in 0..20 {
        let refused = store.append("a", vec![sent(9)]).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(store.ready().is_err() && !data.exists());
    // The store goes on when the directory comes back.
    fs::rename(&aside, &data).unwrap();
    let mut stored = store.append("a", vec![sent(10)]).await;
    for _ in 0..500 {
        if stored.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        stored = store.append("a", vec![sent(10)]).await;
    }
    stored.unwrap();
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert!(follower.texts.len() >= 6);
    fs::remove_dir_all(&data).unwrap();
    assert!(store.append("a", vec![sent(11)]).await.is_err());
    store.stop().await;
}

#[tokio::test]
async fn other_users_cannot_read_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    for mode in [None, Some(0o755)] {
        if let Some(mode) = mode {
            fs::set_permissions(&data, fs::Permissions::from_mode(mode)).unwrap();
        }
        let store = Store::start(config(dir.path())).await;
        let mode = fs::metadata(&data).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        store.stop().await;
    }
}

#[tokio::test]
async fn a_read_only_directory_can_be_verified() {
    let Some(disk) = SmallDisk::mount(30) else {
        return;
    };
    let store = Store::start(config(disk.path())).await;
    fill(&store, 0..20).await;
    store.stop().await;
    disk.make_read_only();
    let data = disk.path().join("data");
    assert!(fs::write(data.join("x"), b"x").is_err());
    let found = ClosedStore::open(data.clone())
        .unwrap()
        .verify()
        .await
        .unwrap();
    assert_eq!((found.documents, found.damaged), (20, 0));
    let refused = Store::try_start(config(disk.path())).await.err().unwrap();
    assert!(format!("{refused:#}").contains("cannot"), "{refused:#}");
}
