//! A verify call, and how much it makes the engine compute.

use refrain_protocol::engine::Draft;
use refrain_speculation::Candidate;

use crate::engine::VerifyWay;

/// A verify call to be made.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) way: VerifyWay,
    /// What of the draft is verified.
    pub(crate) verified: Candidate,
    /// All of it.
    pub(crate) found: Candidate,
    /// Draft tokens that are expected to be accepted.
    pub(crate) expected: f32,
    /// Chunks that ran when it was decided on.
    pub(super) batch: u32,
    /// Length of the text behind which the draft stands, tokens.
    pub(super) text_tokens: u32,
    /// It is made to find out what it takes.
    pub(super) is_probe: bool,
}

impl Call {
    /// Its draft on the wire.
    pub(crate) fn draft(&self) -> Draft {
        Draft {
            tokens: self.verified.tree.tokens().collect(),
            parents: self.verified.tree.parents().collect(),
        }
    }

    /// Prompts, or tokens behind the text, that the engine computes.
    pub(super) fn computed(&self) -> u32 {
        1 + self.verified.tree.len() as u32
    }

    /// Tokens of all prompts.
    pub(super) fn carried(&self) -> u64 {
        carried(self.way, self.text_tokens, self.verified.tree.len() as u32)
    }
}

/// Tokens of all prompts of a call, the paths to the nodes apart: they are short beside the text.
pub(super) fn carried(way: VerifyWay, text_tokens: u32, nodes: u32) -> u64 {
    let prompts = match way {
        VerifyWay::Chain => 1,
        VerifyWay::FanOut => 1 + u64::from(nodes),
    };
    prompts * u64::from(text_tokens)
}

/// Most nodes of a call, `nodes_max` at most, whose prompts come to no more than so many tokens, whichever the nodes' paths
/// are. `None` where there is no room for one.
pub(super) fn nodes_that_fit(
    way: VerifyWay,
    text_tokens: u32,
    nodes_max: u32,
    tokens_max: u64,
) -> Option<u32> {
    let most = |nodes: &u32| {
        let prompts = carried(way, text_tokens.saturating_add(*nodes), *nodes);
        prompts <= tokens_max
    };
    (1..=nodes_max).rev().find(most)
}
