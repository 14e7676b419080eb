//! The request between two chunks, and its next chunk.

use std::time::Instant;

use refrain_protocol::chunk::{ChunkRequest, ParkedContext, StepCounts};

use super::{ActiveRequest, PendingStep};

impl ActiveRequest {
    /// Names the context of the request as it is now. No token is hashed twice.
    pub(crate) fn parked_context(&mut self) -> ParkedContext {
        let hashed = self.hasher.context_len();
        self.hasher.extend(&self.text[hashed..]);
        ParkedContext {
            epoch: self.request.epoch,
            tokens: self.text.len() as u32,
            hash: self.hasher.whole(),
        }
    }

    /// Whether the chunk goes on with a request that was parked here.
    pub(crate) fn was_parked(&self) -> bool {
        self.was_parked
    }

    /// Begins the next chunk of the request. Its text, its indexes, its form and the engine's session go on as they
    /// are, if there is a session; the rest counts from the start of a chunk.
    pub(crate) fn resume(self, request: ChunkRequest, has_session: bool, now: Instant) -> Self {
        let mut running = self;
        let before = std::mem::replace(&mut running.request, request);
        running.request.sampling = before.sampling;
        running.request.prompt_len = before.prompt_len;
        running.was_parked = true;
        running.start_len = running.text.len() as u32;
        if !has_session {
            running.engine_len = 0;
        }
        // The forward pass of the last token is still to come.
        running.cached_tokens = running.engine_len.saturating_sub(1);
        running.step = PendingStep::default();
        running.counts = StepCounts::default();
        running.suffix_emitted = 0;
        running.sequence = 0;
        running.started_at = now;
        running.first_token_at = None;
        running.first_step_tokens = 0;
        running.last_token_at = None;
        running.reopened = 0;
        running
    }
}
