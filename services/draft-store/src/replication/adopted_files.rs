//! The files that this process has taken over from another replica, so that a join that was broken off goes on.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::{DocumentId, NamespaceId};

/// The files of one replica that are in use here. Only the last replica is remembered.
#[derive(Default)]
pub(crate) struct AdoptedFiles {
    /// The generation of the replica.
    origin: u64,
    /// By the checksum of the file there.
    files: HashMap<(NamespaceId, u64), AdoptedFile>,
}

/// A file that is in use here.
#[derive(Clone)]
pub(super) struct AdoptedFile {
    /// Its documents in order of their numbers.
    pub(super) documents: Arc<Vec<DocumentId>>,
    /// The numbers of those that it did not hand over.
    pub(super) gone: Arc<BTreeSet<u32>>,
}

impl AdoptedFiles {
    /// The files of a replica. Those of another one are forgotten.
    pub(super) fn of(files: &Mutex<AdoptedFiles>, origin: u64) -> MutexGuard<'_, AdoptedFiles> {
        let mut files = files.lock();
        if files.origin != origin {
            *files = AdoptedFiles {
                origin,
                ..AdoptedFiles::default()
            };
        }
        files
    }

    /// Whether files of a namespace are in use here.
    pub(super) fn has(&self, namespace: NamespaceId) -> bool {
        self.files.keys().any(|(found, _)| *found == namespace)
    }

    pub(super) fn get(&self, namespace: NamespaceId, checksum: u64) -> Option<AdoptedFile> {
        self.files.get(&(namespace, checksum)).cloned()
    }

    pub(super) fn add(&mut self, namespace: NamespaceId, checksum: u64, file: AdoptedFile) {
        self.files.insert((namespace, checksum), file);
    }

    /// Forgets everything, at the end of a join.
    pub(super) fn clear(&mut self) {
        self.files.clear();
    }
}
