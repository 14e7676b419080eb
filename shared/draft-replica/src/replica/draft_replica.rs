//! [`DraftReplica`], the handle of the worker or the plugin.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::actors::{self, Actor};
use refrain_suffix_index::{IndexConfig, IndexSizes};

use super::follower::Follower;
use super::groups::GroupMembership;
use super::ingest::Ingest;
use super::namespace::NamespaceReplica;
use super::registry::Registry;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::uploader::Uploader;

/// All drafts beside an engine, except for the requests' own texts.
pub struct DraftReplica {
    pub(super) registry: Arc<Registry>,
    index: IndexConfig,
    maintenance: Actor,
    follower: Actor,
}

impl DraftReplica {
    /// Starts an empty replica with its two tasks, on the runtime of the caller: one follows the store, and one
    /// maintains the indexes.
    pub fn new(
        config: ReplicaConfig,
        pattern_tokens_max: u32,
        store: Arc<dyn DraftStore>,
        metrics: ReplicaMetrics,
    ) -> Self {
        let index = IndexConfig {
            pattern_tokens_max,
            ..IndexConfig::default()
        };
        let registry = Arc::new(Registry::new(config, index.clone(), store, metrics));
        let (maintained, followed) = (registry.clone(), registry.clone());
        let maintain = move || maintained.clone().maintain();
        let is_repeated = AtomicBool::new(false);
        let follow = move || {
            // A task that panicked may have left anything.
            if is_repeated.swap(true, Ordering::Relaxed) {
                for namespace in followed.namespaces() {
                    let shared = followed.shared.clone();
                    Ingest { namespace, shared }.reset();
                }
            }
            Follower::new(followed.clone()).run()
        };
        DraftReplica {
            maintenance: actors::start("maintenance of drafts", maintain),
            follower: actors::start("follower", follow),
            registry,
            index,
        }
    }

    /// The drafts of a namespace whose signature the caller has checked. The store is followed from the first call
    /// on. Past the limit the least recently used namespace is evicted.
    pub fn namespace(&self, id: NamespaceId, signed: &SignedNamespace) -> Arc<NamespaceReplica> {
        let mut namespaces = self.registry.namespaces.lock();
        if let Some(replica) = namespaces.get(&id) {
            replica.renew(replica.signed.lock(), signed);
            return replica.clone();
        }
        let replica = Arc::new(NamespaceReplica::new(id, signed, self.index.clone()));
        let shared = &self.registry.shared;
        if let Some((evicted, _)) = namespaces.push(id, replica.clone()) {
            shared.forget(evicted);
        }
        shared.scopes_changed.notify_one();
        shared.metrics.namespaces.set(namespaces.len() as i64);
        replica
    }

    /// [`namespace`](Self::namespace) without waiting: `None` also where the namespace is not followed yet. Where
    /// another thread holds the signature, that stays: the next request brings a newer one as well.
    pub fn try_namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Option<Arc<NamespaceReplica>> {
        let mut namespaces = self.registry.namespaces.try_lock()?;
        let replica = namespaces.get(&id)?.clone();
        if let Some(held) = replica.signed.try_lock() {
            replica.renew(held, signed);
        }
        Some(replica)
    }

    /// The drafts of a namespace, if it is followed. This is no use of it.
    pub fn followed(&self, id: NamespaceId) -> Option<Arc<NamespaceReplica>> {
        self.registry.followed(id)
    }

    /// Adds a request to its group of the namespace. `None` where requests of as many groups run as there may be.
    pub fn join_group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        self.registry.shared.groups.join(namespace, group, document)
    }

    /// [`join_group`](Self::join_group) without waiting: `None` also where another group would have to be evicted.
    pub fn try_join_group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        self.registry
            .shared
            .groups
            .try_join(namespace, group, document)
    }

    /// Forgets the outputs of which the store says that they were erased when they are uploaded. Those that it had
    /// are in its feed, but not these.
    pub fn forget_erased_of(&self, uploader: &Uploader) {
        let registry = Arc::downgrade(&self.registry);
        uploader.on_erased(Box::new(move |namespace, documents| {
            let Some(registry) = registry.upgrade() else {
                return;
            };
            if let Some(followed) = registry.followed(namespace) {
                let ingest = Ingest {
                    namespace: followed,
                    shared: registry.shared.clone(),
                };
                ingest.remove(documents);
            }
        }));
    }

    /// Stops following the store, and all maintenance.
    pub fn stop(&self) {
        self.maintenance.abort();
        self.follower.abort();
        self.registry.namespaces.lock().clear();
    }

    /// Brings the gauges up to date.
    pub fn observe(&self) {
        let mut sum = IndexSizes::default();
        for namespace in self.registry.namespaces() {
            let sizes = namespace.read().index.sizes();
            sum.live_documents += sizes.live_documents;
            sum.live_tokens += sizes.live_tokens;
            sum.live_bytes += sizes.live_bytes;
            sum.segments += sizes.segments;
            sum.segment_documents += sizes.segment_documents;
            sum.segment_tokens += sizes.segment_tokens;
            sum.segment_bytes += sizes.segment_bytes;
        }
        let metrics = &self.registry.shared.metrics;
        metrics.set_index_sizes(&sum);
        let groups = self.registry.shared.groups.all();
        let sizes = groups.iter().map(|group| {
            let index = group.read();
            (index.index.tokens(), index.index.bytes())
        });
        let (tokens, bytes) = sizes.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        metrics.groups.set(groups.len() as i64);
        metrics.group_tokens.set(tokens as i64);
        metrics.group_bytes.set(bytes as i64);
    }
}

#[cfg(test)]
mod tests;
