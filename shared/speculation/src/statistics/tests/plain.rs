//! Both stages as the documentation describes them, one figure of all nodes after the other. The quicker form must
//! have the same bits.

use proptest::prelude::*;

use super::super::features::kind;
use super::super::*;
use crate::candidate::DraftNode;
use crate::testing::draft;

/// 0 for the children of the root, one more than the parent for others.
fn sibling_group(node: &DraftNode) -> usize {
    node.parent.map_or(0, |parent| parent as usize + 1)
}

fn features(candidate: &Candidate, at: usize) -> NodeFeatures {
    let nodes = candidate.tree.nodes();
    let node = &nodes[at];
    let above = |parent: u32| nodes[parent as usize].probability;
    NodeFeatures {
        source: node.origin.source,
        scope: node.origin.scope,
        match_len: candidate.match_len,
        depth: candidate.tree.depths().collect::<Vec<_>>()[at],
        count: node.count,
        share: node.probability / node.parent.map_or(1.0, above),
        witnesses: node.witnesses,
        after: match node.parent {
            Some(parent) => Some(nodes[parent as usize].token),
            None => candidate.after,
        },
        token: Some(node.token),
    }
}

fn sums_of_siblings(candidate: &Candidate, values: &[f32]) -> Vec<f32> {
    let mut sums = vec![0.0f32; values.len() + 1];
    for (node, value) in candidate.tree.nodes().iter().zip(values) {
        sums[sibling_group(node)] += value;
    }
    sums
}

fn along_paths(candidate: &Candidate, conditional: &[f32]) -> Vec<f32> {
    let mut paths: Vec<f32> = Vec::new();
    for (node, conditional) in candidate.tree.nodes().iter().zip(conditional) {
        paths.push(conditional * node.parent.map_or(1.0, |parent| paths[parent as usize]));
    }
    paths
}

/// Stage one, and the sums over siblings.
fn stage_one(statistics: &AcceptanceStatistics, candidate: &Candidate) -> (Vec<f32>, Vec<f32>) {
    let probability = |at| statistics.node_probability(&features(candidate, at));
    let mut conditional: Vec<f32> = (0..candidate.tree.len()).map(probability).collect();
    let sums = sums_of_siblings(candidate, &conditional);
    for (conditional, node) in conditional.iter_mut().zip(candidate.tree.nodes()) {
        *conditional /= sums[sibling_group(node)].max(1.0);
    }
    let continues = sums_of_siblings(candidate, &conditional);
    (conditional, continues)
}

/// The table and bucket of stage two.
fn bucket(candidate: &Candidate, conditional: &[f32]) -> Option<(usize, usize)> {
    let expected: f32 = along_paths(candidate, conditional).iter().sum();
    let bucket = EXPECTED_EDGES.partition_point(|edge| *edge <= expected);
    kind(candidate.source, candidate.scope).map(|kind| (kind, bucket))
}

/// Both stages.
fn conditional(statistics: &AcceptanceStatistics, candidate: &Candidate) -> Vec<f32> {
    let (mut conditional, continues) = stage_one(statistics, candidate);
    let failures = bucket(candidate, &conditional)
        .and_then(|(kind, bucket)| statistics.drafts[kind].get(bucket));
    if let Some(ratio) = failures.map(Failures::ratio) {
        for (probability, node) in conditional.iter_mut().zip(candidate.tree.nodes()) {
            let before = continues[sibling_group(node)];
            let after =
                (1.0 - ratio * (1.0 - before)).clamp(CORRECTION_MIN * before, PROBABILITY_MAX);
            *probability *= after / before;
        }
    }
    conditional
}

/// The cost of a failure, by sibling group.
fn gains(candidate: &Candidate, conditional: &[f32]) -> Vec<f32> {
    let mut expected = vec![0.0f32; conditional.len() + 1];
    for (at, node) in candidate.tree.nodes().iter().enumerate().rev() {
        expected[sibling_group(node)] += conditional[at] * (1.0 + expected[at + 1]);
    }
    let continues = sums_of_siblings(candidate, conditional);
    let each = expected.into_iter().zip(continues);
    each.map(|(expected, continues)| match continues > 0.0 {
        true => expected / continues,
        false => 0.0,
    })
    .collect()
}

fn observe(statistics: &mut AcceptanceStatistics, candidate: &Candidate, emitted: &[Token]) {
    let (of_stage_one, continues) = stage_one(statistics, candidate);
    let bucket = bucket(candidate, &of_stage_one);
    let gains = gains(candidate, &conditional(statistics, candidate));
    let mut failures = Failures::default();
    let mut reached = None;
    for &token in emitted {
        let nodes = (0u32..).zip(candidate.tree.nodes());
        let children: Vec<u32> = nodes
            .filter(|(_, node)| node.parent == reached)
            .map(|(at, _)| at)
            .collect();
        if children.is_empty() {
            break;
        }
        for at in children {
            let accepted = candidate.tree.nodes()[at as usize].token == token;
            statistics.observe_node(&features(candidate, at as usize), accepted);
        }
        let group = reached.map_or(0, |at: u32| at as usize + 1);
        let weight = gains[group] / gains[0];
        failures.expected += weight * (1.0 - continues[group]).max(0.0);
        reached = candidate.tree.child(reached, token);
        if reached.is_none() {
            failures.observed += weight;
            break;
        }
    }
    if let Some((kind, bucket)) = bucket {
        statistics.drafts[kind].resize(RATIOS, Failures::default());
        statistics.drafts[kind][bucket].add(failures);
    }
}

/// A node's parent as a share of the nodes before it, its share of its parent's D, and its count.
type Grown = (f32, f32, u32);

/// A tree in which the second child of a node has another token than the first, and so on.
fn tree(scope: Scope, match_len: u32, grown: &[Grown]) -> Candidate {
    let mut nodes: Vec<(Option<u32>, Token, f32, u32)> = Vec::new();
    for &(parent, share, count) in grown {
        // The root, or one of the nodes before; often the last, so that trees are deep.
        let parent = ((parent * (nodes.len() + 4) as f32) as usize).min(nodes.len());
        let parent = (parent > 0).then(|| parent as u32 - 1);
        let siblings = nodes.iter().filter(|node| node.0 == parent).count() as Token;
        let above = parent.map_or(1.0, |parent| nodes[parent as usize].2);
        nodes.push((parent, siblings, share * above, count));
    }
    draft(scope, match_len, &nodes)
}

proptest! {
    #[test]
    fn the_quick_form_learns_and_estimates_the_same_as_the_plain_one(
        steps in prop::collection::vec(
            (
                prop::sample::select(Scope::ALL.to_vec()),
                1u32..200,
                prop::collection::vec((0.0f32..1.0, 0.01f32..1.0, 0u32..40), 1..40),
                prop::collection::vec(prop::sample::select(vec![0u32, 0, 0, 0, 1, 9]), 0..40),
            ),
            1..30,
        )
    ) {
        let mut quick = AcceptanceStatistics::default();
        let mut plain = AcceptanceStatistics::default();
        for (scope, match_len, grown, emitted) in steps {
            let candidate = tree(scope, match_len, &grown);
            let bits = |values: &[f32]| values.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
            let wanted = along_paths(&candidate, &conditional(&plain, &candidate));
            prop_assert_eq!(bits(&quick.path_probabilities(&candidate)), bits(&wanted));
            quick.observe(&candidate, &emitted);
            observe(&mut plain, &candidate, &emitted);
            prop_assert_eq!(&quick, &plain);
        }
    }
}
