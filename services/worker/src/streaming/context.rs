//! Everything that the chunks of a streaming engine share.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use parking_lot::Mutex;

use super::engine_health::EngineHealth;
use super::primer::Primer;
use super::running_chunks::RunningChunks;
use super::step_gaps::{StepGaps, StreamClock};
use super::timeout::Moment;
use crate::config::EngineConfig;
use crate::engine::StreamingEngine;
use crate::shared::Shared;

/// Everything that the chunks of a streaming engine share.
pub(crate) struct StreamContext {
    pub(super) shared: Arc<Shared>,
    pub(super) engine: Arc<dyn StreamingEngine>,
    pub(super) health: EngineHealth,
    /// The primer of the engine's own drafts, if there is one.
    pub(super) primer: Option<Arc<Primer>>,
    step_gaps: Mutex<StepGaps>,
    /// Number of streams that have sent a token.
    pub(super) active_streams: Arc<AtomicU32>,
    /// The chunks that run.
    pub(super) chunks: RunningChunks,
}

impl StreamContext {
    pub(crate) fn new(
        shared: Arc<Shared>,
        engine: Arc<dyn StreamingEngine>,
        primer: Option<Arc<Primer>>,
    ) -> Self {
        StreamContext {
            health: EngineHealth::new(shared.clone()),
            shared,
            engine,
            primer,
            step_gaps: Mutex::default(),
            active_streams: Arc::default(),
            chunks: RunningChunks::default(),
        }
    }

    /// The engine's section of the configuration.
    pub(super) fn config(&self) -> &EngineConfig {
        &self.shared.config.engine
    }

    /// This moment.
    pub(super) fn moment(&self) -> Moment {
        Moment::at(&self.shared.orders.gate(), Instant::now())
    }

    /// Measures the engine's steps by the gaps between its events.
    pub(super) fn count_step(&self, clock: &mut StreamClock, now: Instant) {
        let batch = clock.batch();
        let mut gaps = self.step_gaps.lock();
        if let Some(gap) = gaps.record(&mut clock.last, now, batch) {
            self.shared.metrics.engine_step(gap.share_s, 0.0);
            if let Some((batch, seconds)) = gap.median {
                self.shared.metrics.streamed_step(batch, seconds);
            }
        }
    }
}
