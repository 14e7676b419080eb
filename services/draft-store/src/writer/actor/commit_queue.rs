//! Appends and statistics reports that wait for the next commit.

use std::time::Instant;

use actix::SpawnHandle;
use refrain_protocol::ApiError;
use tokio::sync::oneshot;

use crate::writer::messages::PendingTokens;
use crate::writer::requests::{Append, StatisticsReport};

/// An append that waits for its commit.
pub(super) struct WaitingAppend {
    pub(super) append: Append,
    pub(super) reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    pub(super) arrived: Instant,
    pub(super) _tokens: PendingTokens,
}

/// A statistics report that waits for its commit.
pub(super) struct WaitingReport {
    pub(super) report: StatisticsReport,
    pub(super) reply: oneshot::Sender<Result<Vec<u8>, ApiError>>,
}

/// Everything that the next commit will contain.
#[derive(Default)]
pub(super) struct CommitQueue {
    pub(super) pending: Vec<WaitingAppend>,
    pub(super) reports: Vec<WaitingReport>,
    /// Updates of all appends. A statistics report counts as one.
    pub(super) updates: usize,
    pub(super) timer: Option<SpawnHandle>,
}
