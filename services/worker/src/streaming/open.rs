//! Opening a stream of the engine, with retries.

use std::time::Duration;

use refrain_protocol::chunk::{ChunkEvent, DraftRules, Speculation};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::backoff::Backoff;
use refrain_service_kit::mesh::token_of;

use super::context::StreamContext;
use super::engine_health::is_out_of_descriptors;
use super::form_phase::{FormPhase, in_phase};
use crate::chunk::{ChunkEnding, Events, reserve};
use crate::engine::{AttachedDocument, GenerateRequest, GeneratedStream};
use crate::orders::Fate;
use crate::running::ActiveRequest;

/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The opening of a stream that continues the text of a chunk.
pub(super) struct Opening<'a> {
    pub(super) context: &'a StreamContext,
    pub(super) running: &'a ActiveRequest,
    pub(super) phase: FormPhase,
    /// The number of the pause in which the request began; 0: in none.
    pub(super) begun_in: u64,
    /// The reader, who is told of each retry before the first token.
    pub(super) events: Events,
}

impl Opening<'_> {
    /// Calls the engine, and repeats the call while that may help. Before the request's first token, retries draw on
    /// the request's budget. After it, only this worker's own limit counts, anew after each token.
    ///
    /// # Errors
    /// The chunk ends: the engine failed, or the reader left or stalled.
    pub(super) async fn open(self) -> Result<GeneratedStream, ChunkEnding> {
        let context = self.context;
        let (shared, health, config) = (&context.shared, &context.health, context.config());
        let failed = |error| health.failed(error);
        let first = Duration::from_millis(config.retry_backoff_ms);
        let mut backoff = Backoff::new(first, RETRY_PAUSE_MAX);
        let mut attempts = 1;
        let has_output = !self.running.text.output().is_empty();
        let attempts_max = match has_output {
            true => config.attempts_max,
            false => {
                let left = self.running.request.budget.attempts;
                left.min(config.attempts_max)
            }
        };
        health.admit_call().map_err(failed)?;
        loop {
            let request = self.request().map_err(failed)?;
            let error = match context.engine.generate(request).await {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            if self.was_held().await {
                // The order came during the call, and may well be the reason.
                continue;
            }
            if error.kind == ErrorKind::Overloaded {
                // A full engine works.
                health.works();
            }
            // Without free descriptors here, another worker may still have some.
            let may_pass = !is_out_of_descriptors(&error)
                && matches!(
                    error.kind,
                    ErrorKind::Unavailable | ErrorKind::Overloaded | ErrorKind::Upstream
                );
            if !may_pass || attempts >= attempts_max {
                return Err(failed(error));
            }
            attempts += 1;
            shared.metrics.families.engine_retries.inc();
            if !has_output {
                let permit = reserve(&self.events, shared.reader_stall_max()).await?;
                permit.send(Ok(ChunkEvent::Retry));
            }
            let pause = backoff.pause();
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            tokio::time::sleep(pause.max(hint).min(RETRY_PAUSE_MAX)).await;
            // This call's own error tells more than the breaker's.
            health.admit_call().map_err(|_| failed(error))?;
        }
    }

    /// The engine call that continues the chunk.
    fn request(&self) -> Result<GenerateRequest, ApiError> {
        let running = self.running;
        let request = &running.request;
        let config = self.context.config();
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
        Ok(in_phase(request, self.phase))
    }

    /// Waits until the chunk is not held any longer. Returns whether it was.
    async fn was_held(&self) -> bool {
        let orders = &self.context.shared.orders;
        let mut was_held = false;
        loop {
            let gate = orders.gate();
            if gate.fate(self.begun_in) != Fate::Held {
                return was_held;
            }
            was_held = true;
            orders.changed_since(gate.changes()).await;
        }
    }
}
