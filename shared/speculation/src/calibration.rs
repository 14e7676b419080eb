//! What drafts are worth here: the chance that a node is accepted, learnt from what the target said.
//!
//! D(N) of SuffixDecoding is a share of counts, not a chance: after a match of one token the most frequent
//! continuation is refused far more often than its share says, and after a match of fifty hardly ever. A router
//! that compares a sum of D with a cost decides badly (Hybrid Verified Decoding, arXiv 2606.01019). So acceptance
//! is counted, by what is known of a node before it is verified:
//!
//! * what drafted it, and from whose text;
//! * the length of the match under which it was found (of a head's draft: the length of the context, since heads
//!   decay past the lengths that they were trained on);
//! * its position: the depth in the draft;
//! * its share C(N) = D(N) / D(parent), and how often it was seen.
//!
//! **Cells and shrinkage.** All of that together is a fine grid, and most of its cells see little. A cell's chance
//! is drawn towards that of the same cells with the count left out, those towards the ones with the match left out as
//! well, those towards the source's own cells by share alone, and these towards C(N), which is all that is known in
//! the beginning. Each level weighs as much as a few observations.
//!
//! **What is an observation.** The children of a node are judged by the token that the target drew after it. So those
//! of the root are judged by every step, and those of an accepted node by the token that followed it; a node whose
//! parent was not reached teaches nothing. Whether the node was verified does not matter: verification changes
//! no token, so a draft that was held back can be held against what was said instead. A source that is not
//! trusted is therefore seen to recover.
//!
//! **Decay.** An observation halves the weight of those of its cell after `HALF_LIFE` more: workloads change.
//!
//! **Sharing.** What several workers of a namespace know is kept together ([`Observed`]), as bytes ([`Calibration::to_bytes`]).

mod bytes;
mod observed;

use refrain_suffix_index::Token;

use crate::{Candidate, DraftNode, Scope, Source};

pub use bytes::{CALIBRATION_BYTES_MAX, CalibrationError};
pub use observed::Observed;

/// Observations of a cell after which an older one counts half.
const HALF_LIFE: f32 = 256.0;

/// The chance that each token of a head's draft is accepted after the one before it, until it was observed: a draft of
/// any depth then brings one token at most, and the step the [`ACCEPTED_LENGTH_PRIOR`](crate::ACCEPTED_LENGTH_PRIOR).
const HEAD_CHANCE_PRIOR: f32 = 0.5;

/// Observations that what is known of the next coarser cells counts for.
const PRIOR_WEIGHT: f32 = 8.0;
/// No draft is certain, so each node is worth less than its parent.
const CHANCE_MAX: f32 = 0.998;

/// Edges of the buckets of shares: a bucket holds what is below its edge, the last one the rest.
const SHARE_EDGES: [f32; 7] = [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98];
const SHARES: usize = SHARE_EDGES.len() + 1;
/// Buckets of positions: their last depths.
const POSITION_ENDS: [u32; 7] = [1, 2, 3, 4, 6, 9, 15];
const POSITIONS: usize = POSITION_ENDS.len() + 1;
/// Powers of two.
const MATCHES: usize = 8;
/// Buckets of counts: their last ones.
const COUNT_ENDS: [u32; 3] = [1, 3, 15];
const COUNTS: usize = COUNT_ENDS.len() + 1;
/// Contexts up to this length, tokens, are one bucket for the head.
const HEAD_CONTEXT_MIN: u32 = 128;

/// Cells of each level, coarse to fine: (share), (position, share), (match, position, share), all.
const LEVEL_CELLS: [usize; 4] = [
    SHARES,
    POSITIONS * SHARES,
    MATCHES * POSITIONS * SHARES,
    COUNTS * MATCHES * POSITIONS * SHARES,
];
const CELLS: usize = LEVEL_CELLS[0] + LEVEL_CELLS[1] + LEVEL_CELLS[2] + LEVEL_CELLS[3];

/// What drafted, and from whose text: tables of their own.
const KINDS: usize = Scope::ALL.len() + 2;

