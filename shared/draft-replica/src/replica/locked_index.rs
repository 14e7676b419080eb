//! A [`DraftIndex`] behind its lock. Requests that draft share the lock, requests that append hold it alone, both for
//! microseconds. Long work is done beside it.

use std::sync::{
    Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult,
};
use std::time::Instant;

use prometheus::Histogram;
use refrain_protocol::DocumentId;
use refrain_suffix_index::{IndexConfig, IndexError};

use super::draft_index::DraftIndex;
use crate::update::DocumentUpdateRef;

/// An index that several threads read and write.
pub(super) struct LockedIndex {
    index: RwLock<DraftIndex>,
    /// Held while a new live part is built. A writer with many tokens waits for it: all of them would have to be
    /// appended once more, under the lock, when the new live part is installed.
    pub(super) building: tokio::sync::Mutex<()>,
    sealed_at: Mutex<Option<Instant>>,
}

impl LockedIndex {
    pub(super) fn new(config: IndexConfig) -> Self {
        LockedIndex {
            index: RwLock::new(DraftIndex::new(config)),
            building: tokio::sync::Mutex::default(),
            sealed_at: Mutex::default(),
        }
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while a writer holds the lock or waits for it.
    pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, DraftIndex>> {
        unless_blocked(self.index.try_read())
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, DraftIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while another thread holds the lock.
    pub(super) fn try_write(&self) -> Option<RwLockWriteGuard<'_, DraftIndex>> {
        unless_blocked(self.index.try_write())
    }

    /// Does `work` under the exclusive lock, and observes for how long it was held.
    pub(super) fn write_timed<T>(
        &self,
        seconds: &Histogram,
        work: impl FnOnce(&mut DraftIndex) -> T,
    ) -> T {
        let mut index = self.write();
        let started = Instant::now();
        let done = work(&mut index);
        drop(index);
        seconds.observe(started.elapsed().as_secs_f64());
        done
    }

    pub(super) fn pin(&self, document: DocumentId) {
        warn_if_sealed(self.write().pin(document, Instant::now()));
    }

    /// `None` while another thread holds the lock.
    pub(super) fn try_pin(&self, document: DocumentId) -> Option<()> {
        warn_if_sealed(self.try_write()?.pin(document, Instant::now()));
        Some(())
    }

    pub(super) fn unpin(&self, document: DocumentId) {
        self.write().unpin(document);
    }

    /// Applies an update of an output. Tokens past the index's capacity cannot be drafted from, which is all the
    /// harm.
    pub(super) fn merge(&self, update: DocumentUpdateRef<'_>) {
        let merged = self.write().merge(update, Instant::now());
        if let Err(error) = merged {
            tracing::warn!(%error, "the index has no capacity for more tokens; an output cannot be drafted from");
        }
    }

    pub(super) fn sealed_at(&self) -> Option<Instant> {
        *self
            .sealed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_sealed_at(&self, now: Instant) {
        *self
            .sealed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(now);
    }
}

fn unless_blocked<T>(attempt: TryLockResult<T>) -> Option<T> {
    match attempt {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn warn_if_sealed(pinned: Result<(), IndexError>) {
    if let Err(error) = pinned {
        tracing::warn!(%error, "the index has no capacity to take an output back; it stays sealed while it runs");
    }
}
