//! The dynamic draft tree of EAGLE-2 and 3: which nodes to follow, and which to have verified. Pure.
//!
//! A node's probability is the product of the drafter's probabilities along its path, so no node is likelier
//! than its parent. Hence the `tokens_max` likeliest nodes are a tree by themselves, and a node that has
//! fallen out of them never comes back: neither it nor anything under it needs to be followed.

use refrain_protocol::TokenId;
use refrain_protocol::engine::Draft;

/// How a tree may grow. All counts are at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Growth {
    /// Longest path.
    pub(crate) depth: usize,
    /// Most children of a node, and most nodes of one depth that are followed further.
    pub(crate) top_k: usize,
    /// Most nodes that stay.
    pub(crate) tokens_max: usize,
    /// Paths less likely than this end before.
    pub(crate) path_prob_min: f32,
    /// Guesses are drawn, not picked. One that was drawn stays, or the draft would no longer have the law that it was
    /// drawn by; so an unlikely path ends with it instead of before it.
    pub(crate) sampled: bool,
}

impl Growth {
    /// Most nodes that are followed.
    pub(crate) fn rows_max(&self) -> usize {
        (self.depth - 1) * self.top_k.min(self.tokens_max)
    }

    fn follows(&self, prob: f32) -> bool {
        prob >= self.path_prob_min
    }
}

/// A guess for the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Guess {
    pub(crate) token: TokenId,
    /// What the drafter thinks of it, given the path before it.
    pub(crate) prob: f32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Counts up, parents before children.
    id: usize,
    parent: Option<usize>,
    /// The row of the parent, if it is not the text.
    parent_row: Option<u32>,
    depth: usize,
    token: TokenId,
    /// Of the whole path.
    prob: f32,
}

/// A tree that grows level by level. A *row* is a node that is followed, that is, computed by the drafter.
#[derive(Debug)]
pub(crate) struct Tree {
    growth: Growth,
    /// Likeliest first, at most `tokens_max`.
    nodes: Vec<Node>,
    ids: usize,
    depth: usize,
    row_nodes: Vec<Node>,
    row_tokens: Vec<TokenId>,
    row_parents: Vec<Option<u32>>,
    /// Rows before it have been followed.
    followed: usize,
}

impl Tree {
    pub(crate) fn new(growth: Growth) -> Self {
        Tree {
            growth,
            nodes: Vec::new(),
            ids: 0,
            depth: 0,
            row_nodes: Vec::new(),
            row_tokens: Vec::new(),
            row_parents: Vec::new(),
            followed: 0,
        }
    }

    /// Tokens of all rows so far.
    pub(crate) fn rows(&self) -> &[TokenId] {
        &self.row_tokens
    }

    /// Parent of each row, itself a row; `None` is the text.
    pub(crate) fn row_parents(&self) -> &[Option<u32>] {
        &self.row_parents
    }

    /// How many of the rows have been followed. The others are to be computed now; none means that the tree
    /// is complete.
    pub(crate) fn followed(&self) -> usize {
        self.followed
    }

    /// Adds what comes after the rows that were to be computed, or at first after the text: at most `top_k`
    /// guesses each, likeliest first.
    pub(crate) fn grow(&mut self, guesses: &[Vec<Guess>]) {
        self.depth += 1;
        let first = self.followed;
        for (at, guesses) in guesses.iter().enumerate() {
            let parent = (self.depth > 1).then(|| (first + at, self.row_nodes[first + at]));
            for guess in guesses {
                let prob = parent.map_or(1.0, |(_, node)| node.prob) * guess.prob;
                // A probability that is no number is refused here as well.
                if !(prob > 0.0 && (self.growth.sampled || self.growth.follows(prob))) {
                    continue;
                }
                self.nodes.push(Node {
                    id: self.ids,
                    parent: parent.map(|(_, node)| node.id),
                    parent_row: parent.map(|(row, _)| row as u32),
                    depth: self.depth,
                    token: guess.token,
                    prob,
                });
                self.ids += 1;
            }
        }
        self.nodes
            .sort_unstable_by(|a, b| b.prob.total_cmp(&a.prob).then(a.id.cmp(&b.id)));
        self.nodes.truncate(self.growth.tokens_max);
        self.followed = self.row_nodes.len();
        if self.depth < self.growth.depth {
            let (depth, growth) = (self.depth, self.growth);
            let followed = |node: &&Node| node.depth == depth && growth.follows(node.prob);
            let leaves = self.nodes.iter().filter(followed);
            self.row_nodes.extend(leaves.take(growth.top_k));
            for node in &self.row_nodes[self.followed..] {
                self.row_tokens.push(node.token);
                self.row_parents.push(node.parent_row);
            }
        }
    }

