//! Rewrites with a store that goes on meanwhile, broken off at every step.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Mutex;

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::{DocumentId, Namespace};

use super::*;
use crate::config::DraftStoreConfig;
use crate::directory::{Opened, open};
use crate::record::DocumentKey;
use crate::text;
use crate::writer::{Append, By, Core, Removal};

const CACHE_BYTES: u64 = 4 << 20;
const TOKENS: u32 = 300;

fn names() -> Namespace {
    let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
    Namespace {
        tenant,
        model,
        tokenizer,
    }
}

fn key(document: u128) -> DocumentKey {
    DocumentKey {
        namespace: names().id(),
        document: DocumentId(document),
    }
}

fn text(document: u128, len: u32) -> Vec<u32> {
    (0..len).map(|at| at * 31 + document as u32).collect()
}

/// A store without its actor, and what it must hold: lengths by document.
struct Store {
    dir: PathBuf,
    shared: Shared,
    core: Mutex<Core>,
    number: Mutex<u64>,
    expected: RefCell<BTreeMap<u128, u32>>,
}

impl Store {
    fn open(dir: &Path, expected: BTreeMap<u128, u32>) -> Self {
        let Opened {
            log,
            number,
            store,
            loaded,
            quarantined,
        } = open(dir, CACHE_BYTES, 1).unwrap();
        assert_eq!(quarantined, None);
        assert_eq!((loaded.damaged_records, loaded.damaged.len()), (0, 0));
        let core = Core::new(
            log.clone(),
            DraftStoreConfig::default(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        let shared = Shared::default();
        shared.set_open(Some(Open {
            catalog: loaded.catalog,
            log,
        }));
        Store {
            dir: dir.to_owned(),
            shared,
            core: Mutex::new(core),
            number: Mutex::new(number),
            expected: RefCell::new(expected),
        }
    }

    fn append(&self, document: u128, len: u32) {
        let known = self.expected.borrow().get(&document).copied().unwrap_or(0);
        let update = DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: known,
            tokens: text(document, len)[known as usize..].to_vec(),
            head: DocumentHead::default(),
            finish: None,
        };
        let append = Append {
            namespace: names().id(),
            names: names(),
            updates: vec![update],
            by: By::Worker,
        };
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        self.core
            .lock()
            .unwrap()
            .take_in(catalog, &[append], &[], 1)
            .unwrap();
        self.expected.borrow_mut().insert(document, len);
    }

    fn remove(&self, document: u128) {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.remove(catalog, &[key(document)], Removal::Damage, 1)
            .unwrap();
        self.expected.borrow_mut().remove(&document);
    }

    /// Fails unless the store holds exactly what it must.
    fn check(&self) {
        let open = self.shared.read();
        let Open { catalog, log } = open.as_ref().unwrap();
        let expected = self.expected.borrow();
        assert_eq!(catalog.totals().documents, expected.len() as u64);
        for (document, len) in &*expected {
            let read = text::read(catalog, &**log, key(*document), 0, *len).unwrap();
            assert_eq!(read, text(*document, *len), "document {document}");
        }
    }

    fn plan(&self) -> Plan {
        Plan {
            dir: self.dir.clone(),
            from: *self.number.lock().unwrap(),
            cache_bytes: CACHE_BYTES,
            step: Duration::ZERO,
            stop: Arc::default(),
        }
    }
}

impl Host for Store {
    fn mirror(&self, to: Arc<dyn RecordLog>) -> Result<Arc<dyn RecordLog>, LogError> {
        Ok(self.core.lock().unwrap().begin_mirror(to))
    }

