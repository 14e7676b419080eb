//! [`DraftReplica`], the handle of the worker or the plugin.

use std::sync::Arc;

use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_suffix_index::{IndexConfig, IndexSizes};
use tokio::task::JoinHandle;

use super::groups::GroupMembership;
use super::maintenance::Maintenance;
use super::namespace::NamespaceReplica;
use super::registry::Registry;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;

/// All drafts beside an engine, except for the requests' own texts.
pub struct DraftReplica {
    pub(super) registry: Arc<Registry>,
    maintenance: JoinHandle<()>,
}

impl Drop for DraftReplica {
    fn drop(&mut self) {
        self.maintenance.abort();
    }
}

impl DraftReplica {
    /// Starts an empty replica with its maintenance task, on the runtime of the caller. Followers run there as well.
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
        let registry = Arc::new(Registry::new(config, index, store, metrics));
        let maintenance = Maintenance {
            registry: registry.clone(),
        };
        DraftReplica {
            maintenance: registry.runtime.spawn(maintenance.run()),
            registry,
        }
    }

    /// The drafts of a namespace whose signature the caller has checked. The store is followed from the first call
    /// on.
    pub fn namespace(&self, id: NamespaceId, signed: &SignedNamespace) -> Arc<NamespaceReplica> {
        self.registry.namespace(id, signed)
    }

    /// [`namespace`](Self::namespace) without waiting: `None` also where the namespace is not followed yet.
    pub fn try_namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Option<Arc<NamespaceReplica>> {
        self.registry.try_namespace(id, signed)
    }

    /// Adds a request to its group of the namespace. `None` where requests of as many groups run as there may be.
    pub fn join_group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        self.registry.groups.join(namespace, group, document)
    }

    /// [`join_group`](Self::join_group) without waiting: `None` also where another group would have to be evicted.
    pub fn try_join_group(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        self.registry.groups.try_join(namespace, group, document)
    }

    /// Stops following the store, and all maintenance.
    pub fn stop(&self) {
        self.maintenance.abort();
        self.registry.clear();
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
        let groups = self.registry.groups.all();
        let sizes = groups.iter().map(|group| {
            let index = group.read();
            (index.index.tokens(), index.index.bytes())
        });
        let (tokens, bytes) = sizes.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let metrics = &self.registry.metrics;
        metrics.set_index_sizes(&sum);
        metrics.set_group_sizes(groups.len(), tokens, bytes);
    }
}

#[cfg(test)]
mod tests;
