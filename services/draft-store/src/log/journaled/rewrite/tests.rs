//! Rewrites with a store that goes on meanwhile, interrupted at every step.

use super::*;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::log::RecordLog;
use crate::tests::test_store::{TOKENS, TestStore, copy_directory, key};

/// Appends to a document that does not end.
fn append(store: &TestStore, document: u128, len: u32) {
    store.append("a", document, len, None);
}

/// Opens a store in which nothing may be damaged.
fn open_sound(dir: &Path, expected: BTreeMap<u128, u32>) -> TestStore {
    let store = TestStore::open(dir, expected);
    assert_eq!((store.damaged, &store.quarantined), (0, &None));
    store
}

fn log_of(store: &TestStore) -> Arc<dyn RecordLog> {
    store.shared.read().unwrap().log.clone()
}

fn rewrite(
    store: &TestStore,
    at: impl Fn(RewriteStep) -> Result<(), LogError>,
) -> Result<RewriteReport, LogError> {
    log_of(store).rewrite(&AtomicBool::new(false), &at)
}

fn filled(dir: &Path) -> TestStore {
    let store = open_sound(dir, BTreeMap::new());
    for document in 0..100 {
        append(&store, document, TOKENS);
    }
    for document in 0..20 {
        store.remove(document * 5);
    }
    store
}

/// Changes documents before and after the position of the copy.
fn change(store: &TestStore, round: u32) {
    let at = u128::from(round);
    append(store, 1 + at * 5, TOKENS + 50 + round);
    append(store, 200 + at, 40);
    let victim = 97 - at * 5;
    if store.expected.borrow().contains_key(&victim) {
        store.remove(victim);
    }
}

/// Names in the directory of the log, apart from the lock.
fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join("log")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Whether there is one journal with its catalogue, and no leftover.
fn is_tidy(dir: &Path) -> bool {
    let names = files(dir);
    names.len() == 2 && names[0].starts_with("catalog-") && names[1] == "journal"
}

#[test]
fn writes_during_a_rewrite_are_in_the_new_files() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let before = files(dir.path());
    let rounds = RefCell::new(0);
    let done = rewrite(&store, |step| {
        if step == RewriteStep::Created || step == RewriteStep::Copying && *rounds.borrow() < 10 {
            change(&store, *rounds.borrow());
            *rounds.borrow_mut() += 1;
        }
        Ok(())
    })
    .unwrap();
    assert!(*rounds.borrow() >= 2);
    assert!(done.after_bytes < done.before_bytes, "{done:?}");
    assert!(is_tidy(dir.path()) && files(dir.path()) != before);
    store.check();
    append(&store, 300, 10);
    let expected = store.expected.take();
    drop(store);
    open_sound(dir.path(), expected).check();
}

/// A commit between any two records of the copy.
#[test]
fn a_copy_in_the_smallest_steps_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let log = log_of(&store);
    let (mut from, mut records) = (vec![0], 0);
    // A step ends where the next one begins, across records in memory and in the catalogue.
    loop {
        let mut last = None;
        log.scan(&from, &[u8::MAX], &mut |key, _| {
            last = Some(key.to_vec());
            false
        })
        .unwrap();
        let Some(key) = last else { break };
        records += 1;
        from = [&key[..], &[0]].concat();
    }
    let mut all = 0;
    log.scan(&[0], &[u8::MAX], &mut |_, _| {
        all += 1;
        true
    })
    .unwrap();
    assert_eq!(records, all);
    assert!(all > 240, "{all}");
}

#[test]
fn after_an_interruption_anywhere_the_store_has_everything_acknowledged() {
    for broken in [
        RewriteStep::Created,
        RewriteStep::Copying,
        RewriteStep::Copied,
        RewriteStep::Swapped,
        RewriteStep::Deleted,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path());
        let killed = tempfile::tempdir().unwrap();
        let round = RefCell::new(0);
        let expected_then = RefCell::new(BTreeMap::new());
        let outcome = rewrite(&store, |step| {
            if *round.borrow() < 10 {
                change(&store, *round.borrow());
                *round.borrow_mut() += 1;
            }
            if step == broken {
                // As the disk is if the process ends here.
                copy_directory(dir.path(), killed.path());
                expected_then
                    .borrow_mut()
                    .clone_from(&store.expected.borrow());
                return Err(LogError::Refused("broken off".into()));
            }
            Ok(())
        });
        assert!(outcome.is_err());
        let reopened = open_sound(killed.path(), expected_then.take());
        reopened.check();
        assert!(
            is_tidy(killed.path()),
            "{broken:?}: {:?}",
            files(killed.path())
        );
        drop(reopened);
        // The store itself goes on, leaves nothing behind, and its next rewrite succeeds.
        assert!(is_tidy(dir.path()), "{broken:?}: {:?}", files(dir.path()));
        append(&store, 400, 10);
        rewrite(&store, |_| Ok(())).unwrap();
        store.check();
        let expected = store.expected.take();
        drop(store);
        open_sound(dir.path(), expected).check();
    }
}

#[test]
fn a_rewrite_that_is_stopped_costs_no_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let stopped = AtomicBool::new(true);
    let outcome = log_of(&store).rewrite(&stopped, &|_| Ok(()));
    assert!(matches!(outcome, Err(LogError::Refused(_))));
    assert!(is_tidy(dir.path()), "nothing is left");
    append(&store, 400, 10);
    store.check();
}

#[test]
fn what_is_left_of_documents_is_removed_when_the_store_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let orphan = crate::record::piece_key(key("a", 5_000), 0);
    let mut batch = Batch::default();
    batch.put(orphan.clone(), b"left by a salvage".to_vec());
    log_of(&store).commit(&batch).unwrap();
    let expected = store.expected.take();
    drop(store);
    let store = open_sound(dir.path(), expected);
    assert_eq!(log_of(&store).get(&orphan).unwrap(), None);
    store.check();
}
