//! The namespaces that are followed, the groups, and what all of them share.

use std::num::NonZeroUsize;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use refrain_protocol::{NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_suffix_index::IndexConfig;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::capacity::Capacity;
use super::follower::Follower;
use super::groups::Groups;
use super::ingest::Ingest;
use super::namespace::NamespaceReplica;
use super::take_over::TakeOver;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;

/// The state that requests, followers and the maintenance task share.
pub(super) struct Registry {
    pub(super) config: ReplicaConfig,
    pub(super) index: IndexConfig,
    pub(super) store: Arc<dyn DraftStore>,
    pub(super) metrics: ReplicaMetrics,
    /// The runtime of the followers. A namespace may first be met on a thread of a listener that stops earlier.
    pub(super) runtime: Handle,
    pub(super) namespaces: Mutex<LruCache<NamespaceId, FollowedNamespace>>,
    pub(super) groups: Arc<Groups>,
    /// Tokens of all live parts, as the maintenance task counted them last.
    pub(super) live_tokens: Arc<AtomicU64>,
    pub(super) capacity: Arc<Capacity>,
}

/// A namespace with the task that follows the store for it.
pub(super) struct FollowedNamespace {
    pub(super) replica: Arc<NamespaceReplica>,
    follower: JoinHandle<()>,
}

impl Drop for FollowedNamespace {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Registry {
    /// Must be called on the runtime that followers are to run on.
    pub(super) fn new(
        config: ReplicaConfig,
        index: IndexConfig,
        store: Arc<dyn DraftStore>,
        metrics: ReplicaMetrics,
    ) -> Self {
        let namespaces_max = NonZeroUsize::new(config.namespaces_max);
        let namespaces = LruCache::new(namespaces_max.unwrap_or(NonZeroUsize::MIN));
        Registry {
            groups: Arc::new(Groups::new(&config, index.clone(), metrics.clone())),
            config,
            index,
            store,
            metrics,
            runtime: Handle::current(),
            namespaces: Mutex::new(namespaces),
            live_tokens: Arc::default(),
            capacity: Arc::default(),
        }
    }

    /// A namespace, which is followed from the first call on. Past the limit the least recently used one is evicted.
    pub(super) fn namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Arc<NamespaceReplica> {
        let mut namespaces = self.lock();
        if let Some(followed) = namespaces.get(&id) {
            followed.replica.renew(signed);
            return followed.replica.clone();
        }
        let followed = self.follow(id, signed);
        let replica = followed.replica.clone();
        if let Some((evicted, _)) = namespaces.push(id, followed) {
            self.forget(evicted);
        }
        self.metrics.namespaces.set(namespaces.len() as i64);
        replica
    }

    /// [`namespace`](Self::namespace) without waiting: `None` also where the namespace is not followed yet.
    pub(super) fn try_namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Option<Arc<NamespaceReplica>> {
        let mut namespaces = self.namespaces.try_lock().ok()?;
        let replica = namespaces.get(&id)?.replica.clone();
        replica.try_renew(signed);
        Some(replica)
    }

    /// All namespaces, the least recently used first.
    pub(super) fn namespaces(&self) -> Vec<Arc<NamespaceReplica>> {
        let namespaces = self.lock();
        let by_use = namespaces.iter().rev();
        by_use
            .map(|(_, followed)| followed.replica.clone())
            .collect()
    }

    /// Evicts the least recently used namespace.
    pub(super) fn evict_one(&self) {
        let mut namespaces = self.lock();
        if let Some((evicted, _)) = namespaces.pop_lru() {
            self.forget(evicted);
        }
        self.metrics.namespaces.set(namespaces.len() as i64);
    }

    /// Stops all followers, and forgets their namespaces.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    /// Running requests of an evicted namespace keep its drafts through their own references. No news reaches these.
    fn forget(&self, evicted: NamespaceId) {
        self.groups.forget(evicted);
        self.metrics.evictions.inc();
    }

    fn follow(&self, id: NamespaceId, signed: &SignedNamespace) -> FollowedNamespace {
        let replica = Arc::new(NamespaceReplica::new(id, signed, self.index.clone()));
        let follower = Follower {
            take_over: TakeOver {
                ingest: Ingest {
                    namespace: replica.clone(),
                    groups: self.groups.clone(),
                    live_tokens: self.live_tokens.clone(),
                    config: self.config.clone(),
                },
                capacity: self.capacity.clone(),
                store: self.store.clone(),
                metrics: self.metrics.clone(),
            },
        };
        FollowedNamespace {
            replica,
            follower: self.runtime.spawn(follower.run()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<NamespaceId, FollowedNamespace>> {
        self.namespaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
