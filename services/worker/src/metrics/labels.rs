//! The label values of metrics that have a fixed set of them.

/// The limits whose rejections are counted. Every limit is registered at the start, since a rate over a counter that
/// does not exist yet shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectionLimit {
    /// All slots were taken.
    RunningMax,
    /// A newer lease of the request was known.
    Epoch,
    /// The worker drains.
    Draining,
    /// The circuit breaker of a streaming engine was open.
    Breaker,
    /// The process had no free file descriptor for a call to its engine.
    Descriptors,
    /// The reader of a chunk stalled for too long.
    ReaderStall,
}

impl RejectionLimit {
    /// The label value.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            RejectionLimit::RunningMax => "running_max",
            RejectionLimit::Epoch => "epoch",
            RejectionLimit::Draining => "draining",
            RejectionLimit::Breaker => "breaker",
            RejectionLimit::Descriptors => "descriptors",
            RejectionLimit::ReaderStall => "reader_stall_ms_max",
        }
    }

    /// The limit after this one. The compiler demands an arm for a new limit, so [`RejectionLimit::all`] cannot miss
    /// it.
    fn next(self) -> Option<Self> {
        match self {
            RejectionLimit::RunningMax => Some(RejectionLimit::Epoch),
            RejectionLimit::Epoch => Some(RejectionLimit::Draining),
            RejectionLimit::Draining => Some(RejectionLimit::Breaker),
            RejectionLimit::Breaker => Some(RejectionLimit::Descriptors),
            RejectionLimit::Descriptors => Some(RejectionLimit::ReaderStall),
            RejectionLimit::ReaderStall => None,
        }
    }

    /// All limits.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        std::iter::successors(Some(RejectionLimit::RunningMax), |limit| limit.next())
    }
}

/// The ways in which a chunk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkOutcome {
    /// The output reached a stop token.
    Stop,
    /// The output reached its maximum length.
    Length,
    /// The chunk reached its token limit.
    ChunkLimit,
    /// The slot was needed by another tenant, or the reader stalled.
    GaveWay,
    /// The worker drained.
    Evacuated,
    /// The request moved to the fallback worker.
    Transferred,
    /// The reader needed no more of the output.
    Cut,
    /// The reader left.
    Cancelled,
    /// The request timed out.
    Overdue,
    /// A newer lease of the request arrived.
    TakenOver,
    /// The engine failed.
    Failed,
}

impl ChunkOutcome {
    /// The label value.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ChunkOutcome::Stop => "stop",
            ChunkOutcome::Length => "length",
            ChunkOutcome::ChunkLimit => "chunk_limit",
            ChunkOutcome::GaveWay => "gave_way",
            ChunkOutcome::Evacuated => "evacuated",
            ChunkOutcome::Transferred => "transferred",
            ChunkOutcome::Cut => "cut",
            ChunkOutcome::Cancelled => "cancelled",
            ChunkOutcome::Overdue => "overdue",
            ChunkOutcome::TakenOver => "taken_over",
            ChunkOutcome::Failed => "failed",
        }
    }
}
