//! The worth of draft nodes: the probability that they are accepted, and what is left of it beyond their price.

use crate::statistics::UnderMatch;

/// How nodes that are found under one match are valued.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    /// By D(N), as Algorithm 1 does.
    Counts,
    /// By what is learnt about such nodes, less the price of a draft token.
    Learnt {
        under_match: UnderMatch<'a>,
        price: f32,
    },
}

/// Nodes are shown to the router that are less likely than their price. The learnt probability of a kind of nodes is
/// their mean, and the router corrects it for the draft as a whole.
const SHOWN_OF_PRICE: f32 = 0.4;
const SHOWN_MIN: f32 = 0.002;
const SHOWN_MAX: f32 = 0.1;
/// A first token with this share is always shown, so that the router sees when such tokens begin to be right.
const FIRST_SHARE: f32 = 0.5;

/// The part of an accepted token that a node is worth at any price. So drafts that do not pay are still proposed,
/// in their order: the router learns from them, and sees when they begin to pay.
const UNPAID_WORTH: f32 = 0.001;

impl Values<'_> {
    /// The probability that a node is accepted if its parent was. It was seen `count` times at `depth`, which is a
    /// `share` of all that was seen there.
    pub(super) fn conditional(&self, depth: u32, count: u32, share: f32) -> f32 {
        match *self {
            Values::Counts => share,
            Values::Learnt { under_match, .. } => under_match.probability(depth, count, share),
        }
    }

    /// The least probability that is shown to the router.
    pub(super) fn shown_min(&self) -> f32 {
        match self {
            Values::Counts => 0.0,
            Values::Learnt { price, .. } => (SHOWN_OF_PRICE * price).clamp(SHOWN_MIN, SHOWN_MAX),
        }
    }

    /// Whether a node is shown to the router that is accepted with this probability.
    pub(super) fn shows(&self, probability: f32, depth: u32, share: f32) -> bool {
        probability >= self.shown_min() || (depth == 1 && share >= FIRST_SHARE)
    }

    /// The worth of a node that is accepted with this probability.
    pub(super) fn worth(&self, probability: f32) -> f32 {
        match self {
            Values::Counts => probability,
            Values::Learnt { price, .. } => worth(probability, *price),
        }
    }
}

/// The worth of a node that is accepted with this probability, where a draft token costs `price`.
pub(super) fn worth(probability: f32, price: f32) -> f32 {
    (probability - price).max(0.0) + UNPAID_WORTH * probability
}
