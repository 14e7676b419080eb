//! The request's part in the step in progress, and the check of the engine's answer to it.

use refrain_protocol::engine::StepOutput;
use refrain_speculation::router::Offer;

use super::sent_draft::check_draft;

/// The request's part in the step in progress.
#[derive(Default)]
pub(crate) struct PendingStep {
    /// The engine samples; otherwise it reads a piece of a prompt.
    pub(super) samples: bool,
    /// The router's offer; `None` for a piece of a prompt.
    pub(crate) offer: Option<Offer>,
    /// Number of context tokens that are sent.
    pub(crate) context_tokens: u32,
    /// Number of tokens that the head has to read at once before it drafts, beyond those of the last steps.
    pub(crate) catch_up_tokens: u32,
    /// Length of the session's text after the step, without the tokens that it emits.
    pub(super) sent_len: u32,
    /// Maximum number of tokens that it may emit.
    pub(super) emitted_max: u32,
}

impl PendingStep {
    /// Checks that the engine did what it was asked for.
    ///
    /// # Errors
    /// The engine broke its contract.
    pub(super) fn check(&self, output: &StepOutput) -> Result<(), &'static str> {
        let emitted = output.emitted.len();
        if output.text_len as usize != self.sent_len as usize + emitted {
            return Err("the length of the session differs from that of the text");
        }
        if !self.samples {
            return match emitted {
                0 => Ok(()),
                _ => Err("a step emitted without sampling"),
            };
        }
        if emitted == 0 || emitted > self.emitted_max as usize {
            return Err("a step emitted no token, or more tokens than it may");
        }
        check_draft(self.offer.as_ref(), output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_does_something_else_is_found_out() {
        let step = |samples| PendingStep {
            samples,
            sent_len: 10,
            emitted_max: 2,
            ..PendingStep::default()
        };
        let output = |text_len, emitted: usize| StepOutput {
            emitted: vec![5; emitted],
            accepted_nodes: Vec::new(),
            self_drafted: 0,
            agreed_nodes: Vec::new(),
            text_len,
            cached_tokens: 0,
            stopped: false,
            logprobs: None,
        };
        assert_eq!(step(true).check(&output(11, 1)), Ok(()));
        assert_eq!(step(true).check(&output(12, 2)), Ok(()));
        assert_eq!(step(false).check(&output(10, 0)), Ok(()));
        for (samples, text_len, emitted) in [
            (true, 10, 0),
            (true, 12, 1),
            (true, 13, 3),
            (false, 11, 1),
            (false, 9, 0),
        ] {
            assert!(step(samples).check(&output(text_len, emitted)).is_err());
        }
        let drafted = StepOutput {
            self_drafted: 1,
            ..output(11, 1)
        };
        assert!(step(true).check(&drafted).is_err());
    }
}
