//! One document, and the feed entries that describe it.

use refrain_protocol::DocumentId;

use crate::catalog::feed::{Feed, FeedChange};
use crate::record::{DocumentKey, SegmentSlot, StateRecord};
use crate::segments::CountedDocument;

/// Most feed entries of one document. A document that grows in more steps gives up the older half of its boundaries.
/// A follower that is behind them gets that part again as a whole.
pub(super) const BOUNDARIES_MAX: usize = 64;

/// A document in the catalog.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub(crate) state: StateRecord,
    /// The stored value of `used_ms`, which is written only now and then.
    pub(crate) used_ms_stored: u64,
    /// The part of its prompt's hash that is kept in memory; 0 where the hash is not known. See `history.rs`.
    pub(super) prompt: u64,
    /// Its position in a segment. `None` while it is in the log.
    pub(crate) slot: Option<SegmentSlot>,
    /// Feed entries, oldest first: (sequence, start). An entry reaches to the start of the next one, the last one to
    /// the end of the text; its sequence is `state.sequence`. Sequences and starts both grow, so a follower that
    /// reads in order of sequence never meets a gap.
    pub(super) boundaries: Vec<(u64, u32)>,
}

impl Document {
    pub(crate) fn new(state: StateRecord) -> Self {
        Document {
            used_ms_stored: state.used_ms,
            state,
            prompt: 0,
            slot: None,
            boundaries: Vec::new(),
        }
    }

    /// Its sizes, for all sums.
    pub(super) fn counted(&self, key: DocumentKey) -> CountedDocument {
        CountedDocument {
            slot: self.slot,
            key,
            len: self.state.len,
            bytes: self.state.bytes,
        }
    }

    /// The change that its feed entry at `sequence` describes, which begins at `start`.
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

    /// The first feed entry after a sequence, with its start.
    pub(super) fn boundary_after(&self, after: u64) -> Option<(u64, u32)> {
        let at = self
            .boundaries
            .partition_point(|(sequence, _)| *sequence <= after);
        self.boundaries.get(at).copied()
    }

    /// Whether it has more than one feed entry.
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
