//! Damaged directories: into quarantine, and on with what can be read.

use super::*;
use refrain_clients::StoreAdmin as _;
use refrain_draft_store::ClosedStore;
use std::fs;

fn quarantined(dir: &Path) -> usize {
    fs::read_dir(dir.join("data"))
        .unwrap()
        .filter(|entry| {
            entry
                .as_ref()
                .unwrap()
                .file_name()
                .to_string_lossy()
                .starts_with("quarantine-")
        })
        .count()
}

/// A stopped store with some documents, and a follower that has them all.
async fn filled(dir: &Path) -> Follower {
    let store = Store::start(config(dir)).await;
    for document in 0..40 {
        let tokens: Vec<u32> = (0..700).map(|at| at * 7 % 1000 + document as u32).collect();
        store
            .append("a", vec![finished(update(document, 0, &tokens))])
            .await
            .unwrap();
    }
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    store.stop().await;
    follower
}

/// Starts after damage: it must start, and its follower must end with what the store has.
async fn recovers(dir: &Path, follower: &mut Follower) -> (usize, f64) {
    let store = Store::start(config(dir)).await;
    store
        .append("a", vec![update(99, 0, &[1, 2, 3])])
        .await
        .unwrap();
    follower.catch_up(&store, "a").await;
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a").await;
    assert!(
        fresh.texts == follower.texts,
        "{} against {}",
        fresh.texts.len(),
        follower.texts.len()
    );
    assert_eq!(follower.texts[&99], [1, 2, 3]);
    let quarantines = store.metric("refrain_draft_store_quarantines_total");
    store.stop().await;
    let store = Store::start(config(dir)).await;
    let resets = follower.resets;
    follower.catch_up(&store, "a").await;
    assert_eq!(
        resets, follower.resets,
        "the second start is an ordinary one"
    );
    store.stop().await;
    (follower.texts.len() - 1, quarantines)
}

#[tokio::test]
async fn an_emptied_log_is_noticed_by_its_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let mut follower = filled(dir.path()).await;
    fs::remove_dir_all(dir.path().join("data/log")).unwrap();
    let (left, quarantines) = recovers(dir.path(), &mut follower).await;
    assert_eq!((left, quarantines, quarantined(dir.path())), (0, 1.0, 1));
    assert_eq!(follower.resets, 2, "a new generation");
}

#[tokio::test]
async fn damaged_sled_files_never_stop_the_start() {
    for case in ["truncated", "zeroed", "flipped", "conf"] {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = filled(dir.path()).await;
        let path = dir.path().join("data/log/db");
        let mut bytes = fs::read(&path).unwrap();
        let len = bytes.len();
        match case {
            "truncated" => bytes.truncate(len / 3),
            "zeroed" => bytes[..len / 2].fill(0),
            "flipped" => {
                for at in (0..len).step_by(997) {
                    bytes[at] ^= 0x55;
                }
            }
            _ => fs::write(dir.path().join("data/log/conf"), b"nonsense").unwrap(),
        }
        fs::write(&path, &bytes).unwrap();
        let (left, quarantines) = recovers(dir.path(), &mut follower).await;
        println!("{case}: {left} documents left, {quarantines} quarantines");
    }
}

#[tokio::test]
async fn a_log_without_its_identity_is_salvaged() {
    let dir = tempfile::tempdir().unwrap();
    let mut follower = filled(dir.path()).await;
    let db = sled::open(dir.path().join("data/log")).unwrap();
    db.remove(b"m").unwrap();
    db.flush().unwrap();
    drop(db);
    let (left, quarantines) = recovers(dir.path(), &mut follower).await;
    assert_eq!((left, quarantines, quarantined(dir.path())), (40, 1.0, 1));
    assert_eq!(follower.resets, 2);
}

#[tokio::test]
async fn a_flipped_bit_costs_one_document() {
    let dir = tempfile::tempdir().unwrap();
    let mut follower = filled(dir.path()).await;
    let db = sled::open(dir.path().join("data/log")).unwrap();
    let (key, value) = db.scan_prefix(b"p").next().unwrap().unwrap();
    let mut value = value.to_vec();
    value[30] ^= 1;
    db.insert(key, value).unwrap();
    let (key, value) = db.scan_prefix(b"d").last().unwrap().unwrap();
    let mut value = value.to_vec();
    value[30] ^= 1;
    db.insert(key, value).unwrap();
    db.flush().unwrap();
    drop(db);
    let store = Store::start(config(dir.path())).await;
    // A reader meets the damaged piece; the writer then removes its document.
    let mut fresh = Follower::default();
    for _ in 0..500 {
        fresh.catch_up(&store, "a").await;
        follower.catch_up(&store, "a").await;
        if store.handle().stats().await.unwrap().documents == 38 && follower.texts.len() == 38 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(follower.texts.len(), 38);
    assert_eq!(fresh.texts, follower.texts);
    assert_eq!(follower.resets, 1);
    assert_eq!(
        store.metric("refrain_draft_store_damaged_records_total"),
        2.0
    );
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
    store.stop().await;
}

#[tokio::test]
async fn verify_names_what_is_damaged_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path()).await;
    let data = dir.path().join("data");
    let sound = ClosedStore::open(data.clone()).unwrap().verify().await;
    let sound = sound.unwrap();
    assert_eq!(
        (sound.documents, sound.tokens, sound.damaged),
        (40, 28_000, 0)
    );
    assert!(sound.records > 120 && sound.damage.is_empty());
    let db = sled::open(data.join("log")).unwrap();
    let (key, value) = db.scan_prefix(b"p").next().unwrap().unwrap();
    let mut value = value.to_vec();
    value[30] ^= 1;
    db.insert(key, value).unwrap();
    db.flush().unwrap();
    drop(db);
    for _ in 0..2 {
        let store = ClosedStore::open(data.clone()).unwrap();
        let found = store.verify().await.unwrap();
        // The piece, and the document that cannot be read whole.
        assert_eq!((found.documents, found.damaged), (39, 2));
        let [piece, document] = &found.damage[..] else {
            panic!("{:?}", found.damage)
        };
        assert!(
            piece
                .what
                .starts_with("piece record at token 0 of document")
        );
        assert!(piece.what.ends_with(&document.what));
        assert_eq!(piece.why, "checksum differs");
    }
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.handle().verify().await.unwrap().documents, 39);
    store.stop().await;
    assert!(ClosedStore::open(dir.path().join("none")).is_err());
    assert!(!dir.path().join("none").exists());
}

#[tokio::test]
async fn a_directory_in_use_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let error = Store::try_start(config(dir.path())).await.err().unwrap();
    assert!(format!("{error:#}").contains("lock"), "{error:#}");
    assert_eq!(quarantined(dir.path()), 0);
    store.append("a", vec![update(1, 0, &[1])]).await.unwrap();
    store.stop().await;
}
