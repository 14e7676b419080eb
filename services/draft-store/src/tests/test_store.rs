//! A store on a real disk without its actor, for tests that interrupt it at every step.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{DocumentId, Namespace};

use crate::config::DraftStoreConfig;
use crate::directory::{OpenedDirectory, open};
use crate::metrics::RemovalReason;
use crate::reading::document_text;
use crate::record::DocumentKey;
use crate::shared_store::{OpenStore, SharedStore};
use crate::writer::core::WriterCore;
use crate::writer::requests::{Append, UpdateAuthor};

pub(crate) const CACHE_BYTES: u64 = 4 << 20;

/// Length of a document, where it does not matter.
pub(crate) const TOKENS: u32 = 300;

pub(crate) fn names(tenant: &str) -> Namespace {
    let [tenant, model, tokenizer] = [tenant, "m", "t"].map(str::to_owned);
    Namespace {
        tenant,
        model,
        tokenizer,
    }
}

pub(crate) fn key(tenant: &str, document: u128) -> DocumentKey {
    DocumentKey::new(names(tenant).id(), DocumentId(document))
}

pub(crate) fn text(document: u128, len: u32) -> Vec<u32> {
    (0..len).map(|at| at * 31 + document as u32).collect()
}

/// Copies a directory with all that is in it.
pub(crate) fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_directory(&entry.path(), &target),
            // sled replaces files while it is open.
            false => drop(std::fs::copy(entry.path(), target)),
        }
    }
}

/// A store, and what it must hold of tenant a: lengths by document.
pub(crate) struct TestStore {
    pub(crate) dir: PathBuf,
    pub(crate) shared: SharedStore,
    pub(crate) core: Mutex<WriterCore>,
    /// Damaged records found at the open. The next fields: lost segments, and where the log was moved.
    pub(crate) damaged: u64,
    pub(crate) lost: usize,
    pub(crate) quarantined: Option<PathBuf>,
    pub(crate) expected: RefCell<BTreeMap<u128, u32>>,
}

impl TestStore {
    pub(crate) fn open(dir: &Path, expected: BTreeMap<u128, u32>) -> Self {
        let OpenedDirectory {
            log,
            store,
            loaded,
            quarantined,
            ..
        } = open(dir, CACHE_BYTES, 1).unwrap();
        let damaged = loaded.damaged_records + loaded.damaged.len() as u64;
        let mut core = WriterCore::new(
            log.clone(),
            DraftStoreConfig::default(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        let mut catalog = loaded.catalog;
        core.tick(&mut catalog, 1).unwrap();
        let shared = SharedStore::default();
        shared.set_open(Some(OpenStore { catalog, log }));
        TestStore {
            dir: dir.to_owned(),
            shared,
            core: Mutex::new(core),
            damaged,
            lost: loaded.lost_segments,
            quarantined,
            expected: RefCell::new(expected),
        }
    }

    /// Continues a document until it has `len` tokens.
    pub(crate) fn append(
        &self,
        tenant: &str,
        document: u128,
        len: u32,
        finish: Option<FinishReason>,
    ) {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let known = catalog.document(key(tenant, document));
        let from = known.map_or(0, |known| known.state.len);
        let update = DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: from,
            tokens: text(document, len)[from as usize..].to_vec(),
            head: DocumentHead::default(),
            finish,
        };
        let append = Append {
            namespace: names(tenant).id(),
            names: names(tenant),
            updates: vec![update],
            waited_ms: 0,
            author: UpdateAuthor::Worker,
        };
        let mut core = self.core.lock().unwrap();
        core.append(catalog, &[append], &[], 1).unwrap();
        if tenant == "a" {
            self.expected.borrow_mut().insert(document, len);
        }
    }

    /// Removes a document of tenant a.
    pub(crate) fn remove(&self, document: u128) {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.lock().unwrap();
        core.remove(catalog, &[key("a", document)], RemovalReason::Tokens, 1)
            .unwrap();
        self.expected.borrow_mut().remove(&document);
    }

    /// Fails unless the store holds exactly what it must.
    pub(crate) fn check(&self) {
        let open = self.shared.read().unwrap();
        let OpenStore { catalog, log } = &*open;
        let expected = self.expected.borrow();
        let held = catalog.documents(names("a").id()).count();
        assert_eq!(held, expected.len());
        for (document, len) in &*expected {
            let key = key("a", *document);
            let read = document_text::read(catalog, &**log, key, 0, *len).unwrap();
            assert_eq!(read, text(*document, *len), "document {document}");
            assert_eq!(catalog.document(key).unwrap().state.len, *len);
        }
    }
}
