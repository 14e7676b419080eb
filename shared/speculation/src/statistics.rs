//! Acceptance statistics: the probability that a draft node is accepted, learnt from the target's own tokens.
//!
//! D(N) of SuffixDecoding is a ratio of counts, not a probability. After a match of one token the most frequent
//! continuation is rejected far more often than its share says; after a match of fifty it hardly ever is. A router
//! that compares a sum of D with a cost decides badly (Hybrid Verified Decoding, arXiv 2606.01019). So acceptance is
//! counted in two stages.
//!
//! **Stage one: nodes.** A node's probability is learnt from the features that are known of it before it is verified
//! (`NodeFeatures`): its source and scope, the length of the match, its depth, its share C(N) = D(N) / D(parent), how
//! often it was seen, which other matches agree, and the tokens. See `model.rs`. The tokens of a head's draft are
//! counted by depth and by the length of the context: see `head.rs`.
//!
//! **Stage two: drafts.** The features of a single node do not say how predictable its text is. Long copies fail less
//! often than the product of their nodes' probabilities says, and mixed text more often. So failures are counted by
//! the number of tokens that stage one expects of the whole draft, and compared with the failures that it expected at
//! the nodes that were reached. The ratio of the two scales the probability that a draft ends at a node. (On nine
//! recordings with one request at once, stage one alone expected 2 to 10 % too little. With stage two all are within
//! 4 %.)
//!
//! **Observations.** The children of a node are judged by the token that the target drew after it: those of the root
//! in every step, those of an accepted node by the token that followed. A node whose parent was not reached teaches
//! nothing. Verification changes no token, so a draft that was held back is judged as well: a source that is out of
//! favour is seen to recover. Workloads change, so older observations count less.

mod bytes;
mod estimate;
mod features;
mod forced;
mod head;
mod model;

use refrain_suffix_index::Token;

pub(crate) use self::features::kinds;
use self::features::{KINDS, NodeFeatures};
use self::forced::Unforced;
use self::head::HeadTable;
use self::model::Model;
pub(crate) use self::model::UnderMatch;
use crate::candidate::{Candidate, Scope, Source};

pub use bytes::{STATISTICS_BYTES_MAX, StatisticsError};

/// Drafts of a size after which an older one counts half in stage two.
const DRAFTS_HALF_LIFE: f32 = 512.0;

/// Expected failures that the prior of stage two, a ratio of 1, counts for.
const RATIO_PRIOR_WEIGHT: f32 = 8.0;
/// No draft is certain, so each node is worth less than its parent.
const PROBABILITY_MAX: f32 = 0.9995;
/// The same within stage one, whose kinds of nodes mix predictable texts with others.
const NODE_PROBABILITY_MAX: f32 = 0.998;
/// Stage two lowers the probability that a draft goes on to no less than this part of stage one's.
const CORRECTION_MIN: f32 = 0.02;

/// Edges of the buckets of stage two: tokens that stage one expects of a draft.
const EXPECTED_EDGES: [f32; 18] = [
    0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0,
    64.0,
];
const RATIOS: usize = EXPECTED_EDGES.len() + 1;

/// Decayed sums over drafts of one expected length. A failure counts as the part of the whole draft's gain that it
/// costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Failures {
    /// Failures that stage one expected at the nodes that were reached.
    expected: f32,
    /// Failures that happened there.
    observed: f32,
}

/// Acceptance statistics of one namespace. The module documentation has the method. Before anything was observed,
/// every estimate is the node's share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptanceStatistics {
    /// Stage one.
    nodes: Model,
    head: HeadTable,
    /// Stage two, by [`kind`]; empty until something was observed.
    drafts: [Vec<Failures>; KINDS],
    observations: u64,
}

impl AcceptanceStatistics {
    /// Observations so far, those of the tables that these statistics began with included.
    pub fn observations(&self) -> u64 {
        self.observations
    }

    /// The probability of stage one that the node is accepted if its parent was, above 0 and below 1. The root counts
    /// as accepted.
    pub(crate) fn node_probability(&self, node: &NodeFeatures) -> f32 {
        self.nodes
            .probability(node)
            .clamp(f32::MIN_POSITIVE, NODE_PROBABILITY_MAX)
    }

