//! The sources of a request's drafts: the replicas of its namespace and of its group, which also get its output.

use std::sync::Arc;

use refrain_draft_replica::{GroupMembership, NamespaceReplica};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::metrics::PluginMetrics;

/// The replicas that a request drafts from, besides its own text.
pub(crate) struct DraftSources {
    pub(crate) namespace: Arc<NamespaceReplica>,
    pub(crate) group: Option<GroupMembership>,
}

/// Whether the sources of a request have been found.
pub(crate) enum SourceState {
    /// The request drafts from its own text alone, and its output is not kept.
    None,
    /// The background thread is looking for them, because that may take a wait.
    Pending(oneshot::Receiver<DraftSources>),
    Found(DraftSources),
}

impl SourceState {
    /// The sources, if they have been found.
    pub(crate) fn get(&mut self) -> Option<&DraftSources> {
        if let SourceState::Pending(pending) = self {
            match pending.try_recv() {
                Ok(sources) => *self = SourceState::Found(sources),
                Err(TryRecvError::Closed) => *self = SourceState::None,
                Err(TryRecvError::Empty) => {}
            }
        }
        match self {
            SourceState::Found(sources) => Some(sources),
            SourceState::Pending(_) | SourceState::None => None,
        }
    }

    /// [`get`](Self::get) in a step. A step that goes without sources, since they are still pending, is counted.
    pub(crate) fn get_or_count(&mut self, metrics: &PluginMetrics) -> Option<&DraftSources> {
        self.get();
        if matches!(self, SourceState::Pending(_)) {
            metrics.busy.inc();
        }
        self.get()
    }
}
