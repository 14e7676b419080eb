//! The writer's state about segments in the making.

use std::collections::VecDeque;
use std::time::Instant;

use crate::record::SegmentId;
use crate::writer::requests::Reply;

/// A purge in progress: rewriting segments with removed documents, and sealing.
pub(super) struct Purge {
    /// The opening of the store that it belongs to. After another opening its list is invalid.
    pub(super) openings: u64,
    pub(super) left: VecDeque<SegmentId>,
    /// Seal documents that ended before this time, in Unix milliseconds.
    pub(super) seals_before_ms: Option<u64>,
    pub(super) waiters: Vec<Reply<()>>,
}

/// Requested work on segments, and what was done last.
#[derive(Default)]
pub(super) struct SealState {
    pub(super) purge: Option<Purge>,
    /// Callers of the next purge: the running job may have read what they want gone.
    pub(super) waiters: Vec<(Reply<()>, bool)>,
    pub(super) not_before: Option<Instant>,
    /// The last job sealed, so merging has its turn next.
    pub(super) merges_next: bool,
    /// When all namespaces were last searched for old documents, which is too expensive for every tick.
    pub(super) aged_at: Option<Instant>,
    /// The last segment number used by this process. It is never reused, whatever came of it.
    pub(super) last: SegmentId,
}
