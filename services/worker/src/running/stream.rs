//! A chunk whose engine generates by itself.

use std::time::Instant;

use refrain_protocol::engine::{StepOutput, TokenLogprob};
use refrain_protocol::{ApiError, TokenId};

use super::{Absorbed, EngineLimits, Running};

impl Running {
    /// Prompt and output.
    pub(crate) fn text(&self) -> &[u32] {
        &self.text
    }

    /// Tokens that the chunk's engine may emit at most, chunk limits apart.
    pub(crate) fn may_emit(&self, limits: EngineLimits) -> u32 {
        self.emit_left(limits).max(1)
    }

    /// The engine is at work; of the text it had this much in its cache.
    pub(crate) fn begun(&mut self, cached_tokens: u32) {
        self.cached_tokens = cached_tokens;
    }

    /// Takes what the engine generated. What goes past a stop id or a limit is dropped: the chunk ends there.
    ///
    /// # Errors
    /// An answer that no engine may give.
    pub(crate) fn absorb_generated(
        &mut self,
        mut tokens: Vec<TokenId>,
        mut logprobs: Option<Vec<TokenLogprob>>,
        limits: EngineLimits,
        now: Instant,
    ) -> Result<Absorbed, ApiError> {
        let stop_ids = &self.request.sampling.stop_token_ids;
        let stop = tokens.iter().position(|token| stop_ids.contains(token));
        let most = self.may_emit(limits) as usize;
        let kept = stop.map_or(tokens.len(), |at| at + 1).min(most);
        tokens.truncate(kept);
        if let Some(logprobs) = &mut logprobs {
            logprobs.truncate(kept);
        }
        self.sent_len = self.text.len() as u32;
        self.max_emit = most as u32;
        let output = StepOutput {
            text_len: self.sent_len + kept as u32,
            stopped: stop.is_some_and(|at| at < kept),
            emitted: tokens,
            accepted_nodes: Vec::new(),
            self_drafted: 0,
            agreed_nodes: Vec::new(),
            cached_tokens: self.cached_tokens,
            logprobs,
        };
        let absorbed = self.absorb(output, true, 0, limits, now)?;
        absorbed.ok_or_else(|| ApiError::internal("a step that sampled came to nothing"))
    }
}
