//! Appends and statistics updates that wait for the next commit.

use std::time::Instant;

use actix::SpawnHandle;
use refrain_protocol::ApiError;
use tokio::sync::oneshot;

use crate::writer::messages::PendingTokens;
use crate::writer::requests::{Append, SavedStatistics, StatisticsUpdate};

/// An append that waits for its commit.
pub(super) struct WaitingAppend {
    pub(super) append: Append,
    pub(super) reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    pub(super) arrived: Instant,
    pub(super) _tokens: PendingTokens,
}

/// A statistics update that waits for its commit.
pub(super) struct WaitingStatistics {
    pub(super) update: StatisticsUpdate,
    pub(super) reply: oneshot::Sender<Result<SavedStatistics, ApiError>>,
}

/// Everything that the next commit will contain.
#[derive(Default)]
pub(super) struct CommitQueue {
    pub(super) pending: Vec<WaitingAppend>,
    pub(super) statistics: Vec<WaitingStatistics>,
    /// Updates of all appends. A statistics update counts as one.
    pub(super) updates: usize,
    pub(super) timer: Option<SpawnHandle>,
}
