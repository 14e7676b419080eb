//! The function Expand of Algorithm 1: the most probable tokens under one match.

use std::cell::Cell;
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
        let children = ChildValues::new(limits, None);
        let keep = |count, total| {
            let (share, value) = children.of(count, limits.root_probability(total), total);
            share >= limits.params.min_token_prob && limits.values.shows(value, 1, share)
        };
        let total = search.continuations_where(&found.node, keep, &mut self.children);
        let root = limits.root_probability(total);
        if self.children.is_empty() || limits.ceiling(root) <= beat {
            return 0.0;
        }
        match limits.params.expansion {
            Expansion::Tree => {
                self.queue_children(&children, (root, total), usize::MAX);
                self.expand_tree(search, limits, beat)
            }
            Expansion::Linear | Expansion::Paths(_) => {
                let paths = limits.params.expansion.paths();
                self.queue_children(&children, (root, total), limits.children_max());
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
        let above = self.drafted[parent as usize];
        // Without a price a tree has at most `depth_max` nodes, so it is no deeper.
        if above.depth as usize >= limits.depth_max {
            return;
        }
        let children = ChildValues::new(limits, Some((parent, above)));
        let keep = |count, total| {
            let (share, value) = children.of(count, 1.0, total);
            above.probability * share >= limits.params.min_token_prob
                && limits.values.shows(value, children.depth, share)
        };
        let total = search.continuations_where(&node, keep, &mut self.children);
        self.queue_children(&children, (1.0, total), most);
    }

    /// Queues the `most` first of `children`, which are in descending order. C(N) is multiplied by the factor.
    fn queue_children(
        &mut self,
        values: &ChildValues<'_>,
        (factor, total): (f32, u64),
        most: usize,
    ) {
        let probability = values.above.map_or(1.0, |(_, above)| above.probability);
        for next in self.children.iter().take(most) {
            let (share, value) = values.of(next.count, factor, total);
            let drafted = Drafted {
                token: next.token,
                parent: values.above.map(|(place, _)| place),
                probability: probability * share,
                share,
                value,
                depth: values.depth,
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

/// Counts whose values are kept. Few children of a wide fan were seen more often.
const KNOWN_COUNTS: usize = 16;

/// The values of the children of one node. They depend on the count of a child alone, and most children of a wide fan
/// were seen equally often, so each count is valued once.
struct ChildValues<'a> {
    limits: &'a Limits<'a>,
    /// The node with its place, unless it is the root.
    above: Option<(u32, Drafted)>,
    depth: u32,
    /// Share and value by count; a share of 0 is not known yet.
    known: [Cell<(f32, f32)>; KNOWN_COUNTS],
}

impl<'a> ChildValues<'a> {
    fn new(limits: &'a Limits<'a>, above: Option<(u32, Drafted)>) -> Self {
        ChildValues {
            limits,
            above,
            depth: above.map_or(1, |(_, above)| above.depth + 1),
            known: Default::default(),
        }
    }

    /// The share of a child that was seen `count` of `total` times, times `factor`, and the probability that its path
    /// is accepted. Factor and total are the same for all children.
    fn of(&self, count: u32, factor: f32, total: u64) -> (f32, f32) {
        let known = self.known.get(count as usize);
        if let Some((share, value)) = known.map(Cell::get)
            && share > 0.0
        {
            return (share, value);
        }
        let share = factor * part(count, total);
        let above = self.above.map_or(1.0, |(_, above)| above.value);
        let value = above * self.limits.values.conditional(self.depth, count, share);
        if let Some(known) = known {
            known.set((share, value));
        }
        (share, value)
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
