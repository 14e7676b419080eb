//! The part of a draft that is verified where nobody chooses among its tokens, and the best chains of a tree.

use std::cmp::Reverse;

use crate::candidate::{Candidate, DraftNode, DraftTree};

impl Candidate {
    /// The part whose tokens are worth their price: those of which the path is accepted with a probability of at
    /// least `price`. The likeliest come first, so the least likely are cut where there is no room. `None` if none
    /// are.
    ///
    /// `probabilities` has the path probability of each node, as
    /// [`path_probabilities`](crate::statistics::AcceptanceStatistics::path_probabilities) returns them. SCORE is
    /// their sum, and 1 for the target's own token.
    pub fn paying(&self, probabilities: &[f32], price: f32) -> Option<Candidate> {
        let nodes = self.tree.nodes();
        let mut kept: Vec<usize> = (0..nodes.len().min(probabilities.len()))
            .filter(|at| probabilities[*at] >= price)
            .collect();
        // A path is no likelier than its beginning, and among equals the order stays, so parents come first.
        kept.sort_by_key(|at| Reverse(probabilities[*at].to_bits()));
        let mut places = vec![0; nodes.len()];
        for (place, at) in (0..).zip(&kept) {
            places[*at] = place;
        }
        let part = kept.iter().map(|at| DraftNode {
            parent: nodes[*at].parent.map(|parent| places[parent as usize]),
            ..nodes[*at]
        });
        let tree = DraftTree::of_sound_nodes(part.collect());
        let score = kept.iter().fold(1.0, |sum, at| sum + probabilities[*at]);
        (!tree.is_empty()).then_some(Candidate {
            tree,
            score,
            ..*self
        })
    }
}

/// The nodes of the `paths` best paths of a tree, ascending: each path is the one that is worth most beside those
/// before it.
pub(super) fn best_paths(nodes: &[DraftNode], worth: &[f32], paths: usize) -> Vec<u32> {
    let mut taken = vec![false; nodes.len()];
    // The worth of the path to each node, as far as it is not taken yet.
    let mut sums = vec![0.0; nodes.len()];
    for _ in 0..paths {
        let mut best: Option<(f32, usize)> = None;
        for (at, node) in nodes.iter().enumerate().filter(|(at, _)| !taken[*at]) {
            let above = node.parent.map(|parent| parent as usize);
            let above = above.filter(|parent| !taken[*parent]);
            sums[at] = worth[at] + above.map_or(0.0, |parent| sums[parent]);
            if best.is_none_or(|(most, _)| sums[at] > most) {
                best = Some((sums[at], at));
            }
        }
        let Some((_, last)) = best else { break };
        let above = |at: &usize| nodes[*at].parent.map(|parent| parent as usize);
        for at in std::iter::successors(Some(last), above) {
            taken[at] = true;
        }
    }
    (0u32..)
        .zip(taken)
        .filter_map(|(at, is_taken)| is_taken.then_some(at))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::{Origin, Scope, Source};

    /// A tree of these parents, whose tokens are the numbers of the nodes.
    fn candidate(parents: &[Option<u32>]) -> Candidate {
        let origin = Origin {
            source: Source::Suffix,
            scope: Scope::Tenant,
            place: None,
        };
        let nodes = (0..).zip(parents).map(|(token, parent)| DraftNode {
            token,
            parent: *parent,
            probability: 0.5,
            count: 1,
            match_len: 3,
            witnesses: None,
            origin,
        });
        Candidate::new(nodes.collect(), 3, Source::Suffix, Scope::Tenant).expect("a tree")
    }

    fn show(of: &Candidate) -> Vec<(u32, Option<u32>)> {
        of.tree.tokens().zip(of.tree.parents()).collect()
    }

    #[test]
    fn what_is_not_worth_its_price_is_left_out_and_the_likeliest_comes_first() {
        let found = candidate(&[None, Some(0), None, Some(2), Some(3)]);
        let probabilities = [0.3, 0.1, 0.6, 0.6, 0.25];
        let part = found.paying(&probabilities, 0.25).expect("some pay");
        assert_eq!(
            show(&part),
            [(2, None), (3, Some(0)), (0, None), (4, Some(1))]
        );
        assert!((part.score - 2.75).abs() < 1e-6, "{}", part.score);
        assert_eq!(found.paying(&probabilities, 0.7), None);
        // Nodes without a probability are worth nothing.
        assert_eq!(found.paying(&[], 0.0), None);
        let all = found.paying(&probabilities, 0.0).expect("all pay");
        assert_eq!(all.tree.len(), 5);
        for nothing in [f32::NAN, f32::INFINITY] {
            assert_eq!(found.paying(&probabilities, nothing), None);
        }
    }

    #[test]
    fn the_best_path_is_the_one_that_is_worth_most_in_all() {
        let found = candidate(&[None, None, Some(1), Some(2), Some(1), Some(0)]);
        let nodes = found.tree.nodes();
        let worth = [0.5, 0.3, 0.2, 0.1, 0.25, 0.0];
        assert_eq!(best_paths(nodes, &worth, 1), [1, 2, 3]);
        // The first one is worth 0.5 beside it, and the others of the second only their rest.
        assert_eq!(best_paths(nodes, &worth, 2), [0, 1, 2, 3]);
        assert_eq!(best_paths(nodes, &worth, 9), [0, 1, 2, 3, 4, 5]);
        assert_eq!(best_paths(nodes, &worth, 0), [0u32; 0]);
    }
}