    fn swap(&self, number: u64) -> Result<u64, LogError> {
        let mut open = self.shared.write();
        let open = open.as_mut().unwrap();
        let mut core = self.core.lock().unwrap();
        let log = core.complete_mirror()?;
        Manifest::new(number, core.store(), &open.catalog, false).write(&self.dir)?;
        core.end_mirror(Some(log.clone()));
        open.log = log;
        *self.number.lock().unwrap() = number;
        Ok(core.mirrored_bytes())
    }
}

fn filled(dir: &Path) -> Store {
    let store = Store::open(dir, BTreeMap::new());
    for document in 0..100 {
        store.append(document, TOKENS);
    }
    for document in 0..20 {
        store.remove(document * 5);
    }
    store
}

/// Changes at a step of the copy: documents before and after the place where it is.
fn change(store: &Store, round: u32) {
    let at = u128::from(round);
    store.append(1 + at * 5, TOKENS + 50 + round);
    store.append(200 + at, 40);
    let victim = 97 - at * 5;
    if store.expected.borrow().contains_key(&victim) {
        store.remove(victim);
    }
}

#[test]
fn what_is_written_meanwhile_is_in_the_new_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let rounds = RefCell::new(0);
    let done = run(&store.plan(), &store.shared, &store, &|step| {
        if step == Step::Copying && *rounds.borrow() < 10 {
            change(&store, *rounds.borrow());
            *rounds.borrow_mut() += 1;
        }
        Ok(())
    })
    .unwrap();
    assert!(*rounds.borrow() > 3, "a copy of several steps");
    assert!(done.after_bytes < done.before_bytes);
    store.check();
    store.append(300, 10);
    let expected = store.expected.take();
    drop(store);
    assert_eq!(log_numbers(dir.path()).unwrap(), [1]);
    Store::open(dir.path(), expected).check();
}

#[test]
fn broken_off_anywhere_the_store_opens_with_all_that_was_answered() {
    for broken in [
        Step::Created,
        Step::Mirrored,
        Step::Copying,
        Step::Copied,
        Step::Swapped,
        Step::Deleted,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path());
        let round = RefCell::new(0);
        let outcome = run(&store.plan(), &store.shared, &store, &|step| {
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
        // The process is gone before it could clear up.
        let expected = store.expected.take();
        drop(store);
        std::fs::write(dir.path().join("manifest.json.new"), b"{").unwrap();
        let store = Store::open(dir.path(), expected);
        store.check();
        let number = *store.number.lock().unwrap();
        let swapped = matches!(broken, Step::Swapped | Step::Deleted);
        assert_eq!(number, u64::from(swapped), "{broken:?}");
        assert_eq!(log_numbers(dir.path()).unwrap(), [number], "{broken:?}");
        // And the next one succeeds.
        rewrite(&store.plan(), &store.shared, &store).unwrap();
        store.check();
    }
}

#[test]
fn a_mirror_that_fails_costs_the_rewrite_and_no_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let plan = store.plan();
    let outcome = run(&plan, &store.shared, &store, &|step| {
        if step == Step::Copied {
            store.core.lock().unwrap().end_mirror(None);
        }
        Ok(())
    });
    assert!(matches!(outcome, Err(LogError::Refused(_))));
    plan.stop.store(true, Ordering::Relaxed);
    assert!(rewrite(&plan, &store.shared, &store).is_err());
    assert_eq!(log_numbers(dir.path()).unwrap(), [0], "nothing is left");
    store.append(400, 10);
    store.check();
}

#[test]
fn records_without_a_document_stay_behind() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let orphan = crate::record::piece_key(key(5_000), 0);
    let mut batch = Batch::default();
    batch.put(orphan.clone(), b"left by a salvage".to_vec());
    let log = store.shared.read().as_ref().unwrap().log.clone();
    log.commit(&batch).unwrap();
    drop(log);
    rewrite(&store.plan(), &store.shared, &store).unwrap();
    let log = store.shared.read().as_ref().unwrap().log.clone();
    assert_eq!(log.get(&orphan).unwrap(), None);
    store.check();
}

#[test]
fn a_log_is_due_when_it_outgrew_what_a_fresh_one_takes() {
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
    // Little is held beside it: half of the copy is waste enough.
    assert!(due(15_001, 10_000 * 2 / 3, 8_000));
    assert!(!due(14_000, 10_000 * 2 / 3, 8_000));
    assert!(
        !due(15_001, 10_000 * 2 / 3, 48_000),
        "an eighth of what is held"
    );
    assert!(due(16_100, 10_000 * 2 / 3, 48_000));
}
