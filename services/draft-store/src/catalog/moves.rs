//! Where a follower of another replica goes on in this one's feed.
//!
//! Each replica counts changes for itself, so a position in one feed means nothing in another. The stream of the
//! shard is the same everywhere. So a cursor also says up to which message of the stream its reader has everything.
//! This replica keeps *checkpoints*: after the message `stream`, all that the message did not bring yet comes after
//! `feed` in its own feed. A reader from elsewhere begins at the last checkpoint that it has passed.
//!
//! This replica's own callers change documents before the stream has them, and no other replica's reader has seen
//! that. So a checkpoint is never later than the oldest change that the stream had not brought back by then.
//!
//! Checkpoints live in memory. After a restart of this replica, a reader from elsewhere may have to begin anew.
//! Keeping them on disk was rejected: readers move when another replica goes, and seldom when this one came just now.

use std::collections::{HashMap, VecDeque};

use refrain_protocol::NamespaceId;

/// Checkpoints are no nearer to each other than this, in milliseconds, but for the last two. A reader gets at most
/// that much once more.
const INTERVAL_MS: u64 = 200;

/// Most checkpoints: an hour of them. A reader of a namespace in which nothing happened needs none.
const CHECKPOINTS_MAX: usize = 18_000;

/// A moment of this replica.
#[derive(Clone, Copy, Debug)]
struct Checkpoint {
    /// Sequence of the last message that was applied.
    stream: u64,
    /// All that this replica has beyond the stream up to there comes after this sequence of its feed.
    feed: u64,
    at_ms: u64,
}

/// The recent checkpoints, and the last message of each namespace.
#[derive(Default)]
pub(crate) struct Moves {
    checkpoints: VecDeque<Checkpoint>,
    /// Sequence of the last message that was applied, by namespace.
    last: HashMap<NamespaceId, u64>,
    /// Sequence of the last message when this replica opened its log, or had joined.
    opened_at: u64,
    /// Whether the end of the stream was reached since then. A replica that joins takes over what came later than
    /// the message at which it goes on, and that is not after anything.
    is_current: bool,
}

impl Moves {
    /// Begins anew at a message, before the end of the stream is reached.
    pub(crate) fn begin(&mut self, stream: u64) {
        *self = Moves {
            opened_at: stream,
            ..Moves::default()
        };
    }

    /// Notes that a message of a namespace was applied.
    pub(crate) fn applied(&mut self, namespace: NamespaceId, stream: u64) {
        self.last.insert(namespace, stream);
    }

    /// Notes that all messages are applied that were in the stream since [`Self::begin`].
    pub(crate) fn reached_end(&mut self) {
        self.is_current = true;
    }

    /// Notes that all messages up to `stream` are applied. `feed` is the last sequence of the feed, or the one before
    /// the oldest change in the outbox.
    pub(crate) fn passed(&mut self, stream: u64, feed: u64, now_ms: u64) {
        if !self.is_current {
            return;
        }
        // The last checkpoint gives way while others are near. So after a quiet moment it is the last message before.
        let mut latest = self.checkpoints.iter().rev().map(|at| at.at_ms);
        if let (Some(last), Some(before)) = (latest.next(), latest.next())
            && now_ms.saturating_sub(last) < INTERVAL_MS
            && last.saturating_sub(before) < INTERVAL_MS
        {
            self.checkpoints.pop_back();
        }
        if self.checkpoints.len() == CHECKPOINTS_MAX {
            self.checkpoints.pop_front();
        }
        self.checkpoints.push_back(Checkpoint {
            stream,
            feed,
            at_ms: now_ms,
        });
    }

    /// The last message of a namespace that a reader of its whole feed has. It reveals no more about other namespaces
    /// than the gaps between the sequences of the feed do.
    pub(crate) fn seen(&self, namespace: NamespaceId) -> u64 {
        self.last.get(&namespace).copied().unwrap_or(self.opened_at)
    }

    /// The sequence after which the feed has everything for a reader of `namespace` who has all up to the message
    /// `seen`. `feed` is as in [`Self::passed`], now. `None` if that is not known any more.
    pub(crate) fn resume(&self, namespace: NamespaceId, seen: u64, feed: u64) -> Option<u64> {
        if !self.is_current {
            return None;
        }
        if seen >= self.seen(namespace) {
            return Some(feed);
        }
        let after = self.checkpoints.partition_point(|at| at.stream <= seen);
        let last = self.checkpoints.get(after.checked_sub(1)?)?;
        Some(last.feed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: NamespaceId = NamespaceId(1);
    const B: NamespaceId = NamespaceId(2);

    #[test]
    fn a_reader_begins_at_the_last_checkpoint_that_it_has_passed() {
        let mut moves = Moves::default();
        moves.begin(10);
        assert_eq!(moves.resume(A, 10, 90), None, "the end is not reached");
        moves.reached_end();
        let applied = [(11, 100, 0), (12, 110, 100), (13, 120, 150), (14, 130, 500)];
        for (stream, feed, now_ms) in applied {
            moves.applied(A, stream);
            moves.passed(stream, feed, now_ms);
        }
        assert_eq!(moves.seen(A), 14);
        assert_eq!(moves.resume(A, 14, 140), Some(140), "it has everything");
        assert_eq!(moves.resume(A, 13, 140), Some(120), "before a quiet moment");
        assert_eq!(moves.resume(A, 12, 140), Some(100), "too near to others");
        assert_eq!(moves.resume(A, 10, 140), None, "before the first");
        assert_eq!(
            moves.resume(B, 10, 140),
            Some(140),
            "nothing happened there"
        );
        assert_eq!(moves.resume(B, 9, 140), None);
    }
}
