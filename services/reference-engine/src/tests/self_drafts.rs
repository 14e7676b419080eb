//! Tests of the engine's own drafts, with heads and with draft models.

mod drawn;
mod lossless;
mod merged;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Sampling, SelfDraft, StepItem};

use super::support::{item, opening};

/// Returns an item that opens its session with `self_drafts`.
pub(super) fn opening_for_drafts(
    session: u128,
    sampling: &Sampling,
    tokens: &[TokenId],
) -> StepItem {
    let mut item = opening(session, sampling, tokens);
    if let Some(spec) = &mut item.open {
        spec.self_drafts = true;
    }
    item
}

/// Returns an item that requests a draft from the engine.
pub(super) fn drafting(session: u128, keep_len: usize, wanted: SelfDraft) -> StepItem {
    StepItem {
        self_draft: Some(wanted),
        ..item(session, keep_len, &[])
    }
}

pub(super) fn wanted(depth: u32, top_k: u32, tokens_max: u32) -> SelfDraft {
    SelfDraft {
        depth,
        top_k,
        tokens_max,
        path_prob_min: 0.0,
        sampled: false,
    }
}
