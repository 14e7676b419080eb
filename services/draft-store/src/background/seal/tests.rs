//! Seals and merges on a real disk with a store that goes on meanwhile, interrupted at every step.

mod damage;

use super::*;

use std::cell::RefCell;
use std::collections::BTreeMap;

use refrain_protocol::admin::VerifyReply;
use refrain_protocol::document::FinishReason;

use crate::log::RewriteStep;
use crate::reading::verify::verify_segment;
use crate::segments::list;
use crate::tests::test_store::{TOKENS, TestStore, names};

/// Appends to a document, and ends it.
fn append(store: &TestStore, tenant: &str, document: u128, len: u32) {
    store.append(tenant, document, len, Some(FinishReason::Stop));
}

/// Sealing for a test store.
trait Seals {
    fn plan(&self, tenant: &str, source: Option<SegmentSource>) -> SealJob;
    /// Seals all of a tenant's documents.
    fn seal(&self, tenant: &str) -> SegmentId;
    fn mounted(&self) -> Vec<SegmentId>;
}

impl Seals for TestStore {
    fn plan(&self, tenant: &str, source: Option<SegmentSource>) -> SealJob {
        let open = self.shared.read().unwrap();
        let segments = open.catalog.segments();
        let namespace = names(tenant).id();
        let unsealed = segments.unsealed_of(namespace);
        let all = || unsealed.iter().flat_map(|unsealed| &unsealed.documents);
        SealJob {
            dir: self.dir.clone(),
            id: segments.iter().map(|(id, _)| id).max().unwrap_or(0) + 1,
            namespace,
            names: Some(names(tenant)),
            source: source.unwrap_or_else(|| SegmentSource::Log(all().copied().collect())),
            stop: Arc::default(),
        }
    }

    fn seal(&self, tenant: &str) -> SegmentId {
        let plan = self.plan(tenant, None);
        run(&plan, &self.shared, self, &|_| Ok(())).unwrap();
        plan.id
    }

    fn mounted(&self) -> Vec<SegmentId> {
        let open = self.shared.read().unwrap();
        let segments = open.catalog.segments();
        segments.iter().map(|(id, _)| id).collect()
    }
}

impl SealHost for TestStore {
    fn install(&self, segment: NewSegment) -> Result<(), LogError> {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.install(catalog, segment, 1).map(drop)
    }
}

fn filled(dir: &Path) -> TestStore {
    let store = TestStore::open(dir, BTreeMap::new());
    for document in 0..40 {
        append(&store, "a", document, TOKENS + document as u32);
    }
    store
}

/// Changes at a step: documents are continued, added and removed.
fn change(store: &TestStore, round: u128) {
    let going_on = round * 3;
    let len = store.expected.borrow().get(&going_on).copied();
    if let Some(len) = len {
        append(store, "a", going_on, len + 20);
    }
    append(store, "a", 100 + round, 40);
    if store.expected.borrow().contains_key(&(39 - round)) {
        store.remove(39 - round);
    }
}

const STEPS: [SealStep; 5] = [
    SealStep::Read,
    SealStep::Written,
    SealStep::Renamed,
    SealStep::Installed,
    SealStep::Deleted,
];

fn broken_off(merges: bool, broken: SealStep) {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let work = merges.then(|| {
        let first = store.seal("a");
        for document in 50..70 {
            append(&store, "a", document, TOKENS);
        }
        SegmentSource::Segments(vec![first, store.seal("a")])
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
    // The process ends before it could clean up.
    let expected = store.expected.take();
    drop(store);
    let store = TestStore::open(dir.path(), expected);
    assert_eq!((store.lost, &store.quarantined), (0, &None));
    store.check();
    let counts = matches!(broken, SealStep::Installed | SealStep::Deleted);
    let mounted = if counts { vec![plan.id] } else { before };
    assert_eq!(store.mounted(), mounted, "{broken:?}");
    let (files, others) = list(dir.path()).unwrap();
    assert_eq!((files, others.len()), (mounted, 0), "{broken:?}");
    // The next seal and merge succeed.
    store.seal("a");
    let all = store.mounted();
    let plan = store.plan("a", Some(SegmentSource::Segments(all)));
    run(&plan, &store.shared, &store, &|_| Ok(())).unwrap();
    store.check();
    let expected = store.expected.take();
    drop(store);
    TestStore::open(dir.path(), expected).check();
}

#[test]
fn a_seal_interrupted_anywhere_loses_nothing() {
    for broken in STEPS {
        broken_off(false, broken);
    }
}

#[test]
fn a_merge_interrupted_anywhere_loses_nothing() {
    for broken in STEPS {
        broken_off(true, broken);
    }
}

#[test]
fn a_segment_that_is_merged_while_it_is_verified_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let first = store.seal("a");
    append(&store, "a", 50, TOKENS);
    let all = vec![first, store.seal("a")];
    let listed: Vec<_> = {
        let open = store.shared.read().unwrap();
        open.catalog.segments().files().cloned().collect()
    };
    let plan = store.plan("a", Some(SegmentSource::Segments(all)));
    run(&plan, &store.shared, &store, &|_| Ok(())).unwrap();
    let mut reply = VerifyReply::default();
    for sealed in &listed {
        assert!(!crate::segments::path(dir.path(), sealed.id).exists());
        verify_segment(&store.shared, sealed, &mut reply).unwrap();
    }
    assert_eq!((listed.len(), reply.damaged), (2, 0));
    // One that is in use is damaged if its file is gone.
    let merged = {
        let open = store.shared.read().unwrap();
        open.catalog.segments().files().next().cloned().unwrap()
    };
    verify_segment(&store.shared, &merged, &mut reply).unwrap();
    assert_eq!(reply.damaged, 0);
    std::fs::remove_file(crate::segments::path(dir.path(), merged.id)).unwrap();
    verify_segment(&store.shared, &merged, &mut reply).unwrap();
    assert_eq!(reply.damaged, 1, "{:?}", reply.damage);
}

#[test]
fn a_seal_while_the_log_is_rewritten_is_in_both() {
    let dir = tempfile::tempdir().unwrap();
    let store = filled(dir.path());
    let log = store.shared.read().unwrap().log.clone();
    let mut before = Vec::new();
    let segment = std::cell::Cell::new(0);
    log.rewrite(&AtomicBool::new(false), &|step| {
        if step == RewriteStep::Copied {
            segment.set(store.seal("a"));
            store.remove(3);
        }
        Ok(())
    })
    .unwrap();
    let key = crate::record::segment_key(segment.get());
    let marks = crate::record::marks_key(segment.get(), 0);
    for key in [&key, &marks] {
        before.push(log.get(key).unwrap());
    }
    assert!(before.iter().all(Option::is_some));
    drop(log);
    let expected = store.expected.take();
    drop(store);
    // The fresh files are those that count now.
    let store = TestStore::open(dir.path(), expected);
    store.check();
    let log = store.shared.read().unwrap().log.clone();
    let after = [&key, &marks].map(|key| log.get(key).unwrap());
    assert_eq!(after.to_vec(), before);
}