/// What is known of a draft node before it is verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeFeatures {
    /// What drafted it.
    pub source: Source,
    /// Whose text it was read from; of no matter but for [`Source::Suffix`].
    pub scope: Scope,
    /// Length of the pattern it was found under; of a head's draft, of the context, tokens.
    pub match_len: u32,
    /// Its depth in the draft, 1 for a child of the root.
    pub position: u32,
    /// How often it was seen there; 0 if nothing was counted.
    pub count: u32,
    /// C(N), its share of what was seen there: what is believed as long as nothing was observed.
    pub share: f32,
}

/// Decayed counts of nodes whose parent was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cell {
    seen: f32,
    accepted: f32,
}

/// Acceptance tables of one namespace. See the top of this file for how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// By [`kind`]; empty until something was observed.
    tables: [Vec<Cell>; KINDS],
    /// Not taken yet.
    fresh: Observed,
}

/// Nodes of one draft whose chances are reckoned or learnt.
struct Judged<'a> {
    nodes: &'a [DraftNode],
    match_len: u32,
    /// Of each node.
    positions: Vec<u32>,
}

impl Calibration {
    /// Tables that know nothing: chances are the shares of the drafts.
    pub fn new() -> Self {
        Calibration::default()
    }

    /// The chance that the node is accepted given that its parent was (the root is), above 0 and below 1.
    pub fn chance(&self, node: &NodeFeatures) -> f32 {
        let mut chance = if node.share.is_finite() {
            node.share.clamp(0.0, 1.0)
        } else {
            0.0
        };
        if let Some(table) = kind(node.source, node.scope).map(|kind| &self.tables[kind])
            && !table.is_empty()
        {
            for at in placed(cells(node)) {
                chance = table[at].chance(chance);
            }
        }
        chance.clamp(f32::MIN_POSITIVE, CHANCE_MAX)
    }

    /// f of each node of a draft, in their order: the chance that the whole path to it is accepted. Never above
    /// that of the parent; those of siblings add up to no more than their parent's. Their sum is how many tokens the draft is expected to
    /// bring, the target's own apart.
    pub fn expect(&self, draft: &Candidate) -> Vec<f32> {
        let judged = Judged::of(draft);
        let mut chances: Vec<f32> = (0..judged.nodes.len())
            .map(|at| self.chance(&judged.features(at)))
            .collect();
        let place = |node: &DraftNode| node.parent.map_or(0, |parent| parent as usize + 1);
        let mut of_siblings = vec![0.0f32; judged.nodes.len() + 1];
        for (node, chance) in judged.nodes.iter().zip(&chances) {
            of_siblings[place(node)] += chance;
        }
        for (at, node) in judged.nodes.iter().enumerate() {
            let parent = node.parent.map_or(1.0, |parent| chances[parent as usize]);
            chances[at] *= parent / of_siblings[place(node)].max(1.0);
        }
        chances
    }

    /// Learns from what the target said where the draft was proposed, whether it was verified or not. Tokens that a
    /// stop rule cut off, or that are not known for another reason, are left out of `said`.
    pub fn observe(&mut self, draft: &Candidate, said: &[Token]) {
        let judged = Judged::of(draft);
        let mut reached = None;
        let mut from = 0;
        for &token in said {
            let mut next = None;
            for at in from..judged.nodes.len() {
                let node = &judged.nodes[at];
                if node.parent == reached {
                    let accepted = node.token == token;
                    self.learn(&judged.features(at), accepted);
                    if accepted {
                        next = Some(at);
                    }
                }
            }
            let Some(accepted) = next else {
                return;
            };
            reached = Some(accepted as u32);
            from = accepted + 1;
        }
    }

    /// Takes one node into account whose parent was accepted.
    pub fn learn(&mut self, node: &NodeFeatures, accepted: bool) {
        let Some(kind) = kind(node.source, node.scope) else {
            return;
        };
        let table = &mut self.tables[kind];
        if table.is_empty() {
            table.resize(CELLS, Cell::default());
        }
        let cells = cells(node);
        for at in placed(cells) {
            table[at].observe(accepted);
        }
        self.fresh.count(kind, cells[cells.len() - 1], accepted);
    }

    /// How many tokens a head's draft of `depth` tokens is expected to bring after `context_tokens`, the target's own
    /// apart.
    pub fn expect_head(&self, context_tokens: u32, depth: u32) -> f32 {
        self.head_paths(context_tokens, depth).sum()
    }

