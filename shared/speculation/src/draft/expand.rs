//! The function Expand of Algorithm 1: the most probable tokens under one match.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use refrain_suffix_index::{Continuation, Match, Node, Search, Sighting, Token};

use super::params::{Expansion, Limits};

/// A draft token.
#[derive(Clone, Copy)]
pub(super) struct Drafted {
    pub(super) token: Token,
    pub(super) parent: Option<u32>,
    /// D(N).
    pub(super) probability: f32,
    /// C(N), which is shrunk at the first level.
    pub(super) share: f32,
    /// The probability that the path is accepted, by the limits' values.
    pub(super) value: f32,
    pub(super) depth: u32,
    pub(super) count: u32,
    pub(super) sighting: Sighting,
}

/// Buffers of proposals, reused for each candidate.
#[derive(Default)]
pub(super) struct Expander {
    /// Children of drafted nodes that are not drafted themselves: the bits of the value, which have the order of
    /// positive numbers, and the place in `found`. Among equals the one found earlier is taken, so a proposal is
    /// deterministic.
    frontier: BinaryHeap<(u32, Reverse<u32>)>,
    /// Nodes that were found under drafted ones.
    found: Vec<(Drafted, Node)>,
    children: Vec<Continuation>,
    /// The last nodes of the paths, with their places in `drafted`.
    beam: Vec<(u32, Node)>,
    /// The tree of the last expansion, parents first.
    drafted: Vec<Drafted>,
    /// The tree that was kept.
    pub(super) best: Vec<Drafted>,
}

impl Expander {
    /// Expands `found`, leaves the tree in `drafted` and returns its SCORE by the limits' values. The result is 0 if
    /// there is nothing to draft or if the SCORE could not exceed `beat`.
    ///
    /// D is shrunk by n / (n + 1) once per candidate, not once per level: a single copy is worth 1/2, not 1, and 500
    /// of 520 are worth 0.96. The factor stands for the doubt whether this context continues like those seen. That
    /// doubt is gone once the context has agreed with the only copy for one token. A factor for every level would
    /// make long drafts from one copy worthless, and those are the best drafts.
    pub(super) fn expand(
        &mut self,
        search: &mut Search<'_>,
        found: &Match,
        limits: &Limits<'_>,
        beat: f32,
    ) -> f32 {
        self.drafted.clear();
        self.frontier.clear();
        self.found.clear();
        let keep = |count, total| {
            let share = limits.root_probability(total) * part(count, total);
            let value = limits.values.conditional(1, count, share);
            share >= limits.params.min_token_prob && limits.values.shows(value, 1, share)
        };
        let total = search.continuations_where(&found.node, keep, &mut self.children);
        let root = limits.root_probability(total);
        if self.children.is_empty() || limits.ceiling(root) <= beat {
            return 0.0;
        }
        match limits.params.expansion {
            Expansion::Tree => {
                self.queue_children(None, (root, total), limits, usize::MAX);
                self.expand_tree(search, limits, beat)
            }
            Expansion::Linear | Expansion::Paths(_) => {
                let paths = limits.params.expansion.paths();
                self.queue_children(None, (root, total), limits, limits.children_max());
                self.expand_paths(search, limits, beat, paths)
            }
        }
    }

    /// The last tree.
    pub(super) fn drafted(&self) -> &[Drafted] {
        &self.drafted
    }

    /// Keeps the last tree in `best`.
    pub(super) fn keep(&mut self) {
        std::mem::swap(&mut self.drafted, &mut self.best);
    }

    /// Adds the most probable child of the tree so far, again and again.
    fn expand_tree(&mut self, search: &mut Search<'_>, limits: &Limits<'_>, beat: f32) -> f32 {
        let mut score = 1.0;
        while let Some((drafted, node)) = self.most_probable() {
            let worth = limits.values.worth(drafted.value);
            score += worth;
            self.drafted.push(drafted);
            let left = limits.nodes_max - self.drafted.len();
            if left == 0 {
                break;
            }
            if cannot_reach(beat, score, worth, left) {
                return 0.0;
            }
            let parent = self.drafted.len() as u32 - 1;
            self.find_children(search, limits, (parent, node), usize::MAX);
        }
        score
    }

