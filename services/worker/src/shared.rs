//! The state that the driver, the handle and the heartbeats of a worker share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::chunk::OutputSink;
use crate::config::WorkerConfig;
use crate::metrics::WorkerMetrics;

/// The state that the driver, the handle and the heartbeats of a worker share.
pub(crate) struct Shared {
    pub(crate) config: WorkerConfig,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) sink: OutputSink,
    /// Whether the engine answered last time.
    pub(crate) engine_ready: AtomicBool,
}

impl Shared {
    /// Records whether the engine answers.
    pub(crate) fn set_engine_ready(&self, is_ready: bool) {
        self.engine_ready.store(is_ready, Ordering::Relaxed);
    }

    /// How long a reader may stall before its chunk ends.
    pub(crate) fn reader_stall_max(&self) -> Duration {
        Duration::from_millis(self.config.reader_stall_ms_max)
    }
}
