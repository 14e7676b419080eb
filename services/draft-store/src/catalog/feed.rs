//! The changes of a namespace in order, without a log of changes.
//!
//! A naive feed is a log that grows for ever, or a list of documents ordered by their last change, from which a
//! running document is sent completely each time it grows. Here the feed is a list of *ranges*. Each change of a
//! document adds the range that it wrote. Once the document rests, its ranges are joined into the last one. Joining
//! only moves text to a later position, so a follower that reads in order of sequence gets everything. It may get a
//! part twice, which is harmless.
//!
//! Removals are tombstones, at most a fixed number per namespace. Beyond it the older half is *trimmed*. A follower
//! may continue if it has passed everything that was trimmed since its cursor was made. A follower that still reads
//! from the beginning has a low position, but nothing to fear from old tombstones. For that case a cursor also
//! carries the number of trims so far. Both are packed into the sequence of the wire cursor.

use std::collections::{BTreeMap, VecDeque};

use refrain_protocol::DocumentId;
use refrain_protocol::document::{FeedCursor, StreamPosition};

use crate::record::FeedRecord;

/// Bits for the number of trims in a cursor's sequence. The other 48 bits last for nine years of a million changes a
/// second.
const TRIM_BITS: u32 = 16;

/// A change of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FeedChange {
    /// Tokens `start..end` of a document. `last` says that the document ends there.
    Range {
        document: DocumentId,
        start: u32,
        end: u32,
        last: bool,
    },
    /// A document was removed.
    Removed(DocumentId),
}

/// The changes of one namespace.
#[derive(Default)]
pub(crate) struct Feed {
    /// By sequence: the document, and the start of its range, or `None` for a tombstone.
    entries: BTreeMap<u64, (DocumentId, Option<u32>)>,
    /// Sequences of the tombstones, oldest first.
    tombstones: VecDeque<u64>,
    record: FeedRecord,
}

impl Feed {
    pub(crate) fn record(&self) -> FeedRecord {
        self.record
    }

    pub(crate) fn restore(&mut self, record: FeedRecord) {
        self.record = record;
    }

    pub(super) fn put(&mut self, sequence: u64, document: DocumentId, start: u32) {
        self.entries.insert(sequence, (document, Some(start)));
    }

    pub(super) fn withdraw(&mut self, sequence: u64) {
        self.entries.remove(&sequence);
    }

    pub(super) fn add_tombstone(&mut self, sequence: u64, document: DocumentId) {
        self.entries.insert(sequence, (document, None));
        self.tombstones.push_back(sequence);
    }

    pub(super) fn tombstones(&self) -> usize {
        self.tombstones.len()
    }

    /// The entries after a sequence: the sequence of each, its document, and where its text starts. A tombstone has
    /// no text.
    pub(super) fn after(
        &self,
        sequence: u64,
    ) -> impl Iterator<Item = (u64, DocumentId, Option<u32>)> {
        let later = self.entries.range(sequence + 1..);
        later.map(|(sequence, (document, start))| (*sequence, *document, *start))
    }

    /// Sequence of the last change, or 0 before the first.
    pub(super) fn last(&self) -> u64 {
        let last = self.entries.last_key_value();
        last.map_or(0, |(sequence, _)| *sequence)
    }

    /// Drops the older half of the tombstones when there are more than `tombstones_max`. Returns their
    /// sequences.
    pub(crate) fn trim(&mut self, tombstones_max: usize) -> Vec<u64> {
        if self.tombstones.len() <= tombstones_max {
            return Vec::new();
        }
        let count = self.tombstones.len() - tombstones_max / 2;
        let trimmed: Vec<u64> = self.tombstones.drain(..count).collect();
        for sequence in &trimmed {
            self.entries.remove(sequence);
        }
        if let Some(last) = trimmed.last() {
            self.forget_until(*last);
        }
        trimmed
    }

    /// Records that tombstones up to `sequence` are lost.
    pub(crate) fn forget_until(&mut self, sequence: u64) {
        self.record.floor = self.record.floor.max(sequence);
        match self.record.trims.checked_add(1) {
            Some(trims) => self.record.trims = trims,
            // Once in 65,536 trims all followers start over.
            None => {
                self.record.trims = 0;
                self.record.era = self.record.era.wrapping_add(1);
            }
        }
    }
}

/// Packs a position into a cursor.
pub(super) fn cursor(generation: u64, record: FeedRecord, sequence: u64) -> FeedCursor {
    FeedCursor {
        generation: generation.wrapping_add(u64::from(record.era)),
        sequence: sequence << TRIM_BITS | u64::from(record.trims),
        seen: StreamPosition::default(),
    }
}

/// Unpacks the position of a cursor. `None` if the cursor is not valid here, or no longer.
pub(super) fn position(
    generation: u64,
    record: FeedRecord,
    head: u64,
    cursor: FeedCursor,
) -> Option<u64> {
    let sequence = cursor.sequence >> TRIM_BITS;
    let trims = (cursor.sequence & ((1 << TRIM_BITS) - 1)) as u16;
    let ours = cursor.generation == generation.wrapping_add(u64::from(record.era));
    let missed_nothing = trims == record.trims || sequence >= record.floor;
    (ours && sequence <= head && missed_nothing).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trims_reset_only_followers_that_missed_something() {
        let mut feed = Feed::default();
        let early = cursor(7, feed.record(), 2);
        let late = cursor(7, feed.record(), 4);
        for sequence in 1..=5 {
            feed.add_tombstone(sequence, DocumentId(u128::from(sequence)));
        }
        assert_eq!(feed.trim(4), [1, 2, 3]);
        assert_eq!(position(7, feed.record(), 5, early), None);
        assert_eq!(position(7, feed.record(), 5, late), Some(4));
        // A follower that starts over now reads from the beginning undisturbed.
        let paging = cursor(7, feed.record(), 1);
        assert_eq!(position(7, feed.record(), 5, paging), Some(1));
        assert_eq!(position(8, feed.record(), 5, paging), None);
        assert_eq!(
            position(7, feed.record(), 5, cursor(7, feed.record(), 6)),
            None,
            "the future"
        );
        feed.restore(FeedRecord {
            trims: u16::MAX,
            ..feed.record()
        });
        feed.forget_until(5);
        assert_eq!((feed.record().trims, feed.record().era), (0, 1));
    }
}
