//! Stage one: a logistic regression over the features of a draft node, learnt online.
//!
//! ```text
//! logit p = (1 + slope) * logit share + sum of the weights of the node's features
//! ```
//!
//! The weights begin at 0, so an unobserved node is worth its share. Each judged node moves the weights of its
//! features against the error, by steps that shrink as a weight has moved more (AdaGrad, Duchi et al., JMLR 2011).
//! Several features learn from each node, so it needs few observations, and what is known of one kind of nodes helps
//! with the others.
//!
//! Before it there were four nested tables of counts, by share, depth, match length and count. On the first halves of
//! nine recordings the regression's log loss is 0.87 of theirs, and at equal drafted tokens 4 to 5 % more tokens a
//! step are accepted. A third of that is due to agreement and dissent of the matches, and half to the tokens
//! themselves: some are followed by anything, and some by nearly always the same. The results of a request's last
//! drafts add nothing to these.

use refrain_suffix_index::Token;

use super::features::{KINDS, NodeFeatures, kind};
use crate::candidate::{Scope, Source, Witnesses};

/// The step of a weight that has not moved yet.
const STEP: f32 = 0.3;
/// Squared moves of a weight count up to this sum, so that it goes on to follow a workload that changes.
const MOVED_MAX: f32 = 4095.0;
/// Shares are taken as at least this, and as at most 1 less this. A share of 1 may be that of a single copy.
const SHARE_MIN: f32 = 0.004;

/// The logit of 1 - SHARE_MIN.
const LOGIT_MAX: f32 = 5.517_453;

const SHARES: usize = 10;
const DEPTHS: usize = 6;
const LENGTHS: usize = 9;
const COUNTS: usize = 7;
const SECONDS: usize = 7 * 2;
const CROWDS: usize = 6 * 2;
const VOTES: usize = 5 * 4;
/// Sets of kinds of text.
const TEXTS: usize = 1 << KINDS;

// The first weights are the slopes of the kinds. Then come the weights of each feature.
const SHAPES_FROM: usize = KINDS;
const MATCHES_FROM: usize = SHAPES_FROM + KINDS * SHARES * DEPTHS;
const MATCHES: usize = DEPTHS * LENGTHS * COUNTS;
const SECONDS_FROM: usize = MATCHES_FROM + MATCHES;
const CROWDS_FROM: usize = SECONDS_FROM + SECONDS;
const VOTES_FROM: usize = CROWDS_FROM + CROWDS;
const RIVALS_FROM: usize = VOTES_FROM + VOTES;
const TEXTS_FROM: usize = RIVALS_FROM + LENGTHS * LENGTHS;
/// Weights of features that do not name a token.
pub(super) const PLAIN_WEIGHTS: usize = TEXTS_FROM + TEXTS * LENGTHS;
/// Weights of tokens. Several tokens share one: with four times as many, 0.1 % more tokens are accepted.
const TOKEN_WEIGHTS: usize = 1 << 14;

/// Features without a token, the slope left out.
const PLAIN_FEATURES: usize = 7;
/// Features with a token.
const TOKEN_FEATURES: usize = 4;

/// The weight of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Weight {
    pub(super) weight: f32,
    /// The sum of its squared moves.
    pub(super) moved: f32,
}

/// The weights of all features; empty until something was observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Model {
    weights: Vec<Weight>,
}

impl Model {
    /// The weights of features that do not name a token, in order.
    pub(super) fn plain_weights(&self) -> &[Weight] {
        &self.weights[..self.weights.len().min(PLAIN_WEIGHTS)]
    }

    /// Sets such a weight.
    pub(super) fn set_plain_weight(&mut self, at: usize, weight: Weight) {
        self.allocate();
        self.weights[at] = weight;
    }

    fn allocate(&mut self) {
        self.weights
            .resize(PLAIN_WEIGHTS + TOKEN_WEIGHTS, Weight::default());
    }

    /// The estimates of nodes under one match, by the features without a token.
    pub(super) fn under_match(
        &self,
        source: Source,
        scope: Scope,
        match_len: u32,
    ) -> UnderMatch<'_> {
        let any = NodeFeatures::under_match(source, scope, match_len);
        let known = Features::of(&any).filter(|_| !self.weights.is_empty());
        let Some((features, kind)) = known.zip(kind(source, scope)) else {
            return UnderMatch::default();
        };
        let [_, _, fixed @ ..] = features.all() else {
            return UnderMatch::default();
        };
        let shapes = SHAPES_FROM + kind * SHARES * DEPTHS;
        UnderMatch {
            shapes: &self.weights[shapes..shapes + SHARES * DEPTHS],
            matches: &self.weights[MATCHES_FROM..MATCHES_FROM + MATCHES],
            length: bits(match_len, LENGTHS),
            slope: self.weights[features.slope].weight,
            fixed: fixed.iter().map(|at| self.weights[*at].weight).sum(),
        }
    }

    /// The probability that the node is accepted if its parent was.
    pub(super) fn probability(&self, node: &NodeFeatures) -> f32 {
        let logit = logit(node.share);
        if self.weights.is_empty() {
            return logistic(logit);
        }
        let Some(features) = Features::of(node) else {
            return logistic(logit);
        };
        self.estimate(&features, logit)
    }

    #[inline]
    fn estimate(&self, features: &Features, logit: f32) -> f32 {
        let slope = 1.0 + self.weights[features.slope].weight;
        logistic(slope * logit + self.sum(features.all()))
    }

    #[inline]
    fn sum(&self, places: &[usize]) -> f32 {
        places.iter().map(|at| self.weights[*at].weight).sum()
    }

    /// Learns whether a node was accepted. Returns whether there is anything to learn from such a node.
    pub(super) fn observe(&mut self, node: &NodeFeatures, accepted: bool) -> bool {
        let Some(features) = Features::of(node) else {
            return false;
        };
        self.allocate();
        let logit = logit(node.share);
        let accepted = f32::from(u8::from(accepted));
        // The weights without a token learn as if there were no others, since they are used without them as well.
        let (plain, tokens) = features.all().split_at(PLAIN_FEATURES);
        let slope = (1.0 + self.weights[features.slope].weight) * logit;
        let plain_logit = slope + self.sum(plain);
        let error = accepted - logistic(plain_logit);
        let rest = accepted - logistic(plain_logit + self.sum(tokens));
        self.weights[features.slope].take(error * logit);
        for at in plain {
            self.weights[*at].take(error);
        }
        for at in tokens {
            self.weights[*at].take(rest);
        }
        true
    }
}

