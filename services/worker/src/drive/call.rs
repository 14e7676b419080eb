//! A verify call, and how much the engine has to compute for it.

use refrain_protocol::engine::Draft;
use refrain_speculation::draft::Candidate;

use crate::engine::VerifyMethod;
use crate::running::wire_draft;

/// A verify call to be made.
#[derive(Debug)]
pub(crate) struct VerifyCall {
    pub(crate) method: VerifyMethod,
    /// The part of the draft that is verified.
    pub(super) verified: Candidate,
    /// The whole draft as it was found.
    pub(super) found: Candidate,
    /// Expected number of accepted tokens.
    pub(super) expected: f32,
    /// Number of running chunks when the call was decided on.
    pub(super) batch: u32,
    /// Length of the text before the draft, tokens.
    pub(super) text_tokens: u32,
    /// The call is made only to learn what it costs.
    pub(super) is_probe: bool,
}

impl VerifyCall {
    /// The draft as it is sent.
    pub(crate) fn draft(&self) -> Draft {
        wire_draft(&self.verified)
    }
}

/// Number of tokens of all prompts of a call, without the paths to the nodes, which are short compared to the text.
pub(super) fn prompt_tokens(method: VerifyMethod, text_tokens: u32, nodes: u32) -> u64 {
    let prompts = match method {
        VerifyMethod::Chain => 1,
        VerifyMethod::FanOut => 1 + u64::from(nodes),
    };
    prompts * u64::from(text_tokens)
}

/// The largest number of nodes, up to `nodes_max`, whose prompts have at most `tokens_max` tokens for any shape of
/// the draft. `None` if not even one node fits.
pub(super) fn nodes_that_fit(
    method: VerifyMethod,
    text_tokens: u32,
    nodes_max: u32,
    tokens_max: u64,
) -> Option<u32> {
    let fits = |nodes: &u32| {
        let longest = text_tokens.saturating_add(*nodes);
        prompt_tokens(method, longest, *nodes) <= tokens_max
    };
    (1..=nodes_max).rev().find(fits)
}
