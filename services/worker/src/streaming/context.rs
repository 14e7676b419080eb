//! Everything that the chunks of a streaming engine share.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::chunk::{DraftRules, Speculation};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::token_of;

use super::form_phase::{FormPhase, in_phase};
use super::running_chunks::RunningChunks;
use super::step_gaps::StepGaps;
use crate::chunk::ChunkEnding;
use crate::config::EngineConfig;
use crate::engine::{AttachedDocument, CircuitBreaker, GenerateRequest, StreamingEngine};
use crate::metrics::RejectionLimit;
use crate::running::ActiveRequest;
use crate::shared::Shared;

/// Everything that the chunks of a streaming engine share.
pub(crate) struct StreamContext {
    pub(super) shared: Arc<Shared>,
    pub(super) engine: Arc<dyn StreamingEngine>,
    breaker: Mutex<CircuitBreaker>,
    pub(super) step_gaps: Mutex<StepGaps>,
    /// Number of streams that have sent a token.
    pub(super) active_streams: Arc<AtomicU32>,
    /// The chunks that run.
    pub(super) chunks: RunningChunks,
}

impl StreamContext {
    pub(crate) fn new(shared: Arc<Shared>, engine: Arc<dyn StreamingEngine>) -> Self {
        let config = &shared.config.engine;
        let breaker = CircuitBreaker::new(
            config.breaker_failures_max,
            Duration::from_millis(config.breaker_open_ms),
        );
        shared.metrics.breaker(false);
        StreamContext {
            shared,
            engine,
            breaker: Mutex::new(breaker),
            step_gaps: Mutex::default(),
            active_streams: Arc::default(),
            chunks: RunningChunks::default(),
        }
    }

    /// The engine's section of the configuration.
    pub(super) fn config(&self) -> &EngineConfig {
        &self.shared.config.engine
    }

    /// The engine call that continues the chunk.
    pub(super) fn request(
        &self,
        running: &ActiveRequest,
        phase: FormPhase,
    ) -> Result<GenerateRequest, ApiError> {
        let request = &running.request;
        let config = self.config();
        let left = running.may_emit();
        let attached = match config.attached {
            true => Some(AttachedDocument {
                token: token_of(&request.namespace).map_err(ApiError::internal)?,
                issued_at_s: request.namespace.issued_at_s,
                group: request.group.clone(),
                document: running.document.id,
                epoch: request.epoch,
                drafts: match request.speculation {
                    Speculation::Off => DraftRules::NO_DRAFTS,
                    _ => request.drafts,
                },
            }),
            false => None,
        };
        let request = GenerateRequest {
            request: request.request,
            call: refrain_service_kit::random::u64()?,
            namespace: running.namespace,
            tokens: running.text.tokens().to_vec(),
            prompt_len: running.text.prompt_len(),
            tokens_max: request.chunk_tokens.unwrap_or(left).clamp(1, left),
            sampling: request.sampling.clone(),
            priority: config.pass_priority.then_some(request.urgency.priority),
            attached,
        };
        request.check_continuation()?;
        Ok(in_phase(request, phase))
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
    pub(super) fn engine_works(&self) {
        self.shared.set_engine_ready(true);
        self.breaker.lock().succeeded();
        self.shared.metrics.breaker(false);
    }

    /// Records a failure of the engine. Returns the ending that it means for the chunk.
    pub(super) fn engine_failed(&self, error: ApiError) -> ChunkEnding {
        if error.kind == ErrorKind::InvalidRequest {
            // The engine refused the request, so it works.
            self.engine_works();
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
