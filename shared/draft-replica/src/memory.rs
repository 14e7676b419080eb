//! A copy of the drafts: one suffix index per namespace, fed by the requests that run here and
//! by the draft store's feed, which carries everybody else's and survives restarts; and a small one per group of
//! samples.
//!
//! What the store has sealed is taken over as it lies (`takeover.rs`), the rest and all news come by the feed.
//!
//! The decode loop reads and appends under a lock that is held for microseconds, and by any number of readers at once. The follower applies news
//! in small pieces, so that it holds it no longer. Outputs that ended are sealed in segments beside the lock, by the
//! keeper; only the two ends of that, which copy texts and compare them, take milliseconds.

mod drafts;
mod follower;
mod groups;
mod keeper;
mod room;
mod shared;
mod takeover;
#[cfg(test)]
mod tests;
mod upkeep;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLockReadGuard, RwLockWriteGuard};

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_suffix_index::{IndexConfig, IndexSizes};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::follower::Follower;
use self::groups::Groups;
use self::keeper::Keeper;
use self::room::Room;
use self::shared::SharedDrafts;
use crate::config::MemoryConfig;
use crate::metrics::MemoryMetrics;

pub use self::drafts::Drafts;
pub use self::groups::{GroupMemory, Membership};

/// One namespace's drafts and the task that follows the store for it.
pub struct NamespaceMemory {
    pub(crate) id: NamespaceId,
    drafts: Arc<SharedDrafts>,
    grant: Mutex<SignedNamespace>,
    /// The grant is a newer one now.
    renewed: Notify,
    /// The store has more of it than is here: it is still being heard, or there is no room.
    is_behind: AtomicBool,
    lacks_room: AtomicBool,
    /// A look-up in the store is under way.
    pub(crate) is_asking: AtomicBool,
}

impl NamespaceMemory {
    /// The drafts for those who only look, to be held for microseconds and once by a thread.
    pub fn read(&self) -> RwLockReadGuard<'_, Drafts> {
        self.drafts.read()
    }

    /// [`read`](Self::read) for those who must not wait: `None` while somebody changes them, or waits to.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, Drafts>> {
        self.drafts.try_read()
    }

    /// The drafts, to be held for microseconds.
    pub fn lock(&self) -> RwLockWriteGuard<'_, Drafts> {
        self.drafts.lock()
    }

    /// [`lock`](Self::lock) for those who must not wait: `None` while somebody else holds them.
    pub fn try_lock(&self) -> Option<RwLockWriteGuard<'_, Drafts>> {
        self.drafts.try_lock()
    }

    /// Which namespace it is.
    pub fn id(&self) -> NamespaceId {
        self.id
    }

    /// The newest signature seen.
    pub fn grant(&self) -> SignedNamespace {
        self.grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    }

    /// Whether the store has more of it than is here.
    pub fn is_partial(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed) || self.lacks_room.load(Ordering::Relaxed)
    }

    fn renew(&self, signed: &SignedNamespace) {
        let grant = self
            .grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        self.renew_held(grant, signed);
    }

    fn renew_held(&self, mut grant: MutexGuard<'_, SignedNamespace>, signed: &SignedNamespace) {
        if signed.issued_at_s > grant.issued_at_s {
            *grant = signed.clone();
            self.renewed.notify_one();
        }
    }

    /// A request of that output runs here: it is not evicted and not sealed until it ends.
    pub fn begin(&self, document: DocumentId) {
        self.drafts.begin(document);
    }

    /// One request of that output runs no more; as often as [`NamespaceMemory::begin`].
    pub fn end(&self, document: DocumentId) {
        self.drafts.end(document);
    }

    /// Takes a piece of an output.
    pub fn merge(&self, update: &DocumentUpdate) {
        self.drafts.merge(update);
    }
}

/// All that is drafted from here, less the requests' own texts.
pub struct Memory {
    space: Arc<Space>,
    keeper: JoinHandle<()>,
}

/// What the requests, the followers and the keeper share.
struct Space {
    config: MemoryConfig,
    index: IndexConfig,
    store: Arc<dyn DraftStore>,
    metrics: MemoryMetrics,
    /// Where followers run: the runtime that started the worker, not the thread that met a namespace first,
    /// which may be one of a listener that stops.
    tasks: Handle,
    /// Most recently used last.
    namespaces: Mutex<Vec<Followed>>,
    groups: Arc<Groups>,
    /// Tokens of all live parts, when the keeper looked last.
    live_tokens: Arc<AtomicU64>,
    room: Arc<Room>,
}

