//! The replica of one namespace, as its requests and its follower share it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_suffix_index::IndexConfig;
use tokio::sync::Notify;

use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use crate::update::DocumentUpdateRef;

/// The drafts of one namespace.
pub struct NamespaceReplica {
    pub(crate) id: NamespaceId,
    pub(super) index: Arc<LockedIndex>,
    pub(super) signed: Mutex<SignedNamespace>,
    /// Signals that `signed` is a newer one.
    pub(super) renewed: Notify,
    /// The feed has not been followed to its end yet.
    pub(super) is_behind: AtomicBool,
    /// A part was left out or evicted for want of capacity.
    pub(super) lacks_capacity: AtomicBool,
    /// A look-up in the store is in flight.
    pub(crate) is_looking_up: AtomicBool,
}

impl NamespaceReplica {
    pub(super) fn new(id: NamespaceId, signed: &SignedNamespace, index: IndexConfig) -> Self {
        NamespaceReplica {
            id,
            index: Arc::new(LockedIndex::new(index)),
            signed: Mutex::new(signed.clone()),
            renewed: Notify::new(),
            is_behind: AtomicBool::new(true),
            lacks_capacity: AtomicBool::new(false),
            is_looking_up: AtomicBool::new(false),
        }
    }

    /// The index, shared with other readers. Hold it for microseconds, and not twice in one thread.
    pub fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.read()
    }

    /// [`read`](Self::read) without waiting: `None` while a writer holds the index or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, DraftIndex>> {
        self.index.try_read()
    }

    /// The index, for one writer. Hold it for microseconds.
    pub fn write(&self) -> RwLockWriteGuard<'_, DraftIndex> {
        self.index.write()
    }

    /// [`write`](Self::write) without waiting: `None` while another thread holds the index.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, DraftIndex>> {
        self.index.try_write()
    }

    /// The id of the namespace.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// The newest signature of the namespace that a request brought.
    pub fn signed(&self) -> SignedNamespace {
        self.lock_signed().clone()
    }

    /// Whether the store has more of the namespace than is here.
    pub fn is_partial(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed) || self.lacks_capacity.load(Ordering::Relaxed)
    }

    /// Keeps an output from eviction and sealing, since a request here emits it.
    pub fn pin(&self, document: DocumentId) {
        self.index.pin(document);
    }

    /// Takes back one [`pin`](Self::pin).
    pub fn unpin(&self, document: DocumentId) {
        self.index.unpin(document);
    }

    /// Applies an update of an output.
    pub fn merge(&self, update: DocumentUpdateRef<'_>) {
        self.index.merge(update);
    }

    /// Keeps `signed`, if it is newer.
    pub(super) fn renew(&self, signed: &SignedNamespace) {
        self.renew_locked(self.lock_signed(), signed);
    }

    /// [`renew`](Self::renew) without waiting. Where another thread holds the signature it does nothing: the next
    /// request brings a newer one as well.
    pub(super) fn try_renew(&self, signed: &SignedNamespace) {
        match self.signed.try_lock() {
            Ok(held) => self.renew_locked(held, signed),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.renew_locked(poisoned.into_inner(), signed);
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    fn renew_locked(&self, mut held: MutexGuard<'_, SignedNamespace>, signed: &SignedNamespace) {
        if signed.issued_at_s > held.issued_at_s {
            held.clone_from(signed);
            self.renewed.notify_one();
        }
    }

    fn lock_signed(&self) -> MutexGuard<'_, SignedNamespace> {
        self.signed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
