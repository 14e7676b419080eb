//! Acceptance statistics: the probability that a draft node is accepted, learnt from the target's own tokens.
//!
//! D(N) of SuffixDecoding is a ratio of counts, not a probability. After a match of one token the most frequent
//! continuation is rejected far more often than its share says; after a match of fifty it hardly ever is. A router
//! that compares a sum of D with a cost decides badly (Hybrid Verified Decoding, arXiv 2606.01019). So acceptance is
//! counted in two stages.
//!
//! **Stage one: nodes.** Acceptance is counted by the features that are known of a node before it is verified
//! (`NodeFeatures`): its source and scope, the length of the match, its depth, its share C(N) = D(N) / D(parent),
//! and how often it was seen. Most cells of this grid see little. So the estimate of a cell is shrunk towards that of
//! the cells without the count, those towards the cells without the match length, those towards the cells of the
//! share alone, and these towards C(N). Each level weighs as much as a few observations. The feature of a head's
//! draft is the length of the context instead of a match, since heads decay past the lengths that they were trained
//! on.
//!
//! **Stage two: drafts.** The features of a single node do not say how predictable its text is. Long copies fail less
//! often than the product of their nodes' probabilities says, and mixed text more often. So failures are counted by
//! the number of tokens that stage one expects of the whole draft, and compared with the failures that it expected at
//! the nodes that were reached. The ratio of the two scales the probability that a draft ends at a node. (On recorded
//! agents, stage one alone expected 3 to 4 % too little where text repeats most; with stage two all recordings are
//! within 2 %.)
//!
//! **Observations.** The children of a node are judged by the token that the target drew after it: those of the root
//! in every step, those of an accepted node by the token that followed. A node whose parent was not reached teaches
//! nothing. Verification changes no token, so a draft that was held back is judged as well: a source that is out of
//! favour is seen to recover. Older observations decay, because workloads change.

mod bytes;
mod estimate;
mod forced;

use refrain_suffix_index::Token;

use self::forced::Unforced;
use crate::draft::{Candidate, Scope, Source};

pub use bytes::{STATISTICS_BYTES_MAX, StatisticsError};

/// Observations of a cell after which an older one counts half.
const HALF_LIFE: f32 = 256.0;
/// Drafts of a size after which an older one counts half in stage two.
const DRAFTS_HALF_LIFE: f32 = 512.0;

/// Acceptance probability of each token of a head's draft before any was observed. A draft of any depth then brings
/// one token at most, and the step [`ACCEPTED_LENGTH_PRIOR`](crate::router::ACCEPTED_LENGTH_PRIOR).
const HEAD_PROBABILITY_PRIOR: f32 = 0.5;

/// Observations that the estimate of the next coarser level counts for.
const PRIOR_WEIGHT: f32 = 8.0;
/// Expected failures that the prior of stage two, a ratio of 1, counts for.
const RATIO_PRIOR_WEIGHT: f32 = 8.0;
/// No draft is certain, so each node is worth less than its parent.
const PROBABILITY_MAX: f32 = 0.9995;
/// The same within stage one, whose cells mix predictable texts with others.
const NODE_PROBABILITY_MAX: f32 = 0.998;
/// Stage two lowers the probability that a draft goes on to no less than this part of stage one's.
const CORRECTION_MIN: f32 = 0.02;

/// Edges of the buckets of shares. A bucket holds the values below its edge, the last one the rest.
const SHARE_EDGES: [f32; 7] = [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98];
const SHARES: usize = SHARE_EDGES.len() + 1;
/// The last depth of each bucket of depths.
const DEPTH_ENDS: [u32; 7] = [1, 2, 3, 4, 6, 9, 15];
const DEPTHS: usize = DEPTH_ENDS.len() + 1;
/// Buckets of match lengths: powers of two.
const MATCHES: usize = 8;
/// The last count of each bucket of counts.
const COUNT_ENDS: [u32; 3] = [1, 3, 15];
const COUNTS: usize = COUNT_ENDS.len() + 1;
/// Contexts up to this length, in tokens, are one bucket for the head.
const HEAD_CONTEXT_MIN: u32 = 128;

/// Cells of each level, coarse to fine: (share), (depth, share), (match, depth, share), all four.
const LEVEL_CELLS: [usize; 4] = [
    SHARES,
    DEPTHS * SHARES,
    MATCHES * DEPTHS * SHARES,
    COUNTS * MATCHES * DEPTHS * SHARES,
];
const CELLS: usize = LEVEL_CELLS[0] + LEVEL_CELLS[1] + LEVEL_CELLS[2] + LEVEL_CELLS[3];

/// Edges of the buckets of stage two: tokens that stage one expects of a draft.
const EXPECTED_EDGES: [f32; 18] = [
    0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0,
    64.0,
];
const RATIOS: usize = EXPECTED_EDGES.len() + 1;

/// Sources and scopes that have tables of their own: see [`kind`].
const KINDS: usize = Scope::ALL.len() + 2;

