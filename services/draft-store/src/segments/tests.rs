//! Seals and merges on a real disk with a store that goes on meanwhile, broken off at every step.

mod damage;
mod records;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Mutex;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{DocumentId, Namespace};

use super::*;
use crate::config::DraftStoreConfig;
use crate::directory::{Opened, open};
use crate::record::DocumentKey;
use crate::shared::{Open, Shared};
use crate::text;
use crate::writer::{Append, By, Core, Removal};

const CACHE_BYTES: u64 = 4 << 20;
const TOKENS: u32 = 300;

fn names(tenant: &str) -> Namespace {
    let [tenant, model, tokenizer] = [tenant, "m", "t"].map(str::to_owned);
    Namespace {
        tenant,
        model,
        tokenizer,
    }
}

fn key(tenant: &str, document: u128) -> DocumentKey {
    DocumentKey {
        namespace: names(tenant).id(),
        document: DocumentId(document),
    }
}

fn text(document: u128, len: u32) -> Vec<u32> {
    (0..len).map(|at| at * 31 + document as u32).collect()
}

/// A store without its actor, and what it must hold of tenant a: lengths by document.
struct Store {
    dir: PathBuf,
    shared: Shared,
    core: Mutex<Core>,
    lost: usize,
    quarantined: Option<PathBuf>,
    expected: RefCell<BTreeMap<u128, u32>>,
}

