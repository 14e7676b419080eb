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