    /// The nodes to have verified.
    pub(crate) fn into_draft(mut self) -> Draft {
        self.nodes.sort_unstable_by_key(|node| node.id);
        let place = |id: usize| self.nodes.binary_search_by_key(&id, |node| node.id);
        Draft {
            tokens: self.nodes.iter().map(|node| node.token).collect(),
            parents: self
                .nodes
                .iter()
                // A parent is at least as likely and was there before, so it has stayed.
                .map(|node| {
                    node.parent
                        .and_then(|id| place(id).ok())
                        .map(|at| at as u32)
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tests::support::Random;

    /// Guesses after a path, the same whenever they are asked for.
    fn guesses(path: &[TokenId], count: usize) -> Vec<Guess> {
        let seed = path
            .iter()
            .fold(17, |seed, token| seed * 31 + u64::from(*token) + 1);
        let mut random = Random(seed);
        let mut left = 1.0;
        (0..count as u32)
            .map(|token| {
                let prob = left * (0.2 + 0.7 * random.float().abs());
                left -= prob;
                Guess { token, prob }
            })
            .collect()
    }

    /// Paths of the tree that grows so, and how many nodes were followed.
    fn grown(growth: Growth) -> (BTreeSet<Vec<TokenId>>, usize) {
        let mut tree = Tree::new(growth);
        tree.grow(&[guesses(&[], growth.top_k)]);
        let mut rows: Vec<Vec<TokenId>> = Vec::new();
        while tree.followed() < tree.rows().len() {
            let mut level = Vec::new();
            for row in tree.followed()..tree.rows().len() {
                let mut path = tree.row_parents()[row]
                    .map_or_else(Vec::new, |parent| rows[parent as usize].clone());
                path.push(tree.rows()[row]);
                level.push(guesses(&path, growth.top_k));
                rows.push(path);
            }
            assert!(level.len() <= growth.top_k);
            tree.grow(&level);
        }
        assert!(rows.len() <= growth.rows_max());
        let draft = tree.into_draft();
        draft.validate().unwrap();
        let mut paths: Vec<Vec<TokenId>> = Vec::new();
        for (token, parent) in draft.tokens.iter().zip(&draft.parents) {
            let mut path = parent.map_or_else(Vec::new, |parent| paths[parent as usize].clone());
            path.push(*token);
            paths.push(path);
        }
        let nodes = paths.len();
        let paths: BTreeSet<_> = paths.into_iter().collect();
        assert_eq!(paths.len(), nodes);
        (paths, rows.len())
    }

    /// The same without any shortcut: every level is followed in full, and the likeliest nodes are picked at
    /// the end.
    fn naive(growth: Growth) -> BTreeSet<Vec<TokenId>> {
        let mut all: Vec<(f32, usize, Vec<TokenId>)> = Vec::new();
        let mut level: Vec<(f32, Vec<TokenId>)> = vec![(1.0, Vec::new())];
        for _ in 0..growth.depth {
            let mut next = Vec::new();
            for (prob, path) in &level {
                for guess in guesses(path, growth.top_k) {
                    let mut path = path.clone();
                    path.push(guess.token);
                    next.push((prob * guess.prob, path));
                }
            }
            next.retain(|(prob, _)| *prob >= growth.path_prob_min);
            for (prob, path) in &next {
                all.push((*prob, all.len(), path.clone()));
            }
            next.sort_by(|a, b| b.0.total_cmp(&a.0));
            next.truncate(growth.top_k);
            level = next;
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all.truncate(growth.tokens_max);
        all.into_iter().map(|(_, _, path)| path).collect()
    }

    #[test]
    fn the_likeliest_nodes_stay() {
        let mut most = 0;
        for depth in 1..6 {
            for top_k in [1, 2, 3, 7] {
                for tokens_max in [1, 2, 5, 12, 64] {
                    for path_prob_min in [0.0, 0.02, 0.3] {
                        let growth = Growth {
                            depth,
                            top_k,
                            tokens_max,
                            path_prob_min,
                            sampled: false,
                        };
                        let (paths, _) = grown(growth);
                        assert_eq!(paths, naive(growth), "{growth:?}");
                        most = most.max(paths.len());
                    }
                }
            }
        }
        assert_eq!(most, 64);
    }

    #[test]
    fn what_cannot_stay_is_not_followed() {
        let growth = Growth {
            depth: 5,
            top_k: 6,
            tokens_max: 64,
            path_prob_min: 0.0,
            sampled: false,
        };
        assert_eq!(grown(growth).1, 24);
        let few = Growth {
            tokens_max: 4,
            ..growth
        };
        assert!(grown(few).1 < 10);
        let likely = Growth {
            path_prob_min: 0.5,
            ..growth
        };
        assert!(grown(likely).1 <= 4);
    }

    #[test]
    fn guesses_that_are_no_numbers_end_a_path() {
        let mut tree = Tree::new(Growth {
            depth: 4,
            top_k: 2,
            tokens_max: 8,
            path_prob_min: 0.0,
            sampled: false,
        });
        let guess = |token, prob| Guess { token, prob };
        tree.grow(&[vec![guess(1, f32::NAN), guess(2, 1.0)]]);
        assert_eq!(tree.rows(), [2]);
        tree.grow(&[vec![guess(3, 0.0)]]);
        assert_eq!(tree.followed(), tree.rows().len());
        let draft = tree.into_draft();
        assert_eq!((draft.tokens, draft.parents), (vec![2], vec![None]));
    }

    #[test]
    fn a_drawn_guess_stays_and_is_not_followed_if_unlikely() {
        let mut tree = Tree::new(Growth {
            depth: 4,
            top_k: 1,
            tokens_max: 4,
            path_prob_min: 0.5,
            sampled: true,
        });
        let guess = |token, prob| Guess { token, prob };
        tree.grow(&[vec![guess(1, 0.9)]]);
        assert_eq!(tree.rows(), [1]);
        tree.grow(&[vec![guess(2, 0.1)]]);
        assert_eq!(tree.followed(), tree.rows().len());
        assert_eq!(tree.into_draft().tokens, [1, 2]);
    }
}
