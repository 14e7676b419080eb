//! The health of a streaming engine, as its chunks find it: whether it works, and whether calls to it are paused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use crate::chunk::ChunkEnding;
use crate::engine::CircuitBreaker;
use crate::metrics::RejectionLimit;
use crate::shared::Shared;

/// The health of a streaming engine, by its calls.
pub(super) struct EngineHealth {
    shared: Arc<Shared>,
    breaker: Mutex<CircuitBreaker>,
}

impl EngineHealth {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let config = &shared.config.engine;
        let breaker = CircuitBreaker::new(
            config.breaker_failures_max,
            Duration::from_millis(config.breaker_open_ms),
        );
        shared.metrics.breaker(false);
        EngineHealth {
            shared,
            breaker: Mutex::new(breaker),
        }
    }

    /// Asks the circuit breaker to admit a call.
    pub(super) fn admit_call(&self) -> Result<(), ApiError> {
        let admitted = self.breaker.lock().admit(Instant::now());
        admitted.map_err(|wait| {
            self.shared.metrics.reject(RejectionLimit::Breaker);
            ApiError::new(
                ErrorKind::Unavailable,
                "the engine keeps failing, so calls to it are paused",
            )
            .with_code(code::ENGINE_BREAKER_OPEN)
            .with_retry_after_ms(wait.as_millis() as u64 + 1)
        })
    }

    /// Records that the engine works.
    pub(super) fn works(&self) {
        self.shared.set_engine_ready(true);
        self.breaker.lock().succeeded();
        self.shared.metrics.breaker(false);
    }

    /// Records a failure of the engine. Returns the ending that it means for the chunk.
    pub(super) fn failed(&self, error: ApiError) -> ChunkEnding {
        if error.kind == ErrorKind::InvalidRequest {
            // The engine refused the request, so it works.
            self.works();
        } else if error.kind == ErrorKind::Overloaded {
            // A full engine works, and `open` has recorded that. Its state may have changed since, so this does not.
            self.shared.metrics.families.engine_failures.inc();
            tracing::warn!("engine overloaded");
        } else if self.shared.orders.gate().is_ordered() {
            // The order of a trainer may well be the reason. An engine that is lost fails after it as well.
            self.shared.metrics.families.engine_failures.inc();
            tracing::warn!(kind = ?error.kind, code = error.code, "engine failed during an order");
        } else if is_out_of_descriptors(&error) {
            // This process could not open a connection, so the engine has not failed.
            self.shared.metrics.reject(RejectionLimit::Descriptors);
            tracing::debug!(detail = error.detail, "no socket for a call to the engine");
        } else if !error.has_code(code::ENGINE_BREAKER_OPEN) {
            self.shared.metrics.families.engine_failures.inc();
            // The engine's message is not logged: it may repeat the request.
            tracing::warn!(kind = ?error.kind, code = error.code, detail = error.detail, "engine failed");
            if self.breaker.lock().failed(Instant::now()) {
                self.shared.metrics.breaker(true);
                tracing::warn!("the engine keeps failing; calls to it are paused");
            }
        }
        ChunkEnding::Failed(error)
    }
}

/// Whether a call was not made because this process has no free file descriptor.
pub(super) fn is_out_of_descriptors(error: &ApiError) -> bool {
    error.has_code(code::OUT_OF_DESCRIPTORS)
}
