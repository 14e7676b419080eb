//! The result of a commit.

use std::collections::BTreeSet;

use refrain_protocol::NamespaceId;

use crate::metrics::RemovalReason;
use crate::record::{DocumentKey, SegmentId};

/// What a commit did.
#[derive(Debug, Default)]
pub(crate) struct CommitOutcome {
    /// Per append, per update: the length of the document. `None`: one namespace too many.
    pub(crate) lengths: Vec<Option<Vec<u32>>>,
    /// Per worker that told what drafts are worth: the tables after it. `None`: one namespace too many.
    pub(crate) tables: Vec<Option<Vec<u8>>>,
    /// Namespaces whose feeds went on.
    pub(crate) changed: BTreeSet<NamespaceId>,
    pub(crate) appended_tokens: u64,
    pub(crate) removed: Vec<(DocumentKey, RemovalReason)>,
    /// Updates that a group had no room for.
    pub(crate) group_rejections: u64,
    /// More documents are over a budget or too old than one step may remove.
    pub(crate) more: bool,
    /// The sequence reservation moved: the manifest is to be written again.
    pub(crate) reserved: bool,
    /// Segments that nothing is left of: their files are to be deleted.
    pub(crate) emptied: Vec<SegmentId>,
}
