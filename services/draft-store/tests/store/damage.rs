//! Damaged directories: they move to quarantine, and the store goes on with what can be read.

use super::files::copy;
use super::logs::{catalog, make_earlier, open_sled};
use super::*;
use refrain_draft_store::ClosedStore;
use refrain_rpc::StoreAdmin as _;
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

/// Makes a stopped store with some documents, and a follower that has them all.
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

/// Starts after damage. The start must succeed, and the follower must end with what the store has.
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
        let catalog = catalog(&dir.path().join("data/log"));
        let path = catalog.join("db");
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
            _ => fs::write(catalog.join("conf"), b"nonsense").unwrap(),
        }
        fs::write(&path, &bytes).unwrap();
        let (left, quarantines) = recovers(dir.path(), &mut follower).await;
        assert_eq!((left, quarantines), (40, 0.0), "{case}");
    }
}

#[tokio::test]
async fn a_log_of_an_earlier_version_without_its_identity_is_salvaged_and_its_quarantine_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let mut follower = filled(dir.path()).await;
    make_earlier(&dir.path().join("data/log"), false);
    let db = open_sled(&dir.path().join("data/log"));
    db.remove(b"m").unwrap();
    db.flush().unwrap();
    drop(db);
    let (left, quarantines) = recovers(dir.path(), &mut follower).await;
    assert_eq!((left, quarantines, quarantined(dir.path())), (40, 1.0, 1));
    assert_eq!(follower.resets, 2);
    // Everything in it was salvaged, so an erasure deletes it.
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.handle().verify().await.unwrap().quarantines, 0);
    let other = refrain_protocol::admin::EraseRequest {
        tenant: Some("b".into()),
        ..Default::default()
    };
    let reply = store.handle().erase(other).await.unwrap();
    assert_eq!((reply.quarantines, reply.quarantines_kept), (1, 0));
    store.stop().await;
}

#[tokio::test]
async fn the_journal_restores_what_the_catalogue_misreads() {
    let dir = tempfile::tempdir().unwrap();
    let mut follower = filled(dir.path()).await;
    let db = open_sled(&catalog(&dir.path().join("data/log")));
    let (key, value) = db.scan_prefix(b"n").next().unwrap().unwrap();
    let mut value = value.to_vec();
    value[30] ^= 1;
    db.insert(key, value).unwrap();
    db.remove(b"m").unwrap();
    db.flush().unwrap();
    drop(db);
    let (left, quarantines) = recovers(dir.path(), &mut follower).await;
    assert_eq!((left, quarantines, follower.resets), (40, 0.0, 1));
}

/// Tenants, keys and usage are in no segment, so the journal alone restores them.
#[tokio::test]
async fn what_no_segment_has_outlives_the_loss_of_the_catalogue() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(sealing(dir.path())).await;
    let tokens = rewrite::noise(1, 5_000);
    let all = store.append("a", vec![finished(update(1, 0, &tokens))]);
    all.await.unwrap();
    let erased = refrain_protocol::admin::EraseRequest {
        tenant: Some("b".into()),
        ..Default::default()
    };
    store.handle().erase(erased).await.unwrap();
    eventually(async || store.metric("refrain_draft_store_segments") == 1.0).await;
    store.handle().compact().await.unwrap();
    assert_eq!(store.metric("refrain_draft_store_erasures"), 1.0);
    store.stop().await;
    fs::remove_dir_all(catalog(&dir.path().join("data/log"))).unwrap();
    let store = Store::start(sealing(dir.path())).await;
    assert_eq!(store.metric("refrain_draft_store_erasures"), 1.0);
    assert_eq!(store.metric("refrain_draft_store_segments"), 1.0);
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts[&1], tokens);
    store.stop().await;
}

