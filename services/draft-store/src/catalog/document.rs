//! One document, and the ranges in which its feed tells of it.

use refrain_protocol::DocumentId;

use crate::catalog::feed::{Feed, FeedChange};
use crate::record::{SegmentSlot, StateRecord};

/// Most feed entries of one document. A document that grows in more steps gives up the oldest half of its
/// boundaries; who is behind them gets that part again, whole.
pub(super) const BOUNDARIES_MAX: usize = 64;

/// One document.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub(crate) state: StateRecord,
    /// `used_ms` as stored; the order of use is written only now and then.
    pub(crate) used_ms_stored: u64,
    /// Where it is sealed; `None` while it is in the log.
    pub(crate) slot: Option<SegmentSlot>,
    /// Feed entries, oldest first: (sequence, start). An entry reaches to the start of the next one, the
    /// last one to the end; the last one's sequence is `state.sequence`. Sequences and starts both grow, so
    /// a follower that reads in order of sequence never meets a gap.
    pub(super) boundaries: Vec<(u64, u32)>,
}

impl Document {
    pub(crate) fn new(state: StateRecord) -> Self {
        Document {
            used_ms_stored: state.used_ms,
            state,
            slot: None,
            boundaries: Vec::new(),
        }
    }

    /// What its feed entry at `sequence` tells, which begins at `start`.
    pub(super) fn range(&self, document: DocumentId, sequence: u64, start: u32) -> FeedChange {
        let at = self
            .boundaries
            .partition_point(|(other, _)| *other <= sequence);
        let (end, last) = match self.boundaries.get(at) {
            Some((_, next)) => (*next, false),
            None => (self.state.len, true),
        };
        FeedChange::Range {
            document,
            start,
            end,
            last,
        }
    }

    /// Whether it has more feed entries than one.
    pub(crate) fn is_split(&self) -> bool {
        self.boundaries.len() > 1
    }
}

/// Joins the first `count` feed entries of a document into the last of them.
pub(super) fn join(feed: &mut Feed, id: DocumentId, document: &mut Document, count: usize) {
    if count < 2 {
        return;
    }
    for (sequence, _) in document.boundaries.drain(..count - 1) {
        feed.withdraw(sequence);
    }
    if let Some(first) = document.boundaries.first_mut() {
        first.1 = 0;
        feed.put(first.0, id, 0);
    }
    document.boundaries.shrink_to_fit();
}