    /// At every depth, adds the `paths` most probable children of the nodes of the depth before.
    fn expand_paths(
        &mut self,
        search: &mut Search<'_>,
        limits: &Limits<'_>,
        beat: f32,
        paths: usize,
    ) -> f32 {
        let mut score = 1.0;
        for _ in 0..limits.depth_max {
            self.beam.clear();
            while self.beam.len() < paths && self.drafted.len() < limits.nodes_max {
                let Some((drafted, node)) = self.most_probable() else {
                    break;
                };
                score += limits.values.worth(drafted.value);
                self.beam.push((self.drafted.len() as u32, node));
                self.drafted.push(drafted);
            }
            self.frontier.clear();
            let left = limits.nodes_max - self.drafted.len();
            let Some((first, _)) = self.beam.first().filter(|_| left > 0) else {
                break;
            };
            let likeliest = self.drafted[*first as usize].value;
            if cannot_reach(beat, score, limits.values.worth(likeliest), left) {
                return 0.0;
            }
            for at in 0..self.beam.len() {
                self.find_children(search, limits, self.beam[at], limits.children_max());
            }
        }
        score
    }

    fn most_probable(&mut self) -> Option<(Drafted, Node)> {
        let (_, Reverse(place)) = self.frontier.pop()?;
        Some(self.found[place as usize])
    }

    /// Queues the `most` likeliest children of a drafted node, given by its place and its node in the index.
    fn find_children(
        &mut self,
        search: &mut Search<'_>,
        limits: &Limits<'_>,
        (parent, node): (u32, Node),
        most: usize,
    ) {
        let Drafted {
            probability,
            value,
            depth,
            ..
        } = self.drafted[parent as usize];
        // Without a price a tree has at most `depth_max` nodes, so it is no deeper.
        if depth as usize >= limits.depth_max {
            return;
        }
        let keep = |count, total| {
            let share = part(count, total);
            let value = value * limits.values.conditional(depth + 1, count, share);
            probability * share >= limits.params.min_token_prob
                && limits.values.shows(value, depth + 1, share)
        };
        let total = search.continuations_where(&node, keep, &mut self.children);
        self.queue_children(Some(parent), (1.0, total), limits, most);
    }

    /// Queues the `most` first of `children`, which are in descending order. C(N) is multiplied by the factor.
    fn queue_children(
        &mut self,
        parent: Option<u32>,
        (factor, total): (f32, u64),
        limits: &Limits<'_>,
        most: usize,
    ) {
        let above = parent.map(|parent| self.drafted[parent as usize]);
        let (probability, value, depth) = above.map_or((1.0, 1.0, 1), |above| {
            (above.probability, above.value, above.depth + 1)
        });
        for next in self.children.iter().take(most) {
            let share = factor * part(next.count, total);
            let conditional = limits.values.conditional(depth, next.count, share);
            let drafted = Drafted {
                token: next.token,
                parent,
                probability: probability * share,
                share,
                value: value * conditional,
                depth,
                count: next.count,
                sighting: next.sighting,
            };
            let place = self.found.len() as u32;
            self.frontier
                .push((drafted.value.to_bits(), Reverse(place)));
            self.found.push((drafted, next.node));
        }
    }
}

/// C(N) = count(N) / sum of the counts of N and its siblings. D(N) = D(parent) * C(N).
fn part(count: u32, total: u64) -> f32 {
    count as f32 / total as f32
}

/// Whether a tree with the SCORE `score` so far cannot exceed `beat`, if `left` nodes may follow and none of them is
/// more probable than `probability`. The result allows for rounding, as in [`Limits::ceiling`].
fn cannot_reach(beat: f32, score: f32, probability: f32, left: usize) -> bool {
    let left = left as f32;
    (score + left * probability) * (1.0 + (left + 4.0) * f32::EPSILON) <= beat
}
