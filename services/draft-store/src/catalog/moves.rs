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
//! The checkpoints are stored every few seconds, with the position in the stream. A replica that opens its log adds
//! the moment at which it ended. So a reader can move to one that was just restarted. The last message of each
//! namespace is stored as well, so a reader of one in which nothing has happened for long has everything.

use std::collections::{HashMap, VecDeque};

use refrain_protocol::NamespaceId;

use crate::record::replication::{Checkpoint, CheckpointsRecord};

/// Checkpoints are no nearer to each other than this, in milliseconds, but for the last two. A reader gets at most
/// that much once more.
const INTERVAL_MS: u64 = 200;

/// Older checkpoints are further apart: by one part in this many of their age. A reader who comes later gets more
/// once more.
const AGE_SHARE: u64 = 8;

/// Most checkpoints, which is an hour of them at least, and days as a rule. They fit into one record.
const CHECKPOINTS_MAX: usize = 160;

/// How often they are stored, in milliseconds. After a crash a reader gets at most that much once more.
const STORE_INTERVAL_MS: u64 = 5_000;

/// The recent checkpoints, and the last message of each namespace.
#[derive(Default)]
pub(crate) struct Moves {
    checkpoints: VecDeque<Checkpoint>,
    /// Sequence of the last message that was applied, by namespace.
    last: HashMap<NamespaceId, u64>,
    /// Sequence of the last message when this replica opened its log, or had joined.
    opened_at: u64,
    /// Whether all that is here comes from the stream up to the position, or is still to be sent. A replica that
    /// joins takes over what came later than the message at which it goes on, so it first has to reach the end of
    /// the stream.
    is_current: bool,
    /// When the checkpoints were last stored.
    stored_ms: Option<u64>,
}

impl Moves {
    /// Begins anew at a message, before the end of the stream is reached.
    pub(crate) fn begin(&mut self, stream: u64) {
        *self = Moves {
            opened_at: stream,
            ..Moves::default()
        };
    }

    /// Goes on with checkpoints that were stored, after [`Self::begin`]. A replica only stores some while it is
    /// current.
    pub(crate) fn restore(&mut self, stored: Vec<Checkpoint>) {
        self.checkpoints = stored.into();
        self.is_current = true;
    }

    /// Notes the moment at which the log was opened. `feed` is as in [`Self::passed`].
    pub(crate) fn open(&mut self, feed: u64) {
        if !self.is_current {
            return;
        }
        // Nothing is after the end of the feed, and a cursor there would be one of changes that were lost.
        for checkpoint in &mut self.checkpoints {
            checkpoint.feed = checkpoint.feed.min(feed);
        }
        // The clock is not known yet, and the log was not closed before its last checkpoint.
        let at_ms = self.checkpoints.back().map_or(0, |last| last.at_ms);
        self.push(Checkpoint {
            stream: self.opened_at,
            feed,
            at_ms,
        });
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
        let is_known = |last: &Checkpoint| (last.stream, last.feed) == (stream, feed);
        if !self.is_current || self.checkpoints.back().is_some_and(is_known) {
            return;
        }
        // The last checkpoint gives way while others are near. So after a quiet moment it is the last message before.
        let mut latest = self.checkpoints.iter().rev().map(|at| at.at_ms);
        if let (Some(last), Some(before)) = (latest.next(), latest.next())
            && now_ms.saturating_sub(last) < INTERVAL_MS
            && last.saturating_sub(before) < INTERVAL_MS
        {
            self.checkpoints.pop_back();
        } else {
            self.thin(now_ms);
        }
        self.push(Checkpoint {
            stream,
            feed,
            at_ms: now_ms,
        });
    }

    fn push(&mut self, checkpoint: Checkpoint) {
        if self.checkpoints.len() == CHECKPOINTS_MAX {
            self.checkpoints.pop_front();
        }
        self.checkpoints.push_back(checkpoint);
    }

    /// Drops checkpoints whose neighbours are near to each other for their age.
    fn thin(&mut self, now_ms: u64) {
        let mut kept: VecDeque<Checkpoint> = VecDeque::with_capacity(self.checkpoints.len() + 1);
        let mut checkpoints = self.checkpoints.iter().copied().peekable();
        while let Some(checkpoint) = checkpoints.next() {
            let is_near = match (kept.back(), checkpoints.peek()) {
                (Some(before), Some(after)) => {
                    let apart_ms = now_ms.saturating_sub(after.at_ms) / AGE_SHARE;
                    after.at_ms.saturating_sub(before.at_ms) < apart_ms
                }
                _ => false,
            };
            if !is_near {
                kept.push_back(checkpoint);
            }
        }
        drop(checkpoints);
        self.checkpoints = kept;
    }

    /// The namespaces of which a message was applied since [`Self::begin`].
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        self.last.keys().copied()
    }

    /// Whether the checkpoints are to be stored now, and then notes that they are.
    pub(crate) fn take_due(&mut self, now_ms: u64) -> bool {
        let is_due = self
            .stored_ms
            .is_none_or(|stored_ms| now_ms.saturating_sub(stored_ms) >= STORE_INTERVAL_MS);
        if !self.is_current || !is_due {
            return false;
        }
        self.stored_ms = Some(now_ms);
        true
    }

    /// The checkpoints as they are stored.
    pub(crate) fn record(&self) -> CheckpointsRecord {
        CheckpointsRecord(self.checkpoints.iter().copied().collect())
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
        moves.open(85);
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

    #[test]
    fn checkpoints_outlive_a_restart_and_one_is_added() {
        let mut moves = Moves::default();
        moves.begin(10);
        assert!(!moves.take_due(0), "a replica that joins stores none");
        moves.reached_end();
        moves.applied(A, 11);
        moves.passed(11, 100, 0);
        moves.applied(B, 12);
        moves.passed(12, 110, 1_000);
        assert!(moves.take_due(1_000) && !moves.take_due(1_001));
        let CheckpointsRecord(stored) = moves.record();
        let mut opened = Moves::default();
        opened.begin(14);
        opened.restore(stored);
        opened.open(130);
        assert_eq!(opened.resume(A, 15, 140), Some(140), "ahead of this one");
        assert_eq!(opened.resume(A, 13, 140), Some(110));
        assert_eq!(opened.resume(A, 11, 140), Some(100), "a quiet namespace");
        opened.applied(A, 20);
        opened.passed(20, 200, 2_000);
        assert_eq!(opened.resume(A, 14, 200), Some(130), "when it was opened");
    }

    #[test]
    fn old_checkpoints_are_far_apart_and_never_too_far() {
        let mut moves = Moves::default();
        moves.reached_end();
        let day_ms = 24 * 3600 * 1_000;
        for (stream, now_ms) in (0..day_ms).step_by(100).enumerate() {
            moves.passed(stream as u64, stream as u64, now_ms);
        }
        let CheckpointsRecord(kept) = moves.record();
        assert!(kept.len() < CHECKPOINTS_MAX, "{}", kept.len());
        for pair in kept.windows(2) {
            let age_ms = day_ms - pair[0].at_ms;
            let apart_ms = pair[1].at_ms - pair[0].at_ms;
            assert!(
                apart_ms <= (age_ms / AGE_SHARE).max(2 * INTERVAL_MS),
                "{apart_ms} at the age of {age_ms}"
            );
        }
        let stored = crate::codec::seal(b"w", &moves.record());
        assert!(stored.len() <= crate::codec::VALUE_BYTES_MAX);
    }
}
