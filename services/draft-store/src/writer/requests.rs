//! Requests that change what is stored.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{ApiError, Namespace, NamespaceId};
use tokio::sync::oneshot;

use crate::catalog::GroupKey;

/// The sender of an answer. A caller that is gone needs none.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// Updates of one caller, for one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Append {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    pub(crate) updates: Vec<DocumentUpdate>,
    /// Milliseconds that the oldest token of a group's document had waited when the call came.
    pub(crate) waited_ms: u32,
    pub(crate) author: UpdateAuthor,
}

/// The registration of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupRegistration {
    pub(crate) group: GroupKey,
    pub(crate) ttl_ms: u64,
}

/// The author of updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateAuthor {
    /// A worker. It does not know what was erased, so erasures are checked.
    Worker,
    /// An operator, who wants them stored regardless of erasures. With `is_static`, no budget and no age ever evicts
    /// them.
    Operator { is_static: bool },
}

/// New acceptance statistics of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct StatisticsUpdate {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    /// The table that they continue; 0 for none.
    pub(crate) continues: u64,
    /// The number of the table, if there is none yet.
    pub(crate) new_table: u64,
    /// Not empty.
    pub(crate) statistics: Vec<u8>,
}

/// The outcome of a [`StatisticsUpdate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavedStatistics {
    /// They were saved as this table.
    Table(u64),
    /// The table that they continue was erased.
    Erased,
}

/// Tokens that count towards the limit of pending tokens, until this is dropped.
pub(crate) struct PendingTokens {
    count: u64,
    all: Arc<AtomicU64>,
}

impl PendingTokens {
    /// Claims `count` tokens, if at most `max` are pending then.
    pub(crate) fn claim(all: &Arc<AtomicU64>, count: u64, max: u64) -> Option<Self> {
        let before = all.fetch_add(count, Ordering::Relaxed);
        let claimed = PendingTokens {
            count,
            all: all.clone(),
        };
        // A single claim is accepted even if it is too large: the limit of the request body bounds it.
        (before == 0 || before + count <= max).then_some(claimed)
    }
}

impl Drop for PendingTokens {
    fn drop(&mut self) {
        self.all.fetch_sub(self.count, Ordering::Relaxed);
    }
}
