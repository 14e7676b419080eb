//! The request of a streaming engine: tokens that the engine generated.

use std::time::Instant;

use refrain_protocol::engine::{StepOutput, TokenLogprob};
use refrain_protocol::{ApiError, TokenId};

use super::{Absorbed, ActiveRequest, PendingStep};

impl ActiveRequest {
    /// Prompt and output.
    pub(crate) fn text(&self) -> &[u32] {
        &self.text
    }

    /// Maximum number of tokens that the engine may still emit, regardless of chunk limits.
    pub(crate) fn may_emit(&self) -> u32 {
        self.emit_left().max(1)
    }

    /// Records how much of the text was in the engine's cache when it began to read.
    pub(crate) fn found_in_cache(&mut self, tokens: u32) {
        self.cached_tokens = tokens;
    }

    /// Takes generated tokens. Tokens past a stop id or a limit are dropped: the chunk ends there.
    ///
    /// # Errors
    /// The engine broke its contract.
    pub(crate) fn absorb_generated(
        &mut self,
        tokens: Vec<TokenId>,
        logprobs: Option<Vec<TokenLogprob>>,
        weight_version: u64,
        now: Instant,
    ) -> Result<Absorbed, ApiError> {
        let output = self.within_limits(tokens, logprobs);
        let absorbed = self.absorb(output, weight_version, now)?;
        absorbed.ok_or_else(|| ApiError::internal("a step that sampled has no result"))
    }

    /// The output of a step that emitted these tokens, without those past a stop id or a limit.
    fn within_limits(
        &mut self,
        mut tokens: Vec<TokenId>,
        mut logprobs: Option<Vec<TokenLogprob>>,
    ) -> StepOutput {
        let stop_ids = &self.request.sampling.stop_token_ids;
        let stop = tokens.iter().position(|token| stop_ids.contains(token));
        let most = self.may_emit() as usize;
        let kept = stop.map_or(tokens.len(), |at| at + 1).min(most);
        tokens.truncate(kept);
        if let Some(logprobs) = &mut logprobs {
            logprobs.truncate(kept);
        }
        self.step = PendingStep {
            samples: true,
            sent_len: self.text.len() as u32,
            max_emit: most as u32,
            ..PendingStep::default()
        };
        StepOutput {
            text_len: self.step.sent_len + kept as u32,
            stopped: stop.is_some_and(|at| at < kept),
            emitted: tokens,
            accepted_nodes: Vec::new(),
            self_drafted: 0,
            agreed_nodes: Vec::new(),
            // If it was told before the first token. It is not told twice.
            cached_tokens: if self.engine_len == 0 {
                self.cached_tokens
            } else {
                0
            },
            logprobs,
        }
    }
}
