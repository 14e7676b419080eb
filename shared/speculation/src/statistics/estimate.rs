//! The estimate of one draft by both stages, with what learning needs of it.

use crate::candidate::{Candidate, DraftNode};

use super::features::{NodeFeatures, kind};
use super::{AcceptanceStatistics, CORRECTION_MIN, EXPECTED_EDGES, PROBABILITY_MAX};

/// The estimates of a draft's nodes. A router makes one for every draft before a step and one after it, so all
/// figures of a draft share one allocation.
pub(super) struct Estimate<'a> {
    candidate: &'a Candidate,
    /// The root first, then the nodes in their order: see [`parent_place`].
    places: Vec<Place>,
    /// Its table and bucket in stage two; `None` where nothing is drafted.
    pub(super) bucket: Option<(usize, usize)>,
}

/// The figures of the root or of a node. The sums are over its children.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    depth: u32,
    children: u32,
    /// D(N).
    drafted: f32,
    /// The probability given the parent.
    conditional: f32,
    /// The probability of the whole path.
    path: f32,
    /// Sum of stage one's probabilities before siblings are scaled.
    unscaled: f32,
    /// Sum of stage one's probabilities.
    continues: f32,
    /// Sum of the probabilities of both stages.
    corrected: f32,
    /// Tokens that the draft is expected to bring below.
    expected: f32,
}

/// The place of a node's parent: 0 for the root, one more than its number for a node.
fn parent_place(node: &DraftNode) -> usize {
    node.parent.map_or(0, |parent| parent as usize + 1)
}

impl AcceptanceStatistics {
    /// Estimates a draft by both stages.
    pub(super) fn estimate<'a>(&self, candidate: &'a Candidate) -> Estimate<'a> {
        let mut estimate = Estimate {
            candidate,
            places: Vec::with_capacity(candidate.tree.len() + 1),
            bucket: None,
        };
        estimate.places.push(Place {
            drafted: 1.0,
            path: 1.0,
            ..Place::default()
        });
        for (at, node) in estimate.nodes().iter().enumerate() {
            let parent = parent_place(node);
            estimate.places.push(Place {
                depth: estimate.places[parent].depth + 1,
                drafted: node.probability,
                ..Place::default()
            });
            let conditional = self.node_probability(&estimate.features(at));
            estimate.places[at + 1].conditional = conditional;
            let above = &mut estimate.places[parent];
            above.unscaled += conditional;
            above.children += 1;
        }
        let expected = estimate.scale();
        let bucket = EXPECTED_EDGES.partition_point(|edge| *edge <= expected);
        estimate.bucket = kind(candidate.source, candidate.scope).map(|kind| (kind, bucket));
        let failures = estimate
            .bucket
            .and_then(|(kind, bucket)| self.drafts[kind].get(bucket));
        if let Some(failures) = failures {
            estimate.correct(failures.ratio());
        }
        estimate
    }
}

impl<'a> Estimate<'a> {
    fn nodes(&self) -> &'a [DraftNode] {
        self.candidate.tree.nodes()
    }

    pub(super) fn node(&self, at: usize) -> &'a DraftNode {
        &self.nodes()[at]
    }

    pub(super) fn features(&self, at: usize) -> NodeFeatures {
        let node = self.node(at);
        NodeFeatures {
            source: node.origin.source,
            scope: node.origin.scope,
            match_len: node.match_len,
            depth: self.places[at + 1].depth,
            count: node.count,
            share: node.probability / self.places[parent_place(node)].drafted,
            witnesses: node.witnesses,
            after: match node.parent {
                Some(parent) => Some(self.node(parent as usize).token),
                None => self.candidate.after,
            },
            token: Some(node.token),
        }
    }

    /// Stage one: scales siblings to no more than 1 in all. Returns the tokens that are expected of the draft.
    fn scale(&mut self) -> f32 {
        let mut expected = 0.0;
        for (place, node) in (1..).zip(self.nodes()) {
            let above = &mut self.places[parent_place(node)];
            let (path, scale) = (above.path, above.unscaled.max(1.0));
            let conditional = self.places[place].conditional / scale;
            self.places[parent_place(node)].continues += conditional;
            self.set(place, conditional, path);
            expected += self.places[place].path;
        }
        expected
    }

    /// Stage two: gives the nodes the failures that drafts of this length have, `ratio` times as many as expected.
    fn correct(&mut self, ratio: f32) {
        for (place, node) in (1..).zip(self.nodes()) {
            let above = self.places[parent_place(node)];
            let before = above.continues;
            let after =
                (1.0 - ratio * (1.0 - before)).clamp(CORRECTION_MIN * before, PROBABILITY_MAX);
            self.set(
                place,
                self.places[place].conditional * (after / before),
                above.path,
            );
        }
    }

    fn set(&mut self, place: usize, conditional: f32, path_above: f32) {
        let place = &mut self.places[place];
        place.conditional = conditional;
        place.path = conditional * path_above;
    }

    /// The path probability of each node, in their order.
    pub(super) fn path_probabilities(&self) -> Vec<f32> {
        self.places[1..].iter().map(|place| place.path).collect()
    }

    /// Computes the tokens that the draft is expected to bring below each place, for [`gain`](Self::gain).
    pub(super) fn sum_gains(&mut self) {
        for (at, node) in self.nodes().iter().enumerate() {
            self.places[parent_place(node)].corrected += self.places[at + 1].conditional;
        }
        for (at, node) in self.nodes().iter().enumerate().rev() {
            let Place {
                conditional,
                expected,
                ..
            } = self.places[at + 1];
            self.places[parent_place(node)].expected += conditional * (1.0 + expected);
        }
    }

    /// The tokens that the draft is expected to bring below a place if it does not fail there: what a failure costs.
    pub(super) fn gain(&self, place: usize) -> f32 {
        let Place {
            expected,
            corrected,
            ..
        } = self.places[place];
        if corrected > 0.0 {
            expected / corrected
        } else {
            0.0
        }
    }

    /// The probability of stage one that some child of a place is accepted.
    pub(super) fn continues(&self, place: usize) -> f32 {
        self.places[place].continues
    }

    /// The numbers of the nodes below a place.
    pub(super) fn children(&self, place: usize) -> impl Iterator<Item = usize> + use<'a> {
        let nodes = self.nodes();
        (place..nodes.len())
            .filter(move |at| parent_place(&nodes[*at]) == place)
            .take(self.places[place].children as usize)
    }
}