/// The features of a draft node that are known before it is verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NodeFeatures {
    /// The source that drafted it.
    pub(crate) source: Source,
    /// The text it was read from; only used for [`Source::Suffix`].
    pub(crate) scope: Scope,
    /// Length of the pattern it was found under; of a head's draft, length of the context. In tokens.
    pub(crate) match_len: u32,
    /// Its depth in the draft, 1 for a child of the root.
    pub(crate) depth: u32,
    /// How often it was seen there; 0 if nothing was counted.
    pub(crate) count: u32,
    /// C(N), its share of all continuations that were seen there. It is the estimate until something was observed.
    pub(crate) share: f32,
}

/// Decayed counts of nodes whose parent was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cell {
    seen: f32,
    accepted: f32,
}

/// Decayed sums over drafts of one expected length. A failure counts as the part of the whole draft's gain that it
/// costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Failures {
    /// Failures that stage one expected at the nodes that were reached.
    expected: f32,
    /// Failures that happened there.
    observed: f32,
}

/// Acceptance statistics of one namespace. The module documentation has the method. With empty tables every estimate
/// is the node's share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptanceStatistics {
    /// Stage one, by [`kind`]; empty until something was observed.
    nodes: [Vec<Cell>; KINDS],
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
        let mut probability = if node.share.is_finite() {
            node.share.clamp(0.0, 1.0)
        } else {
            0.0
        };
        if let Some(table) = kind(node.source, node.scope).map(|kind| &self.nodes[kind])
            && !table.is_empty()
        {
            for at in cells(node) {
                probability = table[at].probability(probability);
            }
        }
        probability.clamp(f32::MIN_POSITIVE, NODE_PROBABILITY_MAX)
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
        let Some(kind) = kind(node.source, node.scope) else {
            return;
        };
        let table = &mut self.nodes[kind];
        if table.is_empty() {
            table.resize(CELLS, Cell::default());
        }
        for at in cells(node) {
            table[at].observe(accepted);
        }
        self.observations += 1;
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
            path *= self.node_probability(&head_node(context_tokens, depth));
            path
        })
    }

    /// Learns from a head's draft that was to be `depth` tokens deep and of which `accepted` were accepted. A head
    /// that stops earlier counts as rejected there, so that the expectation is that of asking the head.
    pub fn observe_head(&mut self, context_tokens: u32, depth: u32, accepted: u32) {
        for at in 1..=depth.min(accepted.saturating_add(1)) {
            self.observe_node(&head_node(context_tokens, at), at <= accepted);
        }
    }
}

/// The weight that an older observation keeps when one more comes.
const fn kept(half_life: f32) -> f32 {
    1.0 - std::f32::consts::LN_2 / half_life
}

impl Cell {
    fn observe(&mut self, accepted: bool) {
        self.seen = self.seen * kept(HALF_LIFE) + 1.0;
        self.accepted = self.accepted * kept(HALF_LIFE) + if accepted { 1.0 } else { 0.0 };
    }

    fn probability(&self, prior: f32) -> f32 {
        (self.accepted + PRIOR_WEIGHT * prior) / (self.seen + PRIOR_WEIGHT)
    }
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

fn head_node(context_tokens: u32, depth: u32) -> NodeFeatures {
    NodeFeatures {
        source: Source::Eagle3,
        scope: Scope::Request,
        match_len: context_tokens / HEAD_CONTEXT_MIN,
        depth,
        count: 0,
        share: HEAD_PROBABILITY_PRIOR,
    }
}

/// The table of a source and scope; `None` where nothing is drafted.
fn kind(source: Source, scope: Scope) -> Option<usize> {
    match source {
        // The order is that of the tables as bytes, where new ones come last.
        Source::Suffix => Some(match scope {
            Scope::Request => 0,
            Scope::Group => 1,
            Scope::Tenant => 2,
            Scope::History => 5,
        }),
        Source::Prediction => Some(3),
        Source::Eagle3 => Some(4),
        // Forced tokens are certain, so nothing is learnt from them.
        Source::Grammar | Source::None => None,
    }
}

/// The node's cell at each level, coarse to fine. A table holds one level after the other.
fn cells(node: &NodeFeatures) -> [usize; LEVEL_CELLS.len()] {
    // Counted without branches, which would be mispredicted for every other node.
    let share = SHARE_EDGES
        .iter()
        .filter(|edge| **edge <= node.share)
        .count();
    let depth = DEPTH_ENDS.iter().filter(|end| **end < node.depth).count();
    let matched =
        (u32::BITS - node.match_len.leading_zeros()).clamp(1, MATCHES as u32) as usize - 1;
    let count = COUNT_ENDS.iter().filter(|end| **end < node.count).count();
    let [shares, depths, matches, _] = LEVEL_CELLS;
    let with_depth = depth * SHARES + share;
    let with_match = matched * depths + with_depth;
    let with_count = count * matches + with_match;
    [
        share,
        shares + with_depth,
        shares + depths + with_match,
        shares + depths + matches + with_count,
    ]
}

#[cfg(test)]
mod tests;