/// A log of an earlier version is opened in place, once, and has its text in the journal alone afterwards.
#[tokio::test]
async fn a_log_of_an_earlier_version_is_opened_in_place() {
    for (is_indexed, is_damaged) in [(true, false), (true, true), (false, false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = filled(dir.path()).await;
        let log = dir.path().join("data/log");
        make_earlier(&log, is_indexed);
        if is_damaged {
            let mut bytes = fs::read(log.join("journal")).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(log.join("journal"), bytes).unwrap();
        }
        let (left, quarantines) = recovers(dir.path(), &mut follower).await;
        assert_eq!((left, quarantines, follower.resets), (40, 0.0, 1));
        assert!(!log.join("db").exists());
        let db = open_sled(&catalog(&log));
        for kind in [b"d", b"h", b"p"] {
            assert!(db.scan_prefix(kind).next().is_none());
        }
    }
}

/// A text that was overwritten: half of that commit must not be taken for all of it.
#[tokio::test]
async fn a_text_is_never_mixed_from_two_commits() {
    let pristine = tempfile::tempdir().unwrap();
    let store = Store::start(config(pristine.path())).await;
    let text = |epoch: u32, document: u128| vec![epoch * 1_000 + document as u32; 300];
    for epoch in 1..3 {
        // All updates are in one commit.
        let all = (0..20).map(|document| {
            let mut sent = finished(update(document, 0, &text(epoch, document)));
            sent.epoch = u64::from(epoch);
            sent
        });
        store.append("a", all.collect()).await.unwrap();
    }
    store.stop().await;
    let journal = fs::read(pristine.path().join("data/log/journal")).unwrap();
    let records: Vec<usize> = journal
        .windows(4)
        .enumerate()
        .filter(|(_, window)| *window == b"RfJ\x01")
        .map(|(at, _)| at)
        .collect();
    let mut left = BTreeMap::new();
    for record in records.into_iter().skip(2).step_by(3) {
        let dir = tempfile::tempdir().unwrap();
        copy(pristine.path(), dir.path());
        spoil_log(dir.path(), record + 10);
        let store = Store::start(config(dir.path())).await;
        let mut follower = Follower::default();
        for _ in 0..12_000 {
            follower = Follower::default();
            if follower.try_catch_up(&store, "a").await.is_ok()
                && store.handle().observe().stats.documents == follower.texts.len() as u64
            {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for (document, tokens) in &follower.texts {
            let is_of_one = (1..3).any(|epoch| *tokens == text(epoch, *document));
            assert!(
                is_of_one,
                "record at {record}: document {document} is mixed"
            );
        }
        // The records beside the damaged one are in doubt, too.
        assert!(follower.texts.len() >= 17, "{}", follower.texts.len());
        *left.entry(follower.texts.len()).or_insert(0) += 1;
        store.stop().await;
    }
    assert!(left.len() > 1, "{left:?}");
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
    let journal = data.join("log/journal");
    let mut bytes = fs::read(&journal).unwrap();
    let piece = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, window)| window[..3] == *b"RfJ")
        .map(|(at, _)| at)
        .find(|at| bytes[at + 24] == b'p')
        .unwrap();
    bytes[piece + 100] ^= 1;
    fs::write(&journal, &bytes).unwrap();
    let listed = |dir: &Path| {
        let mut files: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (
                    entry.file_name(),
                    entry.metadata().unwrap().modified().unwrap(),
                )
            })
            .collect();
        files.sort();
        files
    };
    let before = (listed(&data), listed(&data.join("log")));
    for _ in 0..2 {
        let store = ClosedStore::open(data.clone()).unwrap();
        let found = store.verify().await.unwrap();
        // The damaged position in the journal is reported; the document that was there is left out.
        assert_eq!((found.documents, found.damaged), (39, 1));
        let [place] = &found.damage[..] else {
            panic!("{:?}", found.damage)
        };
        assert!(
            place.what.starts_with(&format!("bytes {piece} to ")),
            "{}",
            place.what
        );
    }
    assert_eq!((listed(&data), listed(&data.join("log"))), before);
    // A start goes on without that document, and keeps the damaged log.
    let store = Store::start(config(dir.path())).await;
    let documents = async || {
        store
            .handle()
            .verify()
            .await
            .map_or(0, |found| found.documents)
    };
    eventually(async || documents().await == 39 && quarantined(dir.path()) == 1).await;
    store.stop().await;
    let sound = ClosedStore::open(data).unwrap().verify().await.unwrap();
    assert_eq!((sound.documents, sound.damaged), (39, 0));
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
