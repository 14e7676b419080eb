//! The label values of metrics that have a fixed set of them.

use refrain_protocol::engine_order::EngineOrder;

refrain_service_kit::label_values! {
    /// The limits whose rejections are counted.
    pub(crate) enum RejectionLimit {
        /// All slots were taken.
        RunningMax = "running_max",
        /// A newer lease of the request was known.
        Epoch = "epoch",
        /// The worker drains.
        Draining = "draining",
        /// The circuit breaker of a streaming engine was open.
        Breaker = "breaker",
        /// The process had no free file descriptor for a call to its engine.
        Descriptors = "descriptors",
        /// The reader of a chunk stalled for too long.
        ReaderStall = "reader_stall_ms_max",
    }
}

refrain_service_kit::label_values! {
    /// The kinds of a trainer's orders.
    pub(crate) enum OrderKind {
        /// Tell the state.
        Report = "report",
        /// Take no steps.
        Pause = "pause",
        /// Go on.
        Resume = "resume",
        /// Empty the KV cache.
        FlushCache = "flush_cache",
        /// Replace the weights.
        LoadWeights = "load_weights",
        /// The weights have another version.
        SetVersion = "set_version",
        /// Pass a call on.
        PassOn = "pass_on",
    }
}

impl OrderKind {
    pub(crate) fn of(order: &EngineOrder) -> Self {
        match order {
            EngineOrder::Report => OrderKind::Report,
            EngineOrder::Pause { .. } => OrderKind::Pause,
            EngineOrder::Resume => OrderKind::Resume,
            EngineOrder::FlushCache => OrderKind::FlushCache,
            EngineOrder::LoadWeights { .. } => OrderKind::LoadWeights,
            EngineOrder::SetVersion { .. } => OrderKind::SetVersion,
            EngineOrder::PassOn(_) => OrderKind::PassOn,
        }
    }
}

refrain_service_kit::label_values! {
    /// The ways in which a chunk ends.
    pub(crate) enum ChunkOutcome {
        /// The output reached a stop token.
        Stop = "stop",
        /// The output reached its maximum length.
        Length = "length",
        /// The chunk reached its token limit.
        ChunkLimit = "chunk_limit",
        /// The slot was needed by another tenant, or the reader stalled.
        GaveWay = "gave_way",
        /// The worker drained.
        Evacuated = "evacuated",
        /// The request moved to the fallback worker.
        Transferred = "transferred",
        /// The reader needed no more of the output.
        Cut = "cut",
        /// The reader left.
        Cancelled = "cancelled",
        /// The request timed out.
        Overdue = "overdue",
        /// A trainer ordered that it ends.
        Aborted = "aborted",
        /// A newer lease of the request arrived.
        TakenOver = "taken_over",
        /// The engine failed.
        Failed = "failed",
    }
}

refrain_service_kit::label_values! {
    /// The fate of a request that is, or might be, parked between two chunks.
    pub(crate) enum ParkingOutcome {
        /// A chunk went on with the request.
        Resumed = "resumed",
        /// A chunk was to go on with a request that was not here any more.
        Gone = "gone",
        /// Its time was up.
        Expired = "expired",
        /// It made room for a newer one.
        Evicted = "evicted",
        /// Nobody needs it any more: its output has ended, it began anew, or the worker stops.
        Dropped = "dropped",
    }
}

refrain_service_kit::label_values! {
    /// The origins of the context of a chunk.
    pub(crate) enum ContextOrigin {
        /// The gateway sent it, and it was read and indexed.
        Sent = "sent",
        /// It was parked here.
        Parked = "parked",
    }
}

impl ChunkOutcome {
    /// Whether the request goes on under another lease.
    pub(crate) fn goes_on(self) -> bool {
        match self {
            ChunkOutcome::ChunkLimit
            | ChunkOutcome::GaveWay
            | ChunkOutcome::Evacuated
            | ChunkOutcome::Transferred
            | ChunkOutcome::Failed => true,
            ChunkOutcome::Stop
            | ChunkOutcome::Length
            | ChunkOutcome::Cut
            | ChunkOutcome::Cancelled
            | ChunkOutcome::Overdue
            | ChunkOutcome::Aborted
            | ChunkOutcome::TakenOver => false,
        }
    }
}
