//! Appends and statistics updates that wait for the next commit. One `fdatasync` serves all of them.

use std::time::Instant;

use refrain_protocol::ApiError;

use crate::writer::outcome::CommitOutcome;
use crate::writer::requests::{Append, PendingTokens, Reply, SavedStatistics, StatisticsUpdate};

/// Updates that are enough to commit at once, before the interval is over.
const UPDATES_MAX: usize = 512;

/// The caller of an append, who waits for its commit.
struct WaitingCaller {
    reply: Reply<Vec<u32>>,
    arrived: Instant,
    _tokens: PendingTokens,
}

/// Everything that the next commit will contain.
#[derive(Default)]
pub(super) struct CommitQueue {
    appends: Vec<Append>,
    /// The callers of the appends, in the same order.
    callers: Vec<WaitingCaller>,
    statistics: Vec<StatisticsUpdate>,
    /// The callers of the statistics updates, in the same order.
    savers: Vec<Reply<SavedStatistics>>,
    /// Updates of all appends. A statistics update counts as one.
    updates: usize,
}

impl CommitQueue {
    pub(super) fn add(&mut self, append: Append, tokens: PendingTokens, reply: Reply<Vec<u32>>) {
        self.updates += append.updates.len();
        self.appends.push(append);
        self.callers.push(WaitingCaller {
            reply,
            arrived: Instant::now(),
            _tokens: tokens,
        });
    }

    pub(super) fn add_statistics(
        &mut self,
        update: StatisticsUpdate,
        reply: Reply<SavedStatistics>,
    ) {
        self.updates += 1;
        self.statistics.push(update);
        self.savers.push(reply);
    }

    /// Whether there is enough for a commit before the interval is over.
    pub(super) fn is_full(&self) -> bool {
        self.updates >= UPDATES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.appends.is_empty() && self.statistics.is_empty()
    }

    pub(super) fn appends(&self) -> &[Append] {
        &self.appends
    }

    pub(super) fn statistics(&self) -> &[StatisticsUpdate] {
        &self.statistics
    }

    /// Answers all callers. One who would have added a namespace too many gets the error of `too_many`; `observe`
    /// gets the seconds that each append took.
    pub(super) fn answer(
        self,
        outcome: Result<CommitOutcome, ApiError>,
        too_many: impl Fn() -> ApiError,
        observe: impl Fn(f64),
    ) {
        let (lengths, saved) = match outcome {
            Ok(outcome) => (
                outcome.lengths.into_iter().map(Ok).collect(),
                outcome.statistics.into_iter().map(Ok).collect(),
            ),
            Err(error) => (
                vec![Err(error.clone()); self.callers.len()],
                vec![Err(error); self.savers.len()],
            ),
        };
        let saved: Vec<Result<Option<SavedStatistics>, ApiError>> = saved;
        for (reply, saved) in self.savers.into_iter().zip(saved) {
            let _ = reply.send(saved.and_then(|saved| saved.ok_or_else(&too_many)));
        }
        let lengths: Vec<Result<Option<Vec<u32>>, ApiError>> = lengths;
        for (caller, lengths) in self.callers.into_iter().zip(lengths) {
            observe(caller.arrived.elapsed().as_secs_f64());
            let answer = lengths.and_then(|lengths| lengths.ok_or_else(&too_many));
            let _ = caller.reply.send(answer);
        }
    }
}