/// The weights of the nodes under one match. A proposal asks for some hundred of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnderMatch<'a> {
    /// By share and depth; empty until something was observed.
    shapes: &'a [Weight],
    /// By depth, length and count.
    matches: &'a [Weight],
    length: usize,
    slope: f32,
    /// The sum of the weights that all nodes under the match have.
    fixed: f32,
}

impl UnderMatch<'_> {
    /// The probability that a node is accepted if its parent was. It was seen `count` times at `depth`, which is a
    /// `share` of all that was seen there.
    pub(crate) fn probability(&self, depth: u32, count: u32, share: f32) -> f32 {
        let logit = (1.0 + self.slope) * logit(share) + self.fixed;
        if self.shapes.is_empty() {
            return logistic(logit);
        }
        let depth = bits(depth, DEPTHS);
        let shape = self.shapes[bucket(share, SHARES) * DEPTHS + depth];
        let at = (depth * LENGTHS + self.length) * COUNTS + bits(count, COUNTS);
        logistic(logit + shape.weight + self.matches[at].weight)
    }
}

impl Weight {
    fn take(&mut self, gradient: f32) {
        self.moved = (self.moved + gradient * gradient).min(MOVED_MAX);
        self.weight += STEP * gradient / (self.moved + 1.0).sqrt();
    }
}

/// The places of a node's weights.
struct Features {
    slope: usize,
    /// Those without a token first. Only the first `used` count.
    places: [usize; PLAIN_FEATURES + TOKEN_FEATURES],
    used: usize,
}

impl Features {
    /// `None` if nothing is drafted by such a source.
    #[inline]
    fn of(node: &NodeFeatures) -> Option<Self> {
        let kind = kind(node.source, node.scope)?;
        let alone = || Witnesses::of_one(node.match_len, 1 << kind);
        let witnesses = node.witnesses.unwrap_or_else(alone);
        let share = bucket(node.share, SHARES);
        let depth = bits(node.depth, DEPTHS);
        let (length, count) = (bits(node.match_len, LENGTHS), bits(node.count, COUNTS));
        let (agreeing, dissenting) = (witnesses.agreeing.min(3), witnesses.dissenting.min(4));
        let second = bucket(witnesses.second_share, 7);
        let (for_it, against_it) = (witnesses.agreeing_len, witnesses.dissenting_len);
        let mut features = Features {
            slope: kind,
            places: [
                SHAPES_FROM + (kind * SHARES + share) * DEPTHS + depth,
                MATCHES_FROM + (depth * LENGTHS + length) * COUNTS + count,
                SECONDS_FROM + second * 2 + usize::from(agreeing > 1),
                CROWDS_FROM + bucket(witnesses.crowd, 6) * 2 + usize::from(witnesses.is_laid),
                VOTES_FROM + usize::from(dissenting * 4 + agreeing),
                RIVALS_FROM + bits(against_it, LENGTHS) * LENGTHS + bits(for_it, LENGTHS),
                TEXTS_FROM + usize::from(witnesses.kinds) % TEXTS * LENGTHS + length,
                0,
                0,
                0,
                0,
            ],
            used: PLAIN_FEATURES,
        };
        // The token itself, what it follows, and both.
        if let Some(token) = node.token {
            features.add_token(0, token, 0);
            if let Some(after) = node.after {
                features.add_token(1, after, token);
                features.add_token(2, after, bucket(node.share, 5) as u32);
                features.add_token(3, after, kind as u32);
            }
        }
        Some(features)
    }

    #[inline]
    fn add_token(&mut self, feature: u64, token: Token, other: u32) {
        self.places[self.used] = place(feature, token, other);
        self.used += 1;
    }

    #[inline]
    fn all(&self) -> &[usize] {
        &self.places[..self.used]
    }
}

/// The place of the weight of a feature with a token. Multiplying is a good enough hash, since a clash is no fault.
fn place(feature: u64, token: Token, other: u32) -> usize {
    let key = (u64::from(token) << 32 | u64::from(other))
        .wrapping_mul(4)
        .wrapping_add(feature);
    let mixed = (key ^ (key >> 29)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    PLAIN_WEIGHTS + (mixed >> (64 - TOKEN_WEIGHTS.ilog2())) as usize
}

/// The bucket of a share among equal ones.
fn bucket(share: f32, buckets: usize) -> usize {
    // The cast saturates: negative numbers and NaN become 0.
    ((share * buckets as f32) as usize).min(buckets - 1)
}

/// The bits of a number, of which the last bucket holds the rest.
fn bits(number: u32, buckets: usize) -> usize {
    ((u32::BITS - number.leading_zeros()) as usize).min(buckets - 1)
}

fn logit(share: f32) -> f32 {
    // Most nodes are all that was seen after their parent.
    if share > 1.0 - SHARE_MIN {
        return LOGIT_MAX;
    }
    // A share that is no number counts as the least.
    let share = share.max(SHARE_MIN);
    (share / (1.0 - share)).ln()
}

fn logistic(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}
