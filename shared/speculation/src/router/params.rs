//! Settings of a router.

use std::num::NonZeroUsize;

use super::decision::HeadDraft;
use super::score::Threshold;
use super::trials::TrialParams;

/// How the drafts of `auto` requests are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Each request by itself: its suffix draft if SCORE exceeds the threshold, else the fallback.
    Score,
    /// The whole batch at once: the drafts that bring the most tokens per second.
    Goodput,
}

/// Settings of a router.
#[derive(Clone, Copy, Debug)]
pub struct RouterParams {
    /// How drafts are chosen.
    pub policy: Policy,
    /// tau of the score policy. Under both policies a fixed 0 keeps `auto` requests from the head.
    pub threshold: Threshold,
    /// Tokens per second with drafts over those without, below which the guard turns drafting off; 0 turns the guard
    /// off.
    pub gain_min: f64,
    /// Requests in a step above which `auto` requests draft nothing.
    pub off_above_batch: Option<u32>,
    /// Namespaces whose statistics are kept; the least recently used goes first.
    pub namespaces_max: NonZeroUsize,
    /// The engine's own drafter, an EAGLE-3 head or a draft model, if it has one and may use it.
    pub head: Option<HeadParams>,
    /// Trials of the head under the score policy.
    pub head_trials: TrialParams,
}

/// The drafts that the engine's own drafter is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadParams {
    /// Maximum number of passes, which is the depth of its draft.
    pub depth: u32,
    /// Maximum number of tokens of its draft.
    pub tokens_max: u32,
    /// The engine verifies a suffix draft and the head's as one tree.
    pub merges: bool,
}

impl HeadParams {
    /// The request to the head where at most `draft_max` tokens are of use; `None` where none is.
    pub(super) fn within(&self, draft_max: u32) -> Option<HeadDraft> {
        (draft_max > 0).then(|| HeadDraft {
            depth: self.depth.min(draft_max),
            tokens_max: self.tokens_max.min(draft_max),
        })
    }
}
