//! The replica of one namespace, as its requests and the follower share it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_suffix_index::{IndexConfig, IndexError};
use tokio::sync::Notify;

use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use crate::update::DocumentUpdateRef;

/// The drafts of one namespace.
pub struct NamespaceReplica {
    /// The id of the namespace.
    pub id: NamespaceId,
    pub(super) index: Arc<LockedIndex>,
    pub(super) signed: Mutex<SignedNamespace>,
    /// Signals that `signed` is a newer one.
    pub(super) renewed: Notify,
    /// The feed has not been followed to its end yet.
    pub(super) is_behind: AtomicBool,
    /// Documents of several replicas of the store are here, so texts of one epoch may differ.
    pub(super) is_mixed: AtomicBool,
    /// A part was left out or evicted for want of capacity.
    pub(super) lacks_capacity: AtomicBool,
}

impl NamespaceReplica {
    pub(super) fn new(id: NamespaceId, signed: &SignedNamespace, index: IndexConfig) -> Self {
        NamespaceReplica {
            id,
            index: Arc::new(LockedIndex::new(index)),
            signed: Mutex::new(signed.clone()),
            renewed: Notify::new(),
            is_behind: AtomicBool::new(true),
            is_mixed: AtomicBool::new(false),
            lacks_capacity: AtomicBool::new(false),
        }
    }

    /// The index, shared with other readers. Hold it for microseconds, and not twice in one thread.
    pub fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.drafts.read()
    }

    /// [`read`](Self::read) without waiting: `None` while a writer holds the index or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, DraftIndex>> {
        self.index.drafts.try_read()
    }

    /// The index, for one writer. Hold it for microseconds.
    pub fn write(&self) -> RwLockWriteGuard<'_, DraftIndex> {
        self.index.drafts.write()
    }

    /// [`write`](Self::write) without waiting: `None` while another thread holds the index.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, DraftIndex>> {
        self.index.drafts.try_write()
    }

    /// The newest signature of the namespace that a request brought.
    pub fn signed(&self) -> SignedNamespace {
        self.signed.lock().clone()
    }

    /// Whether the store has more of the namespace than is here.
    pub fn is_partial(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed) || self.lacks_capacity.load(Ordering::Relaxed)
    }

    /// Keeps an output from eviction and sealing, since a request here emits it. The lock is held for a part of the
    /// output at a time.
    pub fn pin(&self, document: DocumentId) {
        self.write().pin(document, Instant::now());
        self.index.revive();
    }

    /// Takes back one [`pin`](Self::pin).
    pub fn unpin(&self, document: DocumentId) {
        self.write().unpin(document);
    }

    /// Applies an update of an output. Tokens past the index's capacity cannot be drafted from, which is all the
    /// harm.
    pub fn merge(&self, update: DocumentUpdateRef<'_>) {
        if let Err(error) = self.merge_emitted(update, true) {
            tracing::warn!(%error, "the index has no capacity for more tokens; an output cannot be drafted from");
        }
    }

    /// Applies a part of an update of the store's feed. The text of an output that a request here emits is newer than
    /// that.
    pub(super) fn merge_received(&self, update: DocumentUpdateRef<'_>) {
        let is_mixed = self.is_mixed.load(Ordering::Relaxed);
        let compares = is_mixed && !self.read().is_pinned(update.document);
        let applied = self.write().apply(update, compares, Instant::now());
        if let Err(error) = applied {
            tracing::warn!(%error, "the index has no capacity for more tokens; an output cannot be drafted from");
        }
    }

    /// Applies an update that comes from the request that emitted it; see [`DraftIndex::merge`]. The lock is held for
    /// a part of the update at a time.
    ///
    /// # Errors
    /// The index has no capacity for more states.
    pub fn merge_emitted(
        &self,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
    ) -> Result<bool, IndexError> {
        let mut index = self.write();
        let mut is_sole_source = is_sole_source;
        for (number, part) in update.parts().enumerate() {
            if number > 0 {
                RwLockWriteGuard::bump(&mut index);
            }
            is_sole_source = index.merge(part, is_sole_source, Instant::now())?;
        }
        Ok(is_sole_source)
    }

    /// Replaces the signature that is `held` by `signed`, if that is newer.
    pub(super) fn renew(
        &self,
        mut held: MutexGuard<'_, SignedNamespace>,
        signed: &SignedNamespace,
    ) {
        if signed.issued_at_s > held.issued_at_s {
            held.clone_from(signed);
            self.renewed.notify_waiters();
        }
    }

    /// Waits for a signature that was made after this time.
    pub(super) async fn newer_signature(&self, than_s: u64) {
        loop {
            // A notification after this line is not missed.
            let renewed = self.renewed.notified();
            if self.signed.lock().issued_at_s > than_s {
                return;
            }
            renewed.await;
        }
    }
}