    /// The estimates of nodes under one match, whatever their tokens are.
    pub(crate) fn under_match(
        &self,
        source: Source,
        scope: Scope,
        match_len: u32,
    ) -> UnderMatch<'_> {
        self.nodes.under_match(source, scope, match_len)
    }

    /// The odds that a single match of so many tokens of a text of this scope is continued rightly, whatever its
    /// tokens are. They are p / (1 - p), so that the odds of matches that agree can be added. Before anything was
    /// observed they say nothing.
    pub fn match_odds(&self, scope: Scope, match_len: u32) -> f32 {
        let under_match = self.under_match(Source::Suffix, scope, match_len.max(1));
        let probability = under_match.probability(1, 1, 1.0);
        let probability = probability.clamp(f32::MIN_POSITIVE, NODE_PROBABILITY_MAX);
        match match_len {
            0 => 0.0,
            _ => probability / (1.0 - probability),
        }
    }

    /// The path probability of each node of a draft, in their order: that the whole path to it is accepted. It is
    /// never above that of the parent, and siblings never add up to more than their parent. The sum over all nodes is
    /// the number of accepted draft tokens that is expected.
    pub fn path_probabilities(&self, candidate: &Candidate) -> Vec<f32> {
        if let Some(unforced) = Unforced::of(candidate) {
            let others = unforced.candidate.as_ref();
            let others = others.map(|others| self.path_probabilities(others));
            return unforced.spread(candidate, &others.unwrap_or_default());
        }
        self.estimate(candidate).path_probabilities()
    }

    /// Learns from the target's tokens where the draft was proposed, whether it was verified or not. The caller
    /// leaves out tokens that a stop rule cut off, or that are unknown for another reason.
    pub fn observe(&mut self, candidate: &Candidate, emitted: &[Token]) {
        if let Some(unforced) = Unforced::of(candidate) {
            let emitted = Unforced::output(candidate, emitted);
            if let Some(others) = unforced.candidate.filter(|_| !emitted.is_empty()) {
                self.observe(&others, &emitted);
            }
            return;
        }
        let mut draft = self.estimate(candidate);
        draft.sum_gains();
        let gain = draft.gain(0);
        let mut failures = Failures::default();
        let mut reached = 0;
        for &token in emitted {
            let mut next = None;
            let mut has_children = false;
            for at in draft.children(reached) {
                has_children = true;
                let accepted = draft.node(at).token == token;
                self.observe_node(&draft.features(at), accepted);
                if accepted {
                    next = Some(at);
                }
            }
            if !has_children {
                break;
            }
            let weight = draft.gain(reached) / gain;
            failures.expected += weight * (1.0 - draft.continues(reached)).max(0.0);
            let Some(accepted) = next else {
                failures.observed += weight;
                break;
            };
            reached = accepted + 1;
        }
        if let Some((kind, bucket)) = draft.bucket {
            let table = &mut self.drafts[kind];
            table.resize(RATIOS, Failures::default());
            table[bucket].add(failures);
        }
    }

    /// Takes one node into stage one whose parent was accepted.
    fn observe_node(&mut self, node: &NodeFeatures, accepted: bool) {
        self.observations += u64::from(self.nodes.observe(node, accepted));
    }

    /// The probabilities that a head's draft of `depth` tokens after `context_tokens` brings the first one, the first
    /// two, and so on. Their sum is the expected number of accepted tokens.
    pub fn head_path_probabilities(
        &self,
        context_tokens: u32,
        depth: u32,
    ) -> impl Iterator<Item = f32> + '_ {
        let mut path = 1.0;
        (1..=depth).map(move |depth| {
            path *= self.head.probability(context_tokens, depth);
            path
        })
    }

    /// Learns from a head's draft that was to be `depth` tokens deep and of which `accepted` were accepted. A head
    /// that stops earlier counts as rejected there, so that the expectation is that of asking the head.
    pub fn observe_head(&mut self, context_tokens: u32, depth: u32, accepted: u32) {
        for at in 1..=depth.min(accepted.saturating_add(1)) {
            self.head.observe(context_tokens, at, at <= accepted);
            self.observations += 1;
        }
    }
}

/// The weight that an older observation keeps when one more comes.
const fn kept(half_life: f32) -> f32 {
    1.0 - std::f32::consts::LN_2 / half_life
}

impl Failures {
    /// Observed over expected failures.
    fn ratio(&self) -> f32 {
        (self.observed + RATIO_PRIOR_WEIGHT) / (self.expected + RATIO_PRIOR_WEIGHT)
    }

    fn add(&mut self, one: Failures) {
        self.expected = self.expected * kept(DRAFTS_HALF_LIFE) + one.expected;
        self.observed = self.observed * kept(DRAFTS_HALF_LIFE) + one.observed;
    }
}

#[cfg(test)]
mod tests;
