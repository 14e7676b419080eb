//! Verify calls in place of a stream, in drive mode.

use std::time::Instant;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::context::StreamContext;
use super::ending::ChunkEnding;
use super::form_phase::FormPhase;
use super::interrupts::Interrupts;
use crate::chunk::ActiveChunk;
use crate::drive::{ChunkDrive, VerifyCall};
use crate::engine::VerifyRequest;

impl StreamContext {
    /// Makes a verify call, and further ones as long as they pay. The chunk has no stream afterwards.
    pub(super) async fn make_verify_calls(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        drive: &mut ChunkDrive,
        first: Box<VerifyCall>,
    ) -> Result<(), ChunkEnding> {
        let mut next = Some(first);
        while let Some(call) = next {
            let request = VerifyRequest {
                text: self
                    .request(chunk, FormPhase::Bound)
                    .map_err(|error| self.engine_failed(error))?,
                draft: call.draft(),
                method: call.method,
            };
            let began = Instant::now();
            let due = self
                .moment()
                .due(self.config().call_ms_max, chunk.deadline());
            let verdict = tokio::select! {
                biased;
                ending = interrupts.wait() => return Err(ending),
                verdict = tokio::time::timeout_at(due, self.engine.verify(request)) => verdict,
            };
            if verdict.is_err()
                && let Some(error) = chunk.overdue(self.moment().working_time)
            {
                return Err(ChunkEnding::Overdue(error));
            }
            let verdict = verdict.unwrap_or_else(|_| {
                let message = "the engine did not judge a draft in time";
                Err(ApiError::new(ErrorKind::Timeout, message).with_code(code::ENGINE_TIMEOUT))
            });
            match &verdict {
                Ok(_) => self.engine_works(),
                // The next stream shows whether the engine works.
                Err(error) => {
                    tracing::debug!(kind = ?error.kind, code = error.code, "a verify call failed");
                }
            }
            let now = Instant::now();
            if let Some(judged) = drive.call_ended(call, verdict.as_ref().ok(), now - began) {
                let version = self.shared.orders.weight_version();
                let absorbed = chunk.running.absorb_judged(judged, version, now);
                let absorbed = absorbed.map_err(|error| self.engine_failed(error))?;
                drive.call_emitted(&absorbed.message.tokens);
                if let Some(end) = self.relay(chunk, interrupts, absorbed).await? {
                    return Err(ChunkEnding::Ended(end));
                }
            }
            next = drive.next_call(&chunk.running, false);
        }
        Ok(())
    }
}
