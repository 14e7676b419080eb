//! The open store as the writer and the readers share it: the catalog and its log behind one lock, and the readers
//! that wait for namespaces.
//!
//! The writer holds the lock for a whole commit, `fdatasync` included. A reader holds it for one change at a time. So
//! readers see only what is durable, and never a text that is half rewritten.
//!
//! A durable watermark with readers outside the lock was rejected. A document whose next change was in flight was
//! invisible meanwhile, and a crash at that moment made followers miss it for good.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use refrain_protocol::document::StoreStats;
use refrain_protocol::{ApiError, ErrorKind, NamespaceId};
use refrain_service_kit::clock::unix_ms;
use refrain_service_kit::clocks::Clocks;
use tokio::sync::Notify;

use crate::catalog::{Catalog, TenantTable};
use crate::clock::{StoreClock, since_boot};
use crate::directory::Loss;
use crate::log::RecordLog;

/// The catalog and its log.
pub(crate) struct OpenStore {
    pub(crate) catalog: Catalog,
    pub(crate) log: Arc<dyn RecordLog>,
}

/// The state that the writer and all readers share.
#[derive(Default)]
pub(crate) struct SharedStore {
    /// `None` while the writer opens the store.
    open: RwLock<Option<OpenStore>>,
    /// Whether the store is open, for callers that must not wait for a commit.
    is_open: AtomicBool,
    /// How often the store was opened.
    openings: AtomicU64,
    /// Tokens that wait for a commit.
    pub(crate) pending_tokens: Arc<AtomicU64>,
    waiting: Mutex<HashMap<NamespaceId, Vec<Arc<Waiter>>>>,
    stats: Mutex<StoreStats>,
    /// The tenants after the last commit, for callers that must not wait for one. `None` until the store was opened.
    tenants: RwLock<Option<TenantTable>>,
    /// `None` until the store was opened.
    clock: Mutex<Option<StoreClock>>,
    /// The clocks of the other services, to detect a wrong wall clock here.
    pub(crate) clocks: OnceLock<Clocks>,
    /// Wakes the one who sends the outbox to other replicas.
    pub(crate) outbox_changed: Notify,
    /// A loss that an operator must confirm before the store is ready.
    loss: Mutex<Option<Loss>>,
}

/// The open store, locked for reading.
pub(crate) struct OpenGuard<'a>(RwLockReadGuard<'a, Option<OpenStore>>);

impl Deref for OpenGuard<'_> {
    type Target = OpenStore;

    fn deref(&self) -> &OpenStore {
        match &*self.0 {
            Some(open) => open,
            None => unreachable!("a guard is only made of an open store"),
        }
    }
}

/// The answer while the log is closed.
pub(crate) fn unavailable() -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the draft store is opening its log; retry",
    )
    .with_retry_after_ms(1_000)
}

/// A reader that waits for changes of some namespaces.
#[derive(Default)]
struct Waiter {
    changed: Mutex<HashSet<NamespaceId>>,
    has_changed: Notify,
}

/// The wait of a reader for changes. Dropping it ends the subscription.
pub(crate) struct Subscription {
    shared: Arc<SharedStore>,
    namespaces: HashSet<NamespaceId>,
    waiter: Arc<Waiter>,
}

impl Subscription {
    /// Waits for changes. Returns the namespaces that have changed since the last call.
    pub(crate) async fn changed(&self) -> HashSet<NamespaceId> {
        loop {
            self.waiter.has_changed.notified().await;
            let changed = std::mem::take(&mut *self.waiter.changed.lock());
            if !changed.is_empty() {
                return changed;
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting.lock();
        for namespace in &self.namespaces {
            if let Some(waiters) = waiting.get_mut(namespace) {
                waiters.retain(|waiter| !Arc::ptr_eq(waiter, &self.waiter));
                if waiters.is_empty() {
                    waiting.remove(namespace);
                }
            }
        }
    }
}

impl SharedStore {
    /// The store for reading.
    ///
    /// # Errors
    /// It is closed.
    pub(crate) fn read(&self) -> Result<OpenGuard<'_>, ApiError> {
        // After a panic of the writer the slot is empty.
        let open = self.open.read();
        match open.is_some() {
            true => Ok(OpenGuard(open)),
            false => Err(unavailable()),
        }
    }

    /// The store for the writer.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Option<OpenStore>> {
        self.open.write()
    }

