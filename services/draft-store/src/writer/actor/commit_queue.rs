//! Appends and statistics updates that wait for the next commit.

use std::time::Instant;

use actix::SpawnHandle;

use crate::writer::requests::{Append, PendingTokens, Reply, SavedStatistics, StatisticsUpdate};

/// The caller of an append, who waits for its commit.
pub(super) struct WaitingCaller {
    pub(super) reply: Reply<Vec<u32>>,
    pub(super) arrived: Instant,
    pub(super) _tokens: PendingTokens,
}

/// Everything that the next commit will contain.
#[derive(Default)]
pub(super) struct CommitQueue {
    pub(super) appends: Vec<Append>,
    /// The callers of the appends, in the same order.
    pub(super) callers: Vec<WaitingCaller>,
    pub(super) statistics: Vec<StatisticsUpdate>,
    /// The callers of the statistics updates, in the same order.
    pub(super) savers: Vec<Reply<SavedStatistics>>,
    /// Updates of all appends. A statistics update counts as one.
    pub(super) updates: usize,
    pub(super) timer: Option<SpawnHandle>,
}