    /// The chance that a head's draft of `depth` tokens brings the first one, the first two, and so on.
    pub fn head_paths(&self, context_tokens: u32, depth: u32) -> impl Iterator<Item = f32> + '_ {
        let mut path = 1.0;
        (1..=depth).map(move |position| {
            path *= self.chance(&head_node(context_tokens, position));
            path
        })
    }

    /// Learns from a head's draft that was to be `depth` tokens deep and of which `accepted` were. A head that stops
    /// earlier has failed there, so that what is expected is what asking it brings.
    pub fn observe_head(&mut self, context_tokens: u32, depth: u32, accepted: u32) {
        for position in 1..=depth.min(accepted.saturating_add(1)) {
            self.learn(&head_node(context_tokens, position), position <= accepted);
        }
    }
}

/// Weight that an older observation keeps when one more comes.
const KEPT: f32 = 1.0 - std::f32::consts::LN_2 / HALF_LIFE;

impl Cell {
    fn observe(&mut self, accepted: bool) {
        self.seen = self.seen * KEPT + 1.0;
        self.accepted = self.accepted * KEPT + if accepted { 1.0 } else { 0.0 };
    }

    /// Takes `seen` observations into account, above 0, of which `accepted` were spread evenly over them.
    fn observe_many(&mut self, seen: f32, accepted: f32) {
        let kept = KEPT.powf(seen);
        let weight = (1.0 - kept) / (1.0 - KEPT);
        self.seen = self.seen * kept + weight;
        // Rounding alone could make more of all of them than there are.
        self.accepted = (self.accepted * kept + weight * accepted / seen).min(self.seen);
    }

    fn chance(&self, prior: f32) -> f32 {
        (self.accepted + PRIOR_WEIGHT * prior) / (self.seen + PRIOR_WEIGHT)
    }
}

impl<'a> Judged<'a> {
    fn of(draft: &'a Candidate) -> Self {
        let nodes = draft.tree.nodes();
        let mut positions: Vec<u32> = Vec::with_capacity(nodes.len());
        for node in nodes {
            let above = node.parent.map_or(0, |parent| positions[parent as usize]);
            positions.push(above + 1);
        }
        Judged {
            nodes,
            match_len: draft.match_len,
            positions,
        }
    }

    fn features(&self, at: usize) -> NodeFeatures {
        let node = &self.nodes[at];
        let parent = node
            .parent
            .map_or(1.0, |parent| self.nodes[parent as usize].probability);
        NodeFeatures {
            source: node.origin.source,
            scope: node.origin.scope,
            match_len: self.match_len,
            position: self.positions[at],
            count: node.count,
            share: node.probability / parent,
        }
    }
}

fn head_node(context_tokens: u32, position: u32) -> NodeFeatures {
    NodeFeatures {
        source: Source::Eagle3,
        scope: Scope::Request,
        match_len: context_tokens / HEAD_CONTEXT_MIN,
        position,
        count: 0,
        share: HEAD_CHANCE_PRIOR,
    }
}

fn kind(source: Source, scope: Scope) -> Option<usize> {
    match source {
        Source::Suffix => Some(scope as usize),
        Source::Prediction => Some(Scope::ALL.len()),
        Source::Eagle3 => Some(Scope::ALL.len() + 1),
        Source::None => None,
    }
}

/// The node's cell at each level, coarse to fine, counted within the level.
fn cells(node: &NodeFeatures) -> [usize; LEVEL_CELLS.len()] {
    let share = SHARE_EDGES.partition_point(|edge| *edge <= node.share);
    let position = POSITION_ENDS.partition_point(|end| *end < node.position);
    let matched =
        (u32::BITS - node.match_len.leading_zeros()).clamp(1, MATCHES as u32) as usize - 1;
    let count = COUNT_ENDS.partition_point(|end| *end < node.count);
    let with_position = position * SHARES + share;
    let with_match = matched * LEVEL_CELLS[1] + with_position;
    let with_count = count * LEVEL_CELLS[2] + with_match;
    [share, with_position, with_match, with_count]
}

/// The same in a table that has one level after the other.
fn placed(cells: [usize; LEVEL_CELLS.len()]) -> [usize; LEVEL_CELLS.len()] {
    let mut from = 0;
    let mut level = 0;
    cells.map(|at| {
        let cell = from + at;
        from += LEVEL_CELLS[level];
        level += 1;
        cell
    })
}

#[cfg(test)]
mod tests;
