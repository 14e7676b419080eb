//! A [`DraftIndex`] behind its lock. Requests that draft share the lock, requests that append hold it alone, both for
//! microseconds. Long work is done beside it.

use std::time::Instant;

use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use prometheus::Histogram;
use refrain_suffix_index::IndexConfig;

use super::draft_index::DraftIndex;

/// An index that several threads read and write.
pub(super) struct LockedIndex {
    pub(super) drafts: RwLock<DraftIndex>,
    /// Held while a new live part is built. A writer with many tokens waits for it: all of them would have to be
    /// appended once more, under the lock, when the new live part is installed.
    pub(super) building: tokio::sync::Mutex<()>,
    pub(super) sealed_at: Mutex<Option<Instant>>,
}

impl LockedIndex {
    pub(super) fn new(config: IndexConfig) -> Self {
        LockedIndex {
            drafts: RwLock::new(DraftIndex::new(config)),
            building: tokio::sync::Mutex::default(),
            sealed_at: Mutex::default(),
        }
    }

    /// Takes back the documents that have begun to be, and lets those that wait have the lock in between.
    pub(super) fn revive(&self) {
        let mut drafts = self.drafts.write();
        while drafts.revive_part() {
            RwLockWriteGuard::bump(&mut drafts);
        }
    }

    /// Does `work` under the exclusive lock, and observes for how long it was held.
    pub(super) fn write_timed<T>(
        &self,
        seconds: &Histogram,
        work: impl FnOnce(&mut DraftIndex) -> T,
    ) -> T {
        let mut drafts = self.drafts.write();
        let started = Instant::now();
        let done = work(&mut drafts);
        drop(drafts);
        seconds.observe(started.elapsed().as_secs_f64());
        done
    }
}