struct Followed {
    memory: Arc<NamespaceMemory>,
    follower: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Memory {
    /// Starts the task that keeps it in shape, on the runtime that this is called on: followers run there as well.
    pub fn new(
        config: MemoryConfig,
        pattern_tokens_max: u32,
        store: Arc<dyn DraftStore>,
        metrics: MemoryMetrics,
    ) -> Self {
        let index = IndexConfig {
            pattern_tokens_max,
            ..IndexConfig::default()
        };
        let groups = Arc::new(Groups::new(&config, index.clone(), metrics.clone()));
        let tasks = Handle::current();
        let space = Arc::new(Space {
            config,
            index,
            store,
            metrics,
            tasks: tasks.clone(),
            namespaces: Mutex::default(),
            groups,
            live_tokens: Arc::default(),
            room: Arc::default(),
        });
        let keeper = Keeper {
            space: space.clone(),
        };
        Memory {
            space,
            keeper: tasks.spawn(keeper.run()),
        }
    }

    /// The drafts of a namespace whose signature has been checked. Follows the store from the first use on.
    pub fn namespace(&self, id: NamespaceId, signed: &SignedNamespace) -> Arc<NamespaceMemory> {
        let space = &self.space;
        let mut namespaces = space.lock();
        let found = namespaces
            .iter()
            .position(|followed| followed.memory.id == id);
        let followed = match found {
            Some(place) => namespaces.remove(place),
            None => {
                if namespaces.len() >= space.config.namespaces_max {
                    space.evict(&mut namespaces);
                }
                space.follow(id, signed)
            }
        };
        followed.memory.renew(signed);
        let memory = followed.memory.clone();
        namespaces.push(followed);
        space.metrics.index_namespaces.set(namespaces.len() as i64);
        memory
    }

    /// The same for those who must not wait: `None` also where the namespace is not followed yet.
    pub fn try_namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Option<Arc<NamespaceMemory>> {
        let mut namespaces = self.space.namespaces.try_lock().ok()?;
        let found = namespaces
            .iter()
            .position(|followed| followed.memory.id == id)?;
        // Most recently used last.
        namespaces[found..].rotate_left(1);
        let memory = namespaces.last()?.memory.clone();
        // Where somebody else holds the signature, the next request brings a newer one as well.
        if let Ok(grant) = memory.grant.try_lock() {
            memory.renew_held(grant, signed);
        }
        Some(memory)
    }

    /// Places a request in its group of the namespace. `None` if there is no room for one more group.
    pub fn group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<Membership> {
        self.space.groups.join(namespace, group, document)
    }

    /// The same for those who must not wait: `None` also where another group would have to go for it.
    pub fn try_group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<Membership> {
        self.space.groups.try_join(namespace, group, document)
    }

    /// Follows nothing any more: the worker stops.
    pub fn stop(&self) {
        self.keeper.abort();
        self.space.lock().clear();
    }

    /// Brings the gauges up to date.
    pub fn observe(&self) {
        let mut sum = IndexSizes::default();
        for memory in self.space.namespaces() {
            let sizes = memory.read().index.sizes();
            sum.live_documents += sizes.live_documents;
            sum.live_tokens += sizes.live_tokens;
            sum.live_bytes += sizes.live_bytes;
            sum.segments += sizes.segments;
            sum.segment_documents += sizes.segment_documents;
            sum.segment_tokens += sizes.segment_tokens;
            sum.segment_bytes += sizes.segment_bytes;
        }
        let groups = self.space.groups.all();
        let sizes = groups.iter().map(|group| {
            let drafts = group.read();
            (drafts.index.tokens(), drafts.index.bytes())
        });
        let (tokens, bytes) = sizes.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let metrics = &self.space.metrics;
        metrics.index_sizes(&sum);
        metrics.group_sizes(groups.len(), tokens, bytes);
    }
}

impl Space {
    fn follow(&self, id: NamespaceId, signed: &SignedNamespace) -> Followed {
        let memory = Arc::new(NamespaceMemory {
            id,
            drafts: Arc::new(SharedDrafts::new(self.index.clone())),
            grant: Mutex::new(signed.clone()),
            renewed: Notify::new(),
            is_behind: AtomicBool::new(true),
            lacks_room: AtomicBool::new(false),
            is_asking: AtomicBool::new(false),
        });
        let follower = Follower {
            memory: memory.clone(),
            groups: self.groups.clone(),
            live_tokens: self.live_tokens.clone(),
            room: self.room.clone(),
            store: self.store.clone(),
            config: self.config.clone(),
            metrics: self.metrics.clone(),
        };
        Followed {
            memory,
            follower: self.tasks.spawn(follower.run()),
        }
    }

    /// Lets go of the namespace that was unused longest. Requests of it that run keep their drafts through
    /// their own reference; nothing new comes.
    fn evict(&self, namespaces: &mut Vec<Followed>) {
        if !namespaces.is_empty() {
            self.groups.forget(namespaces.remove(0).memory.id);
            self.metrics.index_evictions.inc();
        }
    }

    fn evict_one(&self) {
        let mut namespaces = self.lock();
        self.evict(&mut namespaces);
        self.metrics.index_namespaces.set(namespaces.len() as i64);
    }

    /// Most recently used last.
    fn namespaces(&self) -> Vec<Arc<NamespaceMemory>> {
        let namespaces = self.lock();
        namespaces
            .iter()
            .map(|followed| followed.memory.clone())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Followed>> {
        self.namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
