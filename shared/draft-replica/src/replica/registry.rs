//! The namespaces that are followed, and what they share with the groups.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::NamespaceId;
use refrain_rpc::DraftStore;
use refrain_suffix_index::IndexConfig;
use tokio::sync::Notify;

use super::capacity::Capacity;
use super::groups::Groups;
use super::namespace::NamespaceReplica;
use crate::config::ReplicaConfig;
use crate::metrics::{NAMESPACE, ReplicaMetrics};

/// The state that requests, followers and the maintenance task share.
pub(super) struct SharedState {
    pub(super) config: ReplicaConfig,
    pub(super) store: Arc<dyn DraftStore>,
    pub(super) metrics: ReplicaMetrics,
    pub(super) groups: Groups,
    /// Signals that there are other namespaces, or other groups that run here.
    pub(super) scopes_changed: Arc<Notify>,
    /// Tokens of all live parts, as the maintenance task counted them last.
    pub(super) live_tokens: AtomicU64,
    pub(super) capacity: Arc<Capacity>,
}

/// The namespaces that are followed.
pub(super) struct Registry {
    pub(super) shared: Arc<SharedState>,
    pub(super) namespaces: Mutex<LruCache<NamespaceId, Arc<NamespaceReplica>>>,
}

impl Registry {
    pub(super) fn new(
        config: ReplicaConfig,
        index: IndexConfig,
        store: Arc<dyn DraftStore>,
        metrics: ReplicaMetrics,
    ) -> Self {
        let namespaces_max = NonZeroUsize::new(config.namespaces_max);
        let scopes_changed = Arc::<Notify>::default();
        Registry {
            shared: Arc::new(SharedState {
                groups: Groups::new(
                    config.clone(),
                    index,
                    metrics.clone(),
                    scopes_changed.clone(),
                ),
                scopes_changed,
                config,
                store,
                metrics,
                live_tokens: AtomicU64::new(0),
                capacity: Arc::default(),
            }),
            namespaces: Mutex::new(LruCache::new(namespaces_max.unwrap_or(NonZeroUsize::MIN))),
        }
    }

    /// All namespaces, the least recently used first.
    pub(super) fn namespaces(&self) -> Vec<Arc<NamespaceReplica>> {
        let namespaces = self.namespaces.lock();
        let by_use = namespaces.iter().rev();
        by_use.map(|(_, namespace)| namespace.clone()).collect()
    }

    /// A namespace, if it is followed. This is no use of it.
    pub(super) fn followed(&self, namespace: NamespaceId) -> Option<Arc<NamespaceReplica>> {
        let namespaces = self.namespaces.lock();
        namespaces.peek(&namespace).cloned()
    }

    /// Evicts a namespace, if it is still the least recently used one. Returns whether it was.
    pub(super) fn evict_if_least_used(&self, namespace: NamespaceId) -> bool {
        let mut namespaces = self.namespaces.lock();
        let is_least_used = namespaces
            .peek_lru()
            .is_some_and(|(id, _)| *id == namespace);
        if is_least_used {
            namespaces.pop_lru();
            self.shared.forget(namespace);
            self.shared.metrics.namespaces.set(namespaces.len() as i64);
        }
        is_least_used
    }
}

impl SharedState {
    /// Running requests of an evicted namespace keep its drafts through their own references. No news reaches these.
    pub(super) fn forget(&self, evicted: NamespaceId) {
        self.groups.forget(evicted);
        self.scopes_changed.notify_one();
        let evictions = &self.metrics.evictions;
        evictions.with_label_values(&[NAMESPACE]).inc();
    }
}
