//! The function Expand of Algorithm 1: the most probable tokens under one match.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use refrain_suffix_index::{Continuation, Match, Node, Search, Sighting, Token};

/// How a match is expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// A chain of most frequent tokens.
    Linear,
    /// A tree, best first.
    Tree,
    /// At most this many chains, the most probable ones at every depth (Seer's beam, arXiv 2511.14617). MAX_SPEC
    /// limits the length of each chain, so all chains together have at most this many times MAX_SPEC nodes. One chain
    /// is [`Linear`](Self::Linear).
    Paths(usize),
}

/// Limits of one expansion.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) expansion: Expansion,
    /// The pattern's length.
    pub(crate) match_len: u32,
    /// MAX_SPEC(p): the longest path, at least 1.
    pub(crate) depth_max: usize,
    /// Most draft tokens, at least 1; equal to `depth_max` unless there are several paths.
    pub(crate) nodes_max: usize,
    pub(crate) min_token_prob: f32,
    /// Whether D of the first level is shrunk.
    pub(crate) shrinks: bool,
}

impl Limits {
    /// D of the pattern itself, after which `total` continuations were seen.
    fn root_probability(&self, total: u64) -> f32 {
        if self.shrinks { shrink(total) } else { 1.0 }
    }
}

/// A draft token.
#[derive(Clone, Copy)]
pub(crate) struct Drafted {
    pub(crate) token: Token,
    pub(crate) parent: Option<u32>,
    pub(crate) probability: f32,
    pub(crate) count: u32,
    pub(crate) sighting: Sighting,
}

/// A child of a drafted node that is not yet drafted.
struct Pending {
    probability: f32,
    /// Its place in `Expander::found`, which is in the order of finding. Among equals the earlier one is taken, so a
    /// proposal is deterministic.
    order: u32,
}

impl Ord for Pending {
    fn cmp(&self, other: &Self) -> Ordering {
        self.probability
            .total_cmp(&other.probability)
            .then_with(|| other.order.cmp(&self.order))
    }
}

impl PartialOrd for Pending {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pending {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pending {}

/// Buffers of proposals, reused for each candidate.
#[derive(Default)]
pub(crate) struct Expander {
    frontier: BinaryHeap<Pending>,
    /// Nodes that were found under drafted ones.
    found: Vec<(Drafted, Node)>,
    children: Vec<Continuation>,
    /// The last nodes of the paths, with their places in `drafted`.
    beam: Vec<(u32, Node)>,
    /// The tree of the last expansion, parents first.
    drafted: Vec<Drafted>,
    /// The tree that was kept.
    pub(crate) best: Vec<Drafted>,
}

impl Expander {
    /// Expands `found`, leaves the tree in `drafted` and returns its SCORE. The result is 0 if there is nothing to
    /// draft or if the SCORE could not exceed `beat`.
    ///
    /// D is shrunk by n / (n + 1) once per candidate, not once per level: a single copy is worth 1/2, not 1, and 500
    /// of 520 are worth 0.96. The factor stands for the doubt whether this context continues like those seen. That
    /// doubt is gone once the context has agreed with the only copy for one token. A factor for every level would
    /// make long drafts from one copy worthless, and those are the best drafts.
    pub(crate) fn expand(
        &mut self,
        search: &mut Search<'_>,
        found: &Match,
        limits: &Limits,
        beat: f32,
    ) -> f32 {
        self.drafted.clear();
        self.frontier.clear();
        self.found.clear();
        let min = limits.min_token_prob;
        let keep =
            |count, total| path_probability(limits.root_probability(total), count, total) >= min;
        let total = search.continuations_where(&found.node, keep, &mut self.children);
        if self.children.is_empty()
            || ceiling(
                limits.root_probability(total),
                limits.depth_max,
                limits.nodes_max,
            ) <= beat
        {
            return 0.0;
        }
        match limits.expansion {
            Expansion::Linear => self.expand_linear(search, total, limits, beat),
            Expansion::Tree => self.expand_tree(search, total, limits, beat),
            Expansion::Paths(paths) => self.expand_paths(search, total, limits, paths.max(1)),
        }
    }

    /// Keeps the last tree in `best`.
    pub(crate) fn keep(&mut self) {
        std::mem::swap(&mut self.drafted, &mut self.best);
    }

