//! Opening a stream of the engine, with retries.

use std::pin::pin;
use std::time::Duration;

use refrain_protocol::ErrorKind;
use refrain_protocol::chunk::ChunkEvent;
use refrain_service_kit::backoff::Backoff;

use super::context::{StreamContext, is_out_of_descriptors};
use super::form_phase::FormPhase;
use super::interrupts::Interrupts;
use super::timeout::TokenTimeout;
use crate::chunk::{ActiveChunk, ChunkEnding, Events, reserve};
use crate::engine::GeneratedStream;
use crate::running::ActiveRequest;

/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

impl StreamContext {
    /// Opens a stream that continues the chunk's text.
    ///
    /// # Errors
    /// The chunk ends: it was interrupted, it timed out, or the engine failed.
    pub(super) async fn open(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        timeout: &mut TokenTimeout,
        phase: FormPhase,
    ) -> Result<GeneratedStream, ChunkEnding> {
        let ActiveChunk { running, watch, .. } = chunk;
        let events = watch.reader.events().clone();
        let begun_in = watch.begun_in();
        let mut opening = pin!(self.open_with_retries(running, phase, begun_in, &events));
        loop {
            let opened = tokio::select! {
                biased;
                ending = interrupts.wait() => return Err(ending),
                opened = timeout.due.bound(opening.as_mut()) => opened,
            };
            match opened {
                Some(opened) => return opened,
                None => self.check_time(watch, timeout)?,
            }
        }
    }

    /// Calls the engine, and repeats the call while that may help. Before the request's first token, retries draw on
    /// the request's budget. After it, only this worker's own limit counts, anew after each token.
    async fn open_with_retries(
        &self,
        running: &ActiveRequest,
        phase: FormPhase,
        begun_in: u64,
        events: &Events,
    ) -> Result<GeneratedStream, ChunkEnding> {
        let failed = |error| self.engine_failed(error);
        let first = Duration::from_millis(self.config().retry_backoff_ms);
        let mut backoff = Backoff::new(first, RETRY_PAUSE_MAX);
        let mut attempts = 1;
        let has_output = !running.text.output().is_empty();
        let attempts_max = match has_output {
            true => self.config().attempts_max,
            false => {
                let left = running.request.budget.attempts;
                left.min(self.config().attempts_max)
            }
        };
        self.admit_call().map_err(failed)?;
        loop {
            let request = self.request(running, phase).map_err(failed)?;
            let error = match self.engine.generate(request).await {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            if self.was_held(begun_in).await {
                // The order came during the call, and may well be the reason.
                continue;
            }
            if error.kind == ErrorKind::Overloaded {
                // A full engine works.
                self.engine_works();
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
            self.shared.metrics.families.engine_retries.inc();
            if !has_output {
                let permit = reserve(events, self.shared.reader_stall_max()).await?;
                permit.send(Ok(ChunkEvent::Retry));
            }
            let pause = backoff.pause();
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            tokio::time::sleep(pause.max(hint).min(RETRY_PAUSE_MAX)).await;
            // This call's own error tells more than the breaker's.
            self.admit_call().map_err(|_| failed(error))?;
        }
    }
}
