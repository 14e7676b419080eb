//! The router's input: the requests of a step, and the room that the step has.

use std::borrow::Cow;

use super::decision::{Asked, HeadState};
use super::score::Found;
use super::urgency::{Pace, Priority};
use crate::candidate::Candidate;

/// The drafts that a request could have verified in a step that samples for it.
#[derive(Clone, Debug)]
pub struct Prospect<N> {
    /// The namespace whose acceptance statistics its drafts have.
    pub namespace: N,
    /// The drafts that it asked for.
    pub asked: Asked,
    /// Length of its text, in tokens.
    pub context_tokens: u32,
    /// Maximum number of draft tokens that it can use: the longest path that may be accepted.
    pub draft_max: u32,
    /// Maximum number of draft tokens that the engine takes for it in a step, on all paths together.
    pub tree_max: u32,
    /// The best suffix draft, with at most `draft_max` tokens.
    pub candidate: Option<Candidate>,
    /// The path probability of each node of the candidate: see [`Router::estimate`](super::Router::estimate).
    pub path_probabilities: Vec<f32>,
    /// The price of a draft token where the router does not divide the step: the nodes are verified that are worth
    /// it. Without one the candidate is verified as it is.
    pub price: Option<f32>,
    /// No suffix draft was looked for, because the guard holds drafts back.
    pub withheld: bool,
    /// Whether the engine's head can draft for it.
    pub head: HeadState,
    /// The weight of its tokens beside those of others.
    pub priority: Priority,
    /// Its target for the time between tokens, if it has one.
    pub pace: Option<Pace>,
}

impl<N> Prospect<N> {
    /// The part of the candidate that is verified if the router does not divide the step, with its SCORE. `None` if
    /// no part pays.
    pub fn whole(&self) -> Option<Cow<'_, Candidate>> {
        let candidate = self.candidate.as_ref()?;
        match self.price {
            None => Some(Cow::Borrowed(candidate)),
            Some(price) => candidate
                .paying(&self.path_probabilities, price)
                .map(Cow::Owned),
        }
    }

    /// The result of the search, where this part of the candidate may be verified.
    pub(super) fn found(&self, part: Option<&Candidate>) -> Found {
        match part {
            Some(part) => Found::Score(part.score),
            None if self.candidate.is_some() => Found::Unpaid,
            None if self.withheld => Found::Withheld,
            None => Found::Nothing,
        }
    }

    /// Accepted tokens that the whole candidate is expected to bring.
    pub(super) fn predictability(&self) -> f32 {
        self.path_probabilities.iter().sum()
    }

    /// Text that the head would have to read first.
    pub(super) fn unread_tokens(&self) -> u32 {
        match self.head {
            HeadState::Ready { unread_tokens } => unread_tokens,
            HeadState::Absent | HeadState::Blind => 0,
        }
    }
}

/// The step around the drafts.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Tokens that are computed whatever is drafted.
    pub tokens: u32,
    /// Tokens of all texts in the step.
    pub kv_tokens: u64,
    /// Maximum number of draft tokens.
    pub slots_max: u32,
    /// Requests that decode.
    pub batch: u32,
}
