//! The tokens before a position, and what they change about its logits.
//!
//! All of it follows from the tokens alone: those of the text, and those of the path through a draft tree. So a node
//! of a tree gets the same logits as the same place in plain decoding.

use std::collections::{HashMap, HashSet};

use refrain_protocol::TokenId;
use refrain_protocol::engine::Sampling;

/// The prompt and the output before a position. It is empty for requests that do not look at them.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The tokens after the prompt of the session, forced ones included.
    written: Vec<TokenId>,
    /// Number of forced tokens. They count as prompt.
    forced: usize,
    prompt: HashSet<TokenId>,
    /// How often the output has each of its tokens.
    counts: HashMap<TokenId, u32>,
}

impl History {
    /// Reads the text of a session, whose first `prompt_len` tokens are its prompt.
    pub(crate) fn new(sampling: &Sampling, text: &[TokenId], prompt_len: usize) -> Self {
        let mut history = History {
            forced: sampling.forced_output.len(),
            ..History::default()
        };
        if sampling.depends_on_text() {
            let (prompt, written) = text.split_at(prompt_len.min(text.len()));
            if sampling.repetition_penalty != 1.0 {
                history.prompt.extend(prompt);
            }
            for token in written {
                history.push(sampling, *token);
            }
        }
        history
    }

    /// Adds the next token.
    pub(crate) fn push(&mut self, sampling: &Sampling, token: TokenId) {
        if !sampling.depends_on_text() {
            return;
        }
        if self.written.len() < self.forced {
            self.prompt.insert(token);
        } else {
            *self.counts.entry(token).or_default() += 1;
        }
        self.written.push(token);
    }

    /// The token that is emitted next instead of a sampled one.
    pub(crate) fn forced(&self, sampling: &Sampling) -> Option<TokenId> {
        sampling.forced_output.get(self.written.len()).copied()
    }

    /// The output without forced tokens.
    fn output(&self) -> &[TokenId] {
        self.written.get(self.forced..).unwrap_or_default()
    }

    /// Changes the logits of the next position.
    pub(super) fn adjust(&self, sampling: &Sampling, logits: &mut [f32]) {
        let mut change = |token: TokenId, change: &dyn Fn(f32) -> f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = change(*logit);
            }
        };
        let never = |_| f32::NEG_INFINITY;
        for word in &sampling.bad_tokens {
            if let Some((last, before)) = word.split_last()
                && self.output().ends_with(before)
            {
                change(*last, &never);
            }
        }
        if self.output().len() < sampling.min_tokens as usize {
            for token in &sampling.stop_token_ids {
                change(*token, &never);
            }
        }
        for (token, bias) in &sampling.logit_bias {
            change(*token, &|logit| logit + bias);
        }
        let repetition = sampling.repetition_penalty;
        if repetition != 1.0 {
            let own = self
                .counts
                .keys()
                .filter(|token| !self.prompt.contains(token));
            for token in self.prompt.iter().chain(own) {
                change(*token, &|logit| match logit > 0.0 {
                    true => logit / repetition,
                    false => logit * repetition,
                });
            }
        }
        let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
        if presence != 0.0 || frequency != 0.0 {
            for (token, count) in &self.counts {
                change(*token, &|logit| {
                    logit - presence - frequency * *count as f32
                });
            }
        }
    }
}
