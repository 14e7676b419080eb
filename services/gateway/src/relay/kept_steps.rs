//! The steps of an output that are kept for an answer whose client wants to see them.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftScope, DraftSource, StepMessage};
use refrain_protocol::openai::{StepTrace, TracedDraft, TracedStep};
use refrain_tokenization::{Detokenizer, Tokenizer};

/// Most steps that are kept.
const STEPS_MAX: usize = 1_024;

/// The steps of an output, in order, at most `STEPS_MAX`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct KeptSteps {
    steps: Vec<KeptStep>,
    is_cut: bool,
}

/// A step that is kept.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeptStep {
    /// Since the head of the request.
    at: Duration,
    chunk: u64,
    tokens: Vec<TokenId>,
    scope: DraftScope,
    drafts: Vec<TracedDraft>,
}

impl KeptSteps {
    /// Keeps a step of which the first `kept` tokens are output. `at` counts from the head of the request. Returns
    /// the step, unless there are too many.
    pub(super) fn push(
        &mut self,
        at: Duration,
        chunk: u64,
        message: &StepMessage,
        kept: usize,
    ) -> Option<KeptStep> {
        if self.steps.len() >= STEPS_MAX {
            self.is_cut = true;
            return None;
        }
        let drafts = message.counts(kept).map(|(source, counts)| TracedDraft {
            source,
            drafted: counts.drafted,
            accepted: counts.accepted,
        });
        self.steps.push(KeptStep {
            at,
            chunk,
            tokens: message.tokens.iter().take(kept).copied().collect(),
            scope: message.scope,
            drafts: drafts
                .filter(|draft| draft.source != DraftSource::None)
                .collect(),
        });
        self.steps.last().cloned()
    }

    /// The steps as the answer shows them.
    pub(super) fn trace(&self, tokenizer: &Arc<Tokenizer>) -> StepTrace {
        let mut text = Detokenizer::new(tokenizer.clone());
        StepTrace {
            steps: self
                .steps
                .iter()
                .map(|step| step.traced(&mut text))
                .collect(),
            is_cut: self.is_cut,
        }
    }
}

impl KeptStep {
    /// The step as an answer shows it. `text` has the steps before it.
    pub(crate) fn traced(&self, text: &mut Detokenizer) -> TracedStep {
        TracedStep {
            at_s: self.at.as_secs_f64(),
            chunk: self.chunk,
            tokens: self.tokens.iter().map(|token| text.push(*token)).collect(),
            scope: self.scope,
            drafts: self.drafts.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(source: DraftSource, drafted: u32, accepted: u32) -> StepMessage {
        StepMessage {
            sequence: 0,
            tokens: vec![7; accepted as usize + 1],
            logprobs: None,
            weight_version: 0,
            source,
            scope: DraftScope::Tenant,
            drafted,
            accepted,
            merged: None,
            forced: None,
        }
    }

    #[test]
    fn a_step_has_the_tokens_that_were_kept_of_it() {
        let mut steps = KeptSteps::default();
        steps.push(Duration::ZERO, 1, &step(DraftSource::None, 0, 0), 1);
        steps.push(Duration::ZERO, 1, &step(DraftSource::Suffix, 5, 4), 2);
        let [plain, cut] = &steps.steps[..] else {
            panic!("{steps:?}");
        };
        assert_eq!((plain.tokens.len(), plain.drafts.len()), (1, 0));
        let draft = cut.drafts[0];
        assert_eq!((cut.tokens.len(), draft.drafted, draft.accepted), (2, 5, 2));
    }

    #[test]
    fn a_long_output_says_that_its_steps_are_cut() {
        let mut steps = KeptSteps::default();
        for _ in 0..STEPS_MAX {
            steps.push(Duration::ZERO, 1, &step(DraftSource::None, 0, 0), 1);
        }
        assert!(!steps.is_cut);
        steps.push(Duration::ZERO, 1, &step(DraftSource::None, 0, 0), 1);
        assert_eq!((steps.steps.len(), steps.is_cut), (STEPS_MAX, true));
    }
}