    /// Whether the log is open.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// How often the store was opened so far. An operation in several steps is complete only if this did not change
    /// meanwhile.
    pub(crate) fn openings(&self) -> u64 {
        self.openings.load(Ordering::Relaxed)
    }

    /// Puts in the store that the writer has opened, or takes it out.
    pub(crate) fn set_open(&self, open: Option<OpenStore>) {
        if let Some(open) = &open {
            *self.tenants.write() = Some(open.catalog.tenants.clone());
        }
        let mut slot = self.write();
        self.is_open.store(open.is_some(), Ordering::Relaxed);
        self.openings
            .fetch_add(u64::from(open.is_some()), Ordering::Relaxed);
        *slot = open;
    }

    /// Records that the store is closed. The caller holds the lock and takes the store out.
    pub(crate) fn note_closed(&self) {
        self.is_open.store(false, Ordering::Relaxed);
    }

    /// Starts the store's clock, which continues from the last known time.
    pub(crate) fn start_clock(&self, known_ms: u64) {
        self.clock
            .lock()
            .get_or_insert_with(|| StoreClock::new(known_ms, unix_ms(), since_boot()));
    }

    /// The store's time, in Unix milliseconds.
    pub(crate) fn now_ms(&self) -> u64 {
        match self.clock.lock().as_mut() {
            Some(clock) => {
                let skew_ms = self.clocks.get().map_or(0, Clocks::skew_ms);
                clock.read(unix_ms(), skew_ms, since_boot())
            }
            None => unix_ms(),
        }
    }

    /// How far the wall clock is ahead of the store's time, while the wall clock is ignored.
    pub(crate) fn clock_offset_ms(&self) -> Option<i64> {
        self.clock.lock().and_then(|clock| clock.offset_ms())
    }

    /// Follows the wall clock from now on.
    pub(crate) fn confirm_clock(&self) {
        if let Some(clock) = self.clock.lock().as_mut() {
            clock.confirm(unix_ms(), since_boot());
        }
    }

    /// A loss that nobody has confirmed.
    pub(crate) fn loss(&self) -> Option<Loss> {
        *self.loss.lock()
    }

    /// Records a loss, or with `None` that it was confirmed.
    pub(crate) fn set_loss(&self, loss: Option<Loss>) {
        *self.loss.lock() = loss;
    }

    /// The statistics after the last commit.
    pub(crate) fn stats(&self) -> StoreStats {
        *self.stats.lock()
    }

    pub(crate) fn set_stats(&self, stats: StoreStats) {
        *self.stats.lock() = stats;
    }

    /// Reads the tenants after the last commit.
    ///
    /// # Errors
    /// The store was not opened so far.
    pub(crate) fn read_tenants<T>(
        &self,
        read: impl FnOnce(&TenantTable) -> T,
    ) -> Result<T, ApiError> {
        self.tenants
            .read()
            .as_ref()
            .map(read)
            .ok_or_else(unavailable)
    }

    /// Shows a change of a tenant that has been committed.
    pub(crate) fn set_tenant(&self, name: &str, version: u64, entry: Option<Arc<str>>) {
        if let Some(tenants) = &mut *self.tenants.write() {
            tenants.set(name, version, entry);
        }
    }

    /// Subscribes to changes of namespaces from now on.
    pub(crate) fn subscribe(self: &Arc<Self>, namespaces: HashSet<NamespaceId>) -> Subscription {
        let waiter = Arc::<Waiter>::default();
        let mut waiting = self.waiting.lock();
        for namespace in &namespaces {
            waiting.entry(*namespace).or_default().push(waiter.clone());
        }
        drop(waiting);
        Subscription {
            shared: self.clone(),
            namespaces,
            waiter,
        }
    }

    /// Wakes the readers that wait for these namespaces.
    pub(crate) fn wake<'a>(&self, namespaces: impl IntoIterator<Item = &'a NamespaceId>) {
        let waiting = self.waiting.lock();
        for namespace in namespaces {
            for waiter in waiting.get(namespace).into_iter().flatten() {
                waiter.changed.lock().insert(*namespace);
                waiter.has_changed.notify_one();
            }
        }
    }

    /// Number of namespaces with a waiting reader.
    pub(crate) fn namespaces_awaited(&self) -> usize {
        self.waiting.lock().len()
    }
}
