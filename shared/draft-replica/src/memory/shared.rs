//! Drafts behind their lock: those who draft hold it together and those who append alone, both shortly; long work is beside
//! it.

use std::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Instant;

use prometheus::Histogram;
use refrain_protocol::DocumentId;
use refrain_protocol::document::DocumentUpdate;
use refrain_suffix_index::{IndexConfig, IndexError};

use super::drafts::Drafts;

/// Drafts that several threads read and write.
pub(crate) struct SharedDrafts {
    drafts: RwLock<Drafts>,
    /// Held while a new live part is built. Whoever has much to append waits for it, since all of it would have to be
    /// appended once more, under the lock, when the new one is installed.
    pub(super) building: tokio::sync::Mutex<()>,
    sealed_at: Mutex<Option<Instant>>,
}

impl SharedDrafts {
    pub(super) fn new(config: IndexConfig) -> Self {
        SharedDrafts {
            drafts: RwLock::new(Drafts::new(config)),
            building: tokio::sync::Mutex::default(),
            sealed_at: Mutex::default(),
        }
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Drafts> {
        self.drafts
            .read()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, Drafts>> {
        match self.drafts.try_read() {
            Ok(drafts) => Some(drafts),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn lock(&self) -> RwLockWriteGuard<'_, Drafts> {
        self.drafts
            .write()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn try_lock(&self) -> Option<RwLockWriteGuard<'_, Drafts>> {
        match self.drafts.try_write() {
            Ok(drafts) => Some(drafts),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// What is done under the lock, and for how long it was held.
    pub(super) fn timed<T>(&self, seconds: &Histogram, work: impl FnOnce(&mut Drafts) -> T) -> T {
        let mut drafts = self.lock();
        let started = Instant::now();
        let done = work(&mut drafts);
        drop(drafts);
        seconds.observe(started.elapsed().as_secs_f64());
        done
    }

    pub(crate) fn begin(&self, document: DocumentId) {
        stays_sealed(self.lock().begin(document, Instant::now()));
    }

    /// `None` while somebody else holds the drafts.
    pub(super) fn try_begin(&self, document: DocumentId) -> Option<()> {
        stays_sealed(self.try_lock()?.begin(document, Instant::now()));
        Some(())
    }

    pub(crate) fn end(&self, document: DocumentId) {
        self.lock().end(document);
    }

    /// Takes a piece of an output. Past the index's capacity it can't be drafted from, no more.
    pub(crate) fn merge(&self, update: &DocumentUpdate) {
        if let Err(error) = self.lock().merge(update, Instant::now()) {
            tracing::warn!(%error, "index took no more tokens");
        }
    }

    pub(super) fn sealed_at(&self) -> Option<Instant> {
        *self
            .sealed_at
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn set_sealed_at(&self, now: Instant) {
        *self
            .sealed_at
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(now);
    }
}

fn stays_sealed(begun: Result<(), IndexError>) {
    if let Err(error) = begun {
        tracing::warn!(%error, "an output stays sealed while it runs");
    }
}
