//! Rewrites with a store that goes on meanwhile, interrupted at every step.

use super::*;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use crate::directory::log_numbers;
use crate::tests::test_store::{CACHE_BYTES, TOKENS, TestStore, key};

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

fn plan(store: &TestStore) -> RewriteJob {
    RewriteJob {
        dir: store.dir.clone(),
        from: *store.number.lock().unwrap(),
        cache_bytes: CACHE_BYTES,
        step: Duration::ZERO,
        stop: Arc::default(),
    }
}

impl RewriteHost for TestStore {
    fn mirror(&self, to: Arc<dyn RecordLog>) -> Result<Arc<dyn RecordLog>, LogError> {
        Ok(self.core.lock().unwrap().begin_mirror(to))
    }

    fn swap(&self, number: u64) -> Result<u64, LogError> {
        let mut open = self.shared.write();
        let open = open.as_mut().unwrap();
        let mut core = self.core.lock().unwrap();
        let log = core.complete_mirror()?;
        Manifest::new(number, core.store, &open.catalog, false).write(&self.dir)?;
        core.end_mirror(Some(log.clone()));
        open.log = log;
        *self.number.lock().unwrap() = number;
        Ok(core.mirrored_bytes)
    }
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

#[test]
fn writes_during_a_rewrite_are_in_the_new_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let rounds = RefCell::new(0);
    let done = run(&plan(&store), &store.shared, &store, &|step| {
        if step == RewriteStep::Copying && *rounds.borrow() < 10 {
            change(&store, *rounds.borrow());
            *rounds.borrow_mut() += 1;
        }
        Ok(())
    })
    .unwrap();
    assert!(*rounds.borrow() > 3, "a copy of several steps");
    assert!(done.after_bytes < done.before_bytes);
    store.check();
    append(&store, 300, 10);
    let expected = store.expected.take();
    drop(store);
    assert_eq!(log_numbers(dir.path()).unwrap(), [1]);
    open_sound(dir.path(), expected).check();
}

#[test]
fn after_an_interruption_anywhere_the_store_has_everything_acknowledged() {
    for broken in [
        RewriteStep::Created,
        RewriteStep::Mirrored,
        RewriteStep::Copying,
        RewriteStep::Copied,
        RewriteStep::Swapped,
        RewriteStep::Deleted,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path());
        let round = RefCell::new(0);
        let outcome = run(&plan(&store), &store.shared, &store, &|step| {
            if *round.borrow() < 10 {
                change(&store, *round.borrow());
                *round.borrow_mut() += 1;
            }
            if step == broken {
                return Err(LogError::Refused("broken off".into()));
            }
            Ok(())
        });
        assert!(outcome.is_err());
        // The process ends before it could clean up.
        let expected = store.expected.take();
        drop(store);
        std::fs::write(dir.path().join("manifest.json.new"), b"{").unwrap();
        let store = open_sound(dir.path(), expected);
        store.check();
        let number = *store.number.lock().unwrap();
        let swapped = matches!(broken, RewriteStep::Swapped | RewriteStep::Deleted);
        assert_eq!(number, u64::from(swapped), "{broken:?}");
        assert_eq!(log_numbers(dir.path()).unwrap(), [number], "{broken:?}");
        // The next rewrite succeeds.
        rewrite(&plan(&store), &store.shared, &store).unwrap();
        store.check();
    }
}

#[test]
fn a_failing_mirror_costs_the_rewrite_and_no_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let plan = plan(&store);
    let outcome = run(&plan, &store.shared, &store, &|step| {
        if step == RewriteStep::Copied {
            store.core.lock().unwrap().end_mirror(None);
        }
        Ok(())
    });
    assert!(matches!(outcome, Err(LogError::Refused(_))));
    plan.stop.store(true, Ordering::Relaxed);
    assert!(rewrite(&plan, &store.shared, &store).is_err());
    assert_eq!(log_numbers(dir.path()).unwrap(), [0], "nothing is left");
    append(&store, 400, 10);
    store.check();
}

#[test]
fn records_without_a_document_are_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let orphan = crate::record::piece_key(key("a", 5_000), 0);
    let mut batch = Batch::default();
    batch.put(orphan.clone(), b"left by a salvage".to_vec());
    let log = store.shared.read().unwrap().log.clone();
    log.commit(&batch).unwrap();
    drop(log);
    rewrite(&plan(&store), &store.shared, &store).unwrap();
    let log = store.shared.read().unwrap().log.clone();
    assert_eq!(log.get(&orphan).unwrap(), None);
    store.check();
}

#[test]
fn a_rewrite_is_due_when_the_log_outgrew_a_fresh_one() {
    let due = |log_bytes: u64, live_bytes, held_bytes| {
        let sizes = LogSizes {
            log_bytes: log_bytes + 500,
            live_bytes,
            empty_bytes: 500,
            overhead: 1.5,
            held_bytes,
        };
        is_due(sizes, 2, 1_000)
    };
    assert!(due(3_001, 1_000, 1_000_000));
    assert!(!due(3_000, 1_000, 1_000_000));
    assert!(!due(500, 0, 0), "small ones are left alone");
    assert!(due(501, 0, 0));
    // The store holds little besides the log: wasting half of the copy is enough.
    assert!(due(15_001, 10_000 * 2 / 3, 8_000));
    assert!(!due(14_000, 10_000 * 2 / 3, 8_000));
    assert!(
        !due(15_001, 10_000 * 2 / 3, 48_000),
        "an eighth of what is held"
    );
    assert!(due(16_100, 10_000 * 2 / 3, 48_000));
}
