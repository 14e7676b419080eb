//! Expand of Algorithm 1: the most probable tokens under one match.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use refrain_suffix_index::{Continuation, Match, Node, Token};

use crate::propose::Expansion;

/// Limits of one expansion.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) expansion: Expansion,
    /// MAX_SPEC(p): most draft tokens, at least 1.
    pub(crate) nodes_max: usize,
    pub(crate) min_token_prob: f32,
    pub(crate) max_fan_out: usize,
}

/// A draft token, still with its node in the index.
#[derive(Clone, Copy)]
pub(crate) struct Drafted<'a> {
    pub(crate) token: Token,
    pub(crate) parent: Option<u32>,
    pub(crate) probability: f32,
    pub(crate) node: Node<'a>,
}

/// A child of a drafted node that was not taken yet.
struct Pending<'a> {
    drafted: Drafted<'a>,
    /// When it was found: among equals the earlier one is taken, so a proposal is always the same.
    order: u32,
}

impl Ord for Pending<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.drafted
            .probability
            .total_cmp(&other.drafted.probability)
            .then_with(|| other.order.cmp(&self.order))
    }
}

impl PartialOrd for Pending<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pending<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pending<'_> {}

/// Buffers of one proposal, reused for each of its candidates.
#[derive(Default)]
pub(crate) struct Expander<'a> {
    frontier: BinaryHeap<Pending<'a>>,
    children: Vec<Continuation<'a>>,
    /// The tree of the last expansion, best first.
    pub(crate) drafted: Vec<Drafted<'a>>,
}

impl<'a> Expander<'a> {
    /// Expands `found` and returns the SCORE of the tree, which is left in `drafted`; 0, and no tree, if there
    /// is nothing to draft or if its SCORE could not exceed `beat`.
    ///
    /// D of the first level is multiplied by n / (n + 1), where n is how often anything was seen to follow the
    /// pattern: a single copy is worth 1/2, not 1, and 500 of 520 are worth 0.96. It is done once per
    /// candidate, not once per level: the doubt is whether this context goes the way of those seen. Once it
    /// has agreed with the only copy for one token that doubt is gone, and a factor for every level would have
    /// made long drafts from one copy, the best there are, worthless.
    pub(crate) fn expand(&mut self, found: &Match<'a>, limits: &Limits, beat: f32) -> f32 {
        self.drafted.clear();
        self.frontier.clear();
        if found.node.fan_out() > limits.max_fan_out {
            return 0.0;
        }
        let min = limits.min_token_prob;
        let keep = |count, total| path_probability(shrink(total), count, total) >= min;
        let total = found.node.continuations_where(keep, &mut self.children);
        if self.children.is_empty() || ceiling(shrink(total), limits.nodes_max) <= beat {
            return 0.0;
        }
        match limits.expansion {
            Expansion::Linear => self.expand_linear(total, limits),
            Expansion::Tree => self.expand_tree(total, limits),
        }
    }

    /// The most probable child, its most probable child, and so on.
    fn expand_linear(&mut self, mut total: u64, limits: &Limits) -> f32 {
        let mut score = 1.0;
        let mut probability = shrink(total);
        let mut parent = None;
        while let Some(&Continuation { token, count, node }) = self.children.first() {
            probability = path_probability(probability, count, total);
            score += probability;
            self.drafted.push(Drafted {
                token,
                parent,
                probability,
                node,
            });
            if self.drafted.len() == limits.nodes_max || node.fan_out() > limits.max_fan_out {
                break;
            }
            parent = Some(self.drafted.len() as u32 - 1);
            let keep =
                |count, total| path_probability(probability, count, total) >= limits.min_token_prob;
            total = node.continuations_where(keep, &mut self.children);
        }
        score
    }

    /// Greedy: of all children of the tree so far, the most probable.
    fn expand_tree(&mut self, total: u64, limits: &Limits) -> f32 {
        let mut score = 1.0;
        let mut order = 0;
        self.queue_children(None, shrink(total), total, &mut order);
        while let Some(Pending { drafted, .. }) = self.frontier.pop() {
            score += drafted.probability;
            self.drafted.push(drafted);
            if self.drafted.len() == limits.nodes_max {
                break;
            }
            if drafted.node.fan_out() <= limits.max_fan_out {
                let keep = |count, total| {
                    path_probability(drafted.probability, count, total) >= limits.min_token_prob
                };
                let total = drafted.node.continuations_where(keep, &mut self.children);
                let parent = Some(self.drafted.len() as u32 - 1);
                self.queue_children(parent, drafted.probability, total, &mut order);
            }
        }
        score
    }

    fn queue_children(
        &mut self,
        parent: Option<u32>,
        probability: f32,
        total: u64,
        order: &mut u32,
    ) {
        for &Continuation { token, count, node } in &self.children {
            let probability = path_probability(probability, count, total);
            let drafted = Drafted {
                token,
                parent,
                probability,
                node,
            };
            self.frontier.push(Pending {
                drafted,
                order: *order,
            });
            *order += 1;
        }
    }
}

/// D(N) = D(parent) * C(N), C(N) = count(N) / sum of the counts of N and its siblings.
fn path_probability(parent: f32, count: u32, total: u64) -> f32 {
    parent * (count as f32 / total as f32)
}

fn shrink(total: u64) -> f32 {
    total as f32 / (total as f32 + 1.0)
}

/// No tree of `nodes` nodes of at most probability `d` scores more. The second factor covers what rounding
/// may add to a score while it is summed.
pub(crate) fn ceiling(d: f32, nodes: usize) -> f32 {
    let nodes = nodes as f32;
    (1.0 + nodes * d) * (1.0 + (nodes + 4.0) * f32::EPSILON)
}
