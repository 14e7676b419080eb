//! The sources of a request's drafts: the replicas of its namespace and of its group, which also get its output.

use std::sync::Arc;

use refrain_draft_replica::{GroupMembership, NamespaceReplica};

use crate::awaited::Awaited;
use crate::metrics::PluginMetrics;

/// The replicas that a request drafts from, besides its own text.
pub(crate) struct DraftSources {
    pub(crate) namespace: Arc<NamespaceReplica>,
    pub(crate) group: Option<GroupMembership>,
}

/// The sources of a request. The background thread looks for them where that may take a wait. A request without any
/// drafts from its own text alone, and its output is not kept.
pub(crate) type AwaitedSources = Awaited<DraftSources>;

impl AwaitedSources {
    /// The sources in a step. A step that goes without them, since they are still pending, is counted.
    pub(crate) fn poll_or_count(&mut self, metrics: &PluginMetrics) -> Option<&DraftSources> {
        self.poll();
        match self {
            Awaited::Ready(sources) => Some(sources),
            Awaited::Missing => None,
            Awaited::Pending(_) => {
                metrics.busy.inc();
                None
            }
        }
    }
}