impl Store {
    fn open(dir: &Path, expected: BTreeMap<u128, u32>) -> Self {
        let Opened {
            log,
            store,
            loaded,
            quarantined,
            ..
        } = open(dir, CACHE_BYTES, 1).unwrap();
        let mut core = Core::new(
            log.clone(),
            DraftStoreConfig::default(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        let lost = loaded.lost_segments;
        let mut catalog = loaded.catalog;
        core.tick(&mut catalog, 1).unwrap();
        let shared = Shared::default();
        shared.set_open(Some(Open { catalog, log }));
        Store {
            dir: dir.to_owned(),
            shared,
            core: Mutex::new(core),
            lost,
            quarantined,
            expected: RefCell::new(expected),
        }
    }

    fn append(&self, tenant: &str, document: u128, from: u32, len: u32) {
        let update = DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: from,
            tokens: text(document, len)[from as usize..].to_vec(),
            head: DocumentHead::default(),
            finish: Some(FinishReason::Stop),
        };
        let append = Append {
            namespace: names(tenant).id(),
            names: names(tenant),
            updates: vec![update],
            by: By::Worker,
        };
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.take_in(catalog, &[append], &[], 1).unwrap();
        if tenant == "a" {
            self.expected.borrow_mut().insert(document, len);
        }
    }

    fn remove(&self, document: u128) {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.remove(catalog, &[key("a", document)], Removal::Tokens, 1)
            .unwrap();
        self.expected.borrow_mut().remove(&document);
    }

    /// Fails unless the store holds exactly what it must.
    fn check(&self) {
        let open = self.shared.read();
        let Open { catalog, log } = open.as_ref().unwrap();
        let expected = self.expected.borrow();
        let held = catalog.documents(names("a").id()).count();
        assert_eq!(held, expected.len());
        for (document, len) in &*expected {
            let key = key("a", *document);
            let read = text::read(catalog, &**log, key, 0, *len).unwrap();
            assert_eq!(read, text(*document, *len), "document {document}");
            assert_eq!(catalog.document(key).unwrap().state.len, *len);
        }
    }

    fn plan(&self, tenant: &str, work: Option<Work>) -> Plan {
        let open = self.shared.read();
        let segments = open.as_ref().unwrap().catalog.segments();
        let namespace = names(tenant).id();
        let unsealed = segments.unsealed_of(namespace);
        let all = || unsealed.iter().flat_map(|unsealed| &unsealed.documents);
        Plan {
            dir: self.dir.clone(),
            id: segments.iter().map(|(id, _)| id).max().unwrap_or(0) + 1,
            namespace,
            names: Some(names(tenant)),
            work: work.unwrap_or_else(|| Work::Seal(all().copied().collect())),
            stop: Arc::default(),
        }
    }

    fn seal(&self, tenant: &str) -> SegmentId {
        let plan = self.plan(tenant, None);
        run(&plan, &self.shared, self, &|_| Ok(())).unwrap();
        plan.id
    }

    fn mounted(&self) -> Vec<SegmentId> {
        let open = self.shared.read();
        let segments = open.as_ref().unwrap().catalog.segments();
        segments.iter().map(|(id, _)| id).collect()
    }
}

impl Host for Store {
    fn install(&self, product: Product) -> Result<(), LogError> {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.install(catalog, product, 1).map(drop)
    }
}

fn filled(dir: &Path) -> Store {
    let store = Store::open(dir, BTreeMap::new());
    for document in 0..40 {
        store.append("a", document, 0, TOKENS + document as u32);
    }
    store
}

/// Changes at a step: documents go on, come and go.
fn change(store: &Store, round: u128) {
    let going_on = round * 3;
    let len = store.expected.borrow().get(&going_on).copied();
    if let Some(len) = len {
        store.append("a", going_on, len, len + 20);
    }
    store.append("a", 100 + round, 0, 40);
    if store.expected.borrow().contains_key(&(39 - round)) {
        store.remove(39 - round);
    }
}

const STEPS: [Step; 5] = [
    Step::Read,
    Step::Written,
    Step::Renamed,
    Step::Installed,
    Step::Deleted,
];

fn broken_off(merges: bool, broken: Step) {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let work = merges.then(|| {
        let first = store.seal("a");
        for document in 50..70 {
            store.append("a", document, 0, TOKENS);
        }
        Work::Merge(vec![first, store.seal("a")])
    });
    let before = store.mounted();
    let plan = store.plan("a", work);
    let round = RefCell::new(0);
    let outcome = run(&plan, &store.shared, &store, &|step| {
        change(&store, *round.borrow());
        *round.borrow_mut() += 1;
        match step == broken {
            true => Err(LogError::Refused("broken off".into())),
            false => Ok(()),
        }
    });
    assert!(outcome.is_err());
    store.check();
    // The process is gone before it could clear up.
    let expected = store.expected.take();
    drop(store);
    let store = Store::open(dir.path(), expected);
    assert_eq!((store.lost, &store.quarantined), (0, &None));
    store.check();
    let counts = matches!(broken, Step::Installed | Step::Deleted);
    let mounted = if counts { vec![plan.id] } else { before };
    assert_eq!(store.mounted(), mounted, "{broken:?}");
    let (files, others) = list(dir.path()).unwrap();
    assert_eq!((files, others.len()), (mounted.clone(), 0), "{broken:?}");
    // And the next one succeeds.
    store.seal("a");
    let all = store.mounted();
    let plan = store.plan("a", Some(Work::Merge(all)));
    run(&plan, &store.shared, &store, &|_| Ok(())).unwrap();
    store.check();
    let expected = store.expected.take();
    drop(store);
    Store::open(dir.path(), expected).check();
}

#[test]
fn a_seal_broken_off_anywhere_loses_nothing() {
    for broken in STEPS {
        broken_off(false, broken);
    }
}

#[test]
fn a_merge_broken_off_anywhere_loses_nothing() {
    for broken in STEPS {
        broken_off(true, broken);
    }
}

#[test]
fn a_seal_while_the_log_is_rewritten_is_in_both() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let to: Arc<dyn crate::log::RecordLog> = Arc::new(crate::log::memory::MemoryLog::default());
    store.core.lock().unwrap().begin_mirror(to.clone());
    let segment = store.seal("a");
    store.remove(3);
    let key = crate::record::segment_key(segment);
    let marks = crate::record::marks_key(segment, 0);
    for key in [key, marks] {
        let log = store.shared.read().as_ref().unwrap().log.clone();
        assert!(to.get(&key).unwrap().is_some());
        assert_eq!(to.get(&key).unwrap(), log.get(&key).unwrap());
    }
}
