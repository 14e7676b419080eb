//! Reasoning before a form, with engines that hold an output to its form from the first token of a call.
//!
//! The reasoning is a call of its own, without the form. It ends with the token that ends the reasoning, and the next
//! call begins there with the form.

use refrain_protocol::TokenId;
use refrain_protocol::engine::{OutputForm, TokenLogprob};

use crate::engine::GenerateRequest;

/// The place of a call in the form of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormPhase {
    /// The output has no form, or the form holds from the next token on.
    Bound,
    /// The output is reasoning up to this token.
    Reasoning {
        /// The token that ends it.
        after: TokenId,
        /// The token with which it has to begin. It is set where nothing has come yet, and the model decides.
        opened_by: Option<TokenId>,
    },
}

impl FormPhase {
    /// The phase after this output. `reasons` is false if the model has begun an output without reasoning before.
    pub(super) fn after(form: Option<&OutputForm>, output: &[TokenId], reasons: bool) -> Self {
        let Some((form, after)) = form.and_then(|form| Some((form, form.after?))) else {
            return FormPhase::Bound;
        };
        let may_open = output.is_empty() && form.opened_by.is_some() && reasons;
        match form.begin(output) {
            Some(_) if !may_open => FormPhase::Bound,
            _ => FormPhase::Reasoning {
                after,
                opened_by: form.opened_by.filter(|_| may_open),
            },
        }
    }

    /// Judges the next tokens of a call.
    pub(super) fn judge(self, tokens: &[TokenId]) -> PhaseTokens {
        let FormPhase::Reasoning { after, opened_by } = self else {
            return PhaseTokens::Go;
        };
        if opened_by.is_some() && tokens.first().copied() != opened_by {
            return PhaseTokens::NoReasoning;
        }
        match tokens.iter().position(|token| *token == after) {
            Some(end) => PhaseTokens::EndAfter(end + 1),
            None => PhaseTokens::Go,
        }
    }

    /// The phase of the next tokens of the same call.
    pub(super) fn begun(self) -> Self {
        match self {
            FormPhase::Bound => FormPhase::Bound,
            FormPhase::Reasoning { after, .. } => FormPhase::Reasoning {
                after,
                opened_by: None,
            },
        }
    }
}

/// The effect of tokens on the phase of their call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PhaseTokens {
    /// It goes on.
    Go,
    /// It ends after this many of the tokens. The others are not of the output.
    EndAfter(usize),
    /// The model does not reason. None of the tokens is of the output, which has to begin with its form.
    NoReasoning,
}

/// A call as its phase has it.
pub(super) fn in_phase(mut request: GenerateRequest, phase: FormPhase) -> GenerateRequest {
    if let FormPhase::Reasoning { after, .. } = phase {
        request.sampling.form = None;
        request.sampling.stop_token_ids.push(after);
        // Engines forbid all tokens that stop an output before this length, so the reasoning could not end.
        request.sampling.min_tokens = 0;
    }
    request
}

/// Keeps the first tokens of a piece.
pub(super) fn truncate(
    tokens: &mut Vec<TokenId>,
    logprobs: &mut Option<Vec<TokenLogprob>>,
    len: usize,
) {
    tokens.truncate(len);
    if let Some(logprobs) = logprobs {
        logprobs.truncate(len);
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::engine::TextForm;

    use super::*;

    fn form(after: Option<TokenId>, opened_by: Option<TokenId>) -> OutputForm {
        OutputForm {
            after,
            opened_by,
            text: TextForm::JsonObject,
        }
    }

    const fn reasoning(opened_by: Option<TokenId>) -> FormPhase {
        FormPhase::Reasoning {
            after: 9,
            opened_by,
        }
    }

    #[test]
    fn the_phase_follows_from_the_output() {
        let reasons = form(Some(9), None);
        let may_reason = form(Some(9), Some(8));
        for (form, output, has_begun, phase) in [
            (&form(None, None), &[][..], true, FormPhase::Bound),
            (&form(None, None), &[9], true, FormPhase::Bound),
            (&reasons, &[], true, reasoning(None)),
            (&reasons, &[1, 2], true, reasoning(None)),
            (&reasons, &[1, 9], true, FormPhase::Bound),
            (&may_reason, &[], true, reasoning(Some(8))),
            (&may_reason, &[], false, FormPhase::Bound),
            (&may_reason, &[8], true, reasoning(None)),
            (&may_reason, &[1], true, FormPhase::Bound),
            (&may_reason, &[8, 9], true, FormPhase::Bound),
        ] {
            let found = FormPhase::after(Some(form), output, has_begun);
            assert_eq!(found, phase, "{form:?} {output:?}");
        }
        assert_eq!(FormPhase::after(None, &[9], true), FormPhase::Bound);
    }

    #[test]
    fn tokens_end_their_phase() {
        for (phase, tokens, expected) in [
            (FormPhase::Bound, &[9][..], PhaseTokens::Go),
            (reasoning(None), &[1, 2], PhaseTokens::Go),
            (reasoning(None), &[1, 9, 2], PhaseTokens::EndAfter(2)),
            (reasoning(Some(8)), &[8, 1], PhaseTokens::Go),
            (reasoning(Some(8)), &[8, 9], PhaseTokens::EndAfter(2)),
            (reasoning(Some(8)), &[1, 8], PhaseTokens::NoReasoning),
            (reasoning(Some(8)).begun(), &[1], PhaseTokens::Go),
        ] {
            assert_eq!(phase.judge(tokens), expected, "{phase:?} {tokens:?}");
        }
    }
}
