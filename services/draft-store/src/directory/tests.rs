//! Directories with several logs, interrupted creations, and old manifests.

use std::path::Path;

use refrain_protocol::{Namespace, NamespaceId};

use crate::catalog::Catalog;
use crate::codec;
use crate::directory::inspect::inspect;
use crate::directory::lock::DirectoryLock;
use crate::directory::manifest::Manifest;
use crate::directory::open::open;
use crate::directory::paths::{log_numbers, log_path};
use crate::log::journaled::JournaledLog;
use crate::log::{Batch, LogError};
use crate::record::{NamespaceRecord, RecordKind, StoreRecord, namespace_key};

const CACHE_BYTES: u64 = 4 << 20;

/// Makes a closed store with `count` records.
fn filled(dir: &Path, count: u128) -> StoreRecord {
    let opened = open(dir, CACHE_BYTES, 1).unwrap();
    let mut batch = Batch::default();
    for id in 0..count {
        let key = namespace_key(RecordKind::Namespace, NamespaceId(id));
        let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
        let value = codec::seal(
            &key,
            &NamespaceRecord(Namespace {
                tenant,
                model,
                tokenizer,
            }),
        );
        batch.put(key, value);
    }
    opened.log.commit(&batch).unwrap();
    opened.store
}

#[test]
fn the_manifest_names_the_log_in_use_among_several() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path(), 10);
    let copied = |from: u64, to: u64| {
        std::fs::create_dir(log_path(dir.path(), to)).unwrap();
        for file in std::fs::read_dir(log_path(dir.path(), from)).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                let target = log_path(dir.path(), to).join(file.file_name());
                std::fs::copy(file.path(), target).unwrap();
            }
        }
    };
    // A rewrite was interrupted before its log was named.
    std::fs::create_dir(log_path(dir.path(), 1)).unwrap();
    let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
    assert_eq!((opened.store, opened.number), (store, 0));
    assert_eq!(log_numbers(dir.path()).unwrap(), [0]);
    drop(opened);
    // A complete rewrite without its manifest. A third log has no identity yet.
    copied(0, 2);
    std::fs::create_dir(log_path(dir.path(), 3)).unwrap();
    std::fs::remove_file(dir.path().join("manifest.json")).unwrap();
    let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
    assert_eq!((opened.store, opened.number), (store, 2));
    assert_eq!(opened.quarantined, None);
    assert_eq!(log_numbers(dir.path()).unwrap(), [2]);
}

#[test]
fn a_store_interrupted_during_its_creation_counts_as_empty() {
    let dir = tempfile::tempdir().unwrap();
    let inspected = |was_begun| inspect(dir.path(), CACHE_BYTES, was_begun);
    assert!(matches!(inspected(false), Err(LogError::Refused(_))));
    let empty = inspected(true).unwrap();
    assert_eq!(empty.loaded.catalog.totals().documents, 0);
    drop(empty);
    // Inspecting it writes nothing.
    assert!(matches!(inspected(false), Err(LogError::Refused(_))));
    // The log was created, but no identity was written.
    drop(JournaledLog::open(&log_path(dir.path(), 0), CACHE_BYTES).unwrap());
    assert!(inspected(false).is_ok());
    let store = filled(dir.path(), 1);
    assert_eq!(inspected(false).unwrap().store, store);
}

#[test]
fn a_directory_is_locked_once() {
    let dir = tempfile::tempdir().unwrap();
    let held = DirectoryLock::acquire(dir.path()).unwrap();
    assert!(matches!(
        DirectoryLock::acquire(dir.path()),
        Err(LogError::Refused(_))
    ));
    // One that is given back meanwhile is waited for.
    let ends = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(held);
    });
    assert!(DirectoryLock::acquire(dir.path()).is_ok());
    ends.join().unwrap();
}

#[test]
fn a_log_behind_its_manifest_gets_a_new_generation() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path(), 1);
    let catalog = Catalog::new(store.generation, 5);
    Manifest::new(0, store, &catalog, false)
        .write(dir.path())
        .unwrap();
    let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
    assert_ne!(opened.store.generation, store.generation);
    assert_eq!(opened.quarantined, None);
    let again = opened.store;
    drop(opened);
    assert_eq!(open(dir.path(), CACHE_BYTES, 3).unwrap().store, again);
}
