//! The state that the driver, the handle and the heartbeats of a worker share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use refrain_protocol::chunk::ChunkCut;

use crate::chunk::{ActiveChunk, OutputSink};
use crate::config::WorkerConfig;
use crate::metrics::{ChunkOutcome, WorkerMetrics};
use crate::orders::Orders;
use crate::parking::Parking;
use crate::running::ActiveRequest;

/// The state that the driver, the handle and the heartbeats of a worker share.
pub(crate) struct Shared {
    pub(crate) config: WorkerConfig,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) sink: OutputSink,
    pub(crate) parking: Arc<Parking>,
    pub(crate) orders: Arc<Orders>,
    /// Whether the engine answered last time.
    pub(crate) engine_ready: AtomicBool,
}

impl Shared {
    /// Records whether the engine answers.
    pub(crate) fn set_engine_ready(&self, is_ready: bool) {
        self.engine_ready.store(is_ready, Ordering::Relaxed);
    }

    /// Shortens the output of a chunk that has just ended. Its request does not go on.
    pub(crate) fn cut_ended(&self, cut: ChunkCut) {
        self.parking.forget_lease(cut.lease);
        self.sink.cut_ended(cut);
    }

    /// Counts a chunk that has ended, parks its request if that goes on, and sends its last event. A reader that has
    /// seen the end finds all of this done. Returns a request that was not parked.
    pub(crate) fn close(&self, chunk: ActiveChunk, outcome: ChunkOutcome) -> Option<ActiveRequest> {
        let lease = chunk.lease;
        let (running, last) = chunk.into_parts();
        self.sink.count_chunk(&running, outcome);
        let left = match outcome {
            ChunkOutcome::ChunkLimit | ChunkOutcome::GaveWay => {
                self.parking.park(running, lease).err()
            }
            _ => Some(running),
        };
        if let (Some(running), true) = (&left, outcome.goes_on()) {
            self.sink.release(running);
        }
        last.send();
        left
    }

    /// How long a reader may stall before its chunk ends.
    pub(crate) fn reader_stall_max(&self) -> Duration {
        Duration::from_millis(self.config.reader_stall_ms_max)
    }
}
