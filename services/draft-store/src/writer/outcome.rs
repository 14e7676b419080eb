//! The result of a commit.

use crate::writer::requests::SavedStatistics;
use std::collections::BTreeSet;

use refrain_protocol::NamespaceId;

use crate::metrics::{Limit, RemovalReason};
use crate::record::{DocumentKey, SegmentId};

/// The outcome of a commit.
#[derive(Debug, Default)]
pub(crate) struct CommitOutcome {
    /// Per append and update: the new length of the document. `None` if the append would add one namespace too many.
    pub(crate) lengths: Vec<Option<Vec<u32>>>,
    /// Per statistics update: its outcome. `None` if it would add one namespace too many.
    pub(crate) statistics: Vec<Option<SavedStatistics>>,
    /// Namespaces whose feeds have new entries.
    pub(crate) changed: BTreeSet<NamespaceId>,
    pub(crate) appended_tokens: u64,
    /// Tokens of updates that were dropped because of their older epochs.
    pub(crate) fenced_tokens: u64,
    pub(crate) removed: Vec<(DocumentKey, RemovalReason)>,
    /// Records were removed whose content the log's files still have.
    pub(crate) leaves_remains: bool,
    /// The limits for which groups had no room for updates.
    pub(crate) group_rejections: Vec<Limit>,
    /// More documents exceed a budget or the retention than one step may remove.
    pub(crate) more: bool,
    /// The sequence reservation moved, so the manifest must be written again.
    pub(crate) reserved: bool,
    /// Something may be sent to other replicas.
    pub(crate) sends: bool,
    /// Messages that had been applied before.
    pub(crate) repeated_messages: u64,
    /// Earliest time at which a document from another replica was first stored.
    pub(crate) oldest_ms: Option<u64>,
    /// Segments without documents, whose files must be deleted.
    pub(crate) emptied: Vec<SegmentId>,
}