    /// Adds the most probable child, its most probable child, and so on.
    fn expand_linear(
        &mut self,
        search: &mut Search<'_>,
        mut total: u64,
        limits: &Limits,
        beat: f32,
    ) -> f32 {
        let mut score = 1.0;
        let mut probability = limits.root_probability(total);
        let mut parent = None;
        while let Some(next) = self.children.first() {
            probability = path_probability(probability, next.count, total);
            score += probability;
            self.drafted.push(drafted(next, parent, probability));
            let left = limits.nodes_max - self.drafted.len();
            if left == 0 {
                break;
            }
            if cannot_reach(beat, score, probability, left) {
                return 0.0;
            }
            parent = Some(self.drafted.len() as u32 - 1);
            let node = next.node;
            let keep =
                |count, total| path_probability(probability, count, total) >= limits.min_token_prob;
            total = search.continuations_where(&node, keep, &mut self.children);
        }
        score
    }

    /// Adds the most probable child of the tree so far, again and again.
    fn expand_tree(
        &mut self,
        search: &mut Search<'_>,
        total: u64,
        limits: &Limits,
        beat: f32,
    ) -> f32 {
        let mut score = 1.0;
        self.queue_children(None, limits.root_probability(total), total);
        while let Some((drafted, node)) = self.most_probable() {
            score += drafted.probability;
            self.drafted.push(drafted);
            let left = limits.nodes_max - self.drafted.len();
            if left == 0 {
                break;
            }
            if cannot_reach(beat, score, drafted.probability, left) {
                return 0.0;
            }
            let keep = |count, total| {
                path_probability(drafted.probability, count, total) >= limits.min_token_prob
            };
            let total = search.continuations_where(&node, keep, &mut self.children);
            let parent = Some(self.drafted.len() as u32 - 1);
            self.queue_children(parent, drafted.probability, total);
        }
        score
    }

    /// At every depth, adds the `paths` most probable children of the nodes of the depth before.
    fn expand_paths(
        &mut self,
        search: &mut Search<'_>,
        total: u64,
        limits: &Limits,
        paths: usize,
    ) -> f32 {
        let mut score = 1.0;
        self.queue_children(None, limits.root_probability(total), total);
        for _ in 0..limits.depth_max {
            self.beam.clear();
            while self.beam.len() < paths && self.drafted.len() < limits.nodes_max {
                let Some((drafted, node)) = self.most_probable() else {
                    break;
                };
                score += drafted.probability;
                self.beam.push((self.drafted.len() as u32, node));
                self.drafted.push(drafted);
            }
            self.frontier.clear();
            if self.beam.is_empty() || self.drafted.len() == limits.nodes_max {
                break;
            }
            for at in 0..self.beam.len() {
                let (parent, node) = self.beam[at];
                let probability = self.drafted[parent as usize].probability;
                let keep = |count, total| {
                    path_probability(probability, count, total) >= limits.min_token_prob
                };
                let total = search.continuations_where(&node, keep, &mut self.children);
                self.queue_children(Some(parent), probability, total);
            }
        }
        score
    }

    fn most_probable(&mut self) -> Option<(Drafted, Node)> {
        let next = self.frontier.pop()?;
        Some(self.found[next.order as usize])
    }

    fn queue_children(&mut self, parent: Option<u32>, probability: f32, total: u64) {
        for next in &self.children {
            let probability = path_probability(probability, next.count, total);
            self.frontier.push(Pending {
                probability,
                order: self.found.len() as u32,
            });
            self.found
                .push((drafted(next, parent, probability), next.node));
        }
    }
}

fn drafted(next: &Continuation, parent: Option<u32>, probability: f32) -> Drafted {
    Drafted {
        token: next.token,
        parent,
        probability,
        count: next.count,
        sighting: next.sighting,
    }
}

/// D(N) = D(parent) * C(N), C(N) = count(N) / sum of the counts of N and its siblings.
fn path_probability(parent: f32, count: u32, total: u64) -> f32 {
    parent * (count as f32 / total as f32)
}

fn shrink(total: u64) -> f32 {
    total as f32 / (total as f32 + 1.0)
}

/// Whether a tree with the SCORE `score` so far cannot exceed `beat`, if `left` nodes may follow and none of them is
/// more probable than `probability`. The result allows for rounding, as in [`ceiling`].
fn cannot_reach(beat: f32, score: f32, probability: f32, left: usize) -> bool {
    let left = left as f32;
    (score + left * probability) * (1.0 + (left + 4.0) * f32::EPSILON) <= beat
}

/// The highest SCORE of a tree with `nodes` nodes and depth `depth` whose levels' probabilities each add up to at
/// most `d`. The second factor covers the rounding errors of the sum.
pub(crate) fn ceiling(d: f32, depth: usize, nodes: usize) -> f32 {
    (1.0 + depth as f32 * d) * (1.0 + (nodes as f32 + 4.0) * f32::EPSILON)
}
