//! Asks the engine for a stream, and keeps count of how it takes that.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkEvent;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::token_of;

use super::Chunks;
use super::listen::Outcome;
use super::outside::Outside;
use super::patience::Patience;
use crate::decode::entry::Entry;
use crate::engine::{Breaker, GenerateRequest, GeneratedStream, Keeping};
use crate::running::{EngineLimits, Running};

/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Whether a call was not made for want of descriptors here.
fn is_own_want(error: &ApiError) -> bool {
    error.has_code(code::OUT_OF_DESCRIPTORS)
}

impl Chunks {
    /// Starts a stream behind what has been said.
    pub(super) async fn open(
        &self,
        entry: &mut Entry,
        outside: &mut Outside,
        patience: &mut Patience,
    ) -> Result<GeneratedStream, Outcome> {
        let started = tokio::select! {
            biased;
            over = outside.interrupts(&entry.running) => return Err(over),
            started = patience.bound(self.begin(entry)) => started,
        };
        started.unwrap_or_else(|| Err(self.out_of_patience(entry, patience)))
    }

    /// Nothing came in time.
    pub(super) fn out_of_patience(&self, entry: &Entry, patience: &Patience) -> Outcome {
        match entry.overdue(Instant::now()) {
            Some(error) => Outcome::Overdue(error),
            None => self.failed(patience.spent()),
        }
    }

    /// Asks the engine, again while that may help. Before the request's first token that takes from its budget; behind it, only
    /// this worker's limit counts, from each token anew.
    async fn begin(&self, entry: &Entry) -> Result<GeneratedStream, Outcome> {
        let failed = |error| self.failed(error);
        let mut pause = Duration::from_millis(self.config.retry_backoff_ms);
        let mut attempts = 1;
        let has_output = !entry.running.output().is_empty();
        let attempts_max = match has_output {
            true => self.config.attempts_max,
            false => {
                let left = entry.running.request.budget.attempts;
                left.min(self.config.attempts_max)
            }
        };
        self.admit().map_err(failed)?;
        loop {
            let request = self.request(entry).map_err(failed)?;
            let error = match self.engine.generate(request).await {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            if error.kind == ErrorKind::Overloaded {
                // An engine that has no room is there.
                self.works();
            }
            // Another worker may have what this one lacks.
            let may_pass = !is_own_want(&error)
                && matches!(
                    error.kind,
                    ErrorKind::Unavailable | ErrorKind::Overloaded | ErrorKind::Upstream
                );
            if !may_pass || attempts >= attempts_max {
                return Err(failed(error));
            }
            attempts += 1;
            self.metrics.engine_retries.inc();
            if !has_output {
                self.tell(&entry.events, ChunkEvent::Retry).await?;
            }
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            tokio::time::sleep(pause.max(hint).min(RETRY_PAUSE_MAX)).await;
            pause = pause.saturating_mul(2);
            // What failed here says more than that others failed meanwhile.
            self.admit().map_err(|_| failed(error))?;
        }
    }

    /// What an engine that has the drafts inside is told of a request.
    fn keeping(&self, running: &Running) -> Result<Option<Keeping>, ApiError> {
        if !self.config.attached {
            return Ok(None);
        }
        let request = &running.request;
        Ok(Some(Keeping {
            token: token_of(&request.namespace).map_err(ApiError::internal)?,
            issued_at_s: request.namespace.issued_at_s,
            group: request.group.clone(),
            document: running.document(),
            epoch: request.epoch,
        }))
    }

    pub(super) fn request(&self, entry: &Entry) -> Result<GenerateRequest, ApiError> {
        let running = &entry.running;
        let left = running.may_emit(self.limits());
        Ok(GenerateRequest {
            request: running.request.request,
            call: refrain_service_kit::random::u64()?,
            namespace: running.namespace,
            tokens: running.text().to_vec(),
            prompt_len: running.request.prompt_len,
            tokens_max: running.request.chunk_tokens.unwrap_or(left).clamp(1, left),
            sampling: running.request.sampling.clone(),
            priority: self
                .config
                .pass_priority
                .then_some(running.request.urgency.priority),
            keeping: self.keeping(running)?,
        })
    }

    pub(super) fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_context: self.engine.capabilities().max_context,
            max_draft_tokens: 0,
        }
    }

    fn admit(&self) -> Result<(), ApiError> {
        let admitted = self.breaker().admit(Instant::now());
        admitted.map_err(|wait| {
            self.metrics
                .rejections
                .with_label_values(&["breaker"])
                .inc();
            ApiError::new(
                ErrorKind::Unavailable,
                "the engine has failed several times in a row and is left alone for a moment",
            )
            .with_code(code::ENGINE_BREAKER_OPEN)
            .with_retry_after_ms(wait.as_millis() as u64 + 1)
        })
    }

    /// The engine does what it should.
    pub(super) fn works(&self) {
        self.engine_ready.store(true, Ordering::Relaxed);
        self.breaker().succeeded();
    }

    pub(super) fn failed(&self, error: ApiError) -> Outcome {
        if error.kind == ErrorKind::InvalidRequest {
            // An engine that refuses a request is there.
            self.works();
        } else if error.kind == ErrorKind::Overloaded {
            // It may have got worse since: `begin` has told the breaker.
            self.metrics.engine_failures.inc();
            tracing::warn!("engine overloaded");
        } else if is_own_want(&error) {
            // The engine was not even asked.
            self.metrics
                .rejections
                .with_label_values(&["descriptors"])
                .inc();
            tracing::debug!(detail = error.detail, "no socket for a call to the engine");
        } else if !error.has_code(code::ENGINE_BREAKER_OPEN) {
            self.metrics.engine_failures.inc();
            // Its own words are not logged: they may repeat the request.
            tracing::warn!(kind = ?error.kind, code = error.code, detail = error.detail, "engine failed");
            if self.breaker().failed(Instant::now()) {
                tracing::warn!("engine keeps failing; leaving it alone for a moment");
            }
        }
        Outcome::Failed(error)
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
