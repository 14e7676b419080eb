//! The dynamic draft tree of EAGLE-2 and EAGLE-3: decides which nodes to expand and which to verify. Pure.
//!
//! To *expand* a node is to compute it with the drafter, which gives its children. A node's probability is the
//! product of the drafter's probabilities along its path, so no node is likelier than its parent. Hence the
//! `tokens_max` likeliest nodes form a tree. A node that falls out of them never returns, so it is not expanded.

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, SelfDraft};

use crate::sampler::Guess;

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Consecutive number. Parents come before children.
    id: usize,
    parent: Option<usize>,
    /// Index of the parent among the expanded nodes. `None` if the parent is the text.
    expanded_parent: Option<u32>,
    depth: u32,
    token: TokenId,
    /// Probability of the whole path.
    prob: f32,
}

/// A draft tree that grows level by level.
#[derive(Debug)]
pub(crate) struct DraftTree {
    /// Limits and mode. A drawn token stays in the draft even if it is unlikely, because leaving it out would change
    /// the distribution that verification relies on. It is then not expanded.
    options: SelfDraft,
    /// The `tokens_max` likeliest nodes, likeliest first.
    nodes: Vec<Node>,
    ids: usize,
    depth: u32,
    expanded_nodes: Vec<Node>,
    /// Tokens of the nodes to expand, and their parents among them. `None` stands for the text.
    expanded: Draft,
    /// Number of nodes that the drafter has computed. Later ones are to be computed next.
    computed: usize,
}

impl DraftTree {
    pub(crate) fn new(options: SelfDraft) -> Self {
        DraftTree {
            options,
            nodes: Vec::new(),
            ids: 0,
            depth: 0,
            expanded_nodes: Vec::new(),
            expanded: Draft::default(),
            computed: 0,
        }
    }

    /// Returns the largest number of nodes that are expanded.
    pub(crate) fn expanded_max(&self) -> usize {
        let level = self.options.top_k.min(self.options.tokens_max);
        ((self.options.depth - 1) * level) as usize
    }

    /// Returns all nodes to expand so far.
    pub(crate) fn expanded(&self) -> &Draft {
        &self.expanded
    }

    /// Returns how many of the nodes to expand have been computed. If all have, the tree is complete.
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    /// Adds the next level. `guesses` has at most `top_k` guesses, likeliest first, for each node that was to be
    /// computed. The first call has the guesses after the text.
    pub(crate) fn grow(&mut self, guesses: &[Vec<Guess>]) {
        self.depth += 1;
        let options = self.options;
        let is_likely = |prob: f32| prob >= options.path_prob_min;
        let first = self.computed;
        for (at, guesses) in guesses.iter().enumerate() {
            let parent = (self.depth > 1).then(|| (first + at, self.expanded_nodes[first + at]));
            for guess in guesses {
                let prob = parent.map_or(1.0, |(_, node)| node.prob) * guess.prob;
                // This leaves out NaN as well.
                if !(prob > 0.0 && (options.sampled || is_likely(prob))) {
                    continue;
                }
                self.nodes.push(Node {
                    id: self.ids,
                    parent: parent.map(|(_, node)| node.id),
                    expanded_parent: parent.map(|(row, _)| row as u32),
                    depth: self.depth,
                    token: guess.token,
                    prob,
                });
                self.ids += 1;
            }
        }
        self.nodes
            .sort_unstable_by(|a, b| b.prob.total_cmp(&a.prob).then(a.id.cmp(&b.id)));
        self.nodes.truncate(options.tokens_max as usize);
        self.computed = self.expanded_nodes.len();
        if self.depth < options.depth {
            let depth = self.depth;
            let likely_leaf = |node: &&Node| node.depth == depth && is_likely(node.prob);
            let leaves = self.nodes.iter().filter(likely_leaf);
            self.expanded_nodes
                .extend(leaves.take(options.top_k as usize));
            for node in &self.expanded_nodes[self.computed..] {
                self.expanded.tokens.push(node.token);
                self.expanded.parents.push(node.expanded_parent);
            }
        }
    }

    /// Returns the nodes to verify.
    pub(crate) fn into_draft(mut self) -> Draft {
        self.nodes.sort_unstable_by_key(|node| node.id);
        let place = |id: usize| self.nodes.binary_search_by_key(&id, |node| node.id);
        Draft {
            tokens: self.nodes.iter().map(|node| node.token).collect(),
            parents: self
                .nodes
                .iter()
                // A parent is at least as likely as its child and precedes it, so it has stayed.
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

    /// Returns guesses after a path, which are the same in every call.
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

    /// Grows a tree, and returns its paths and the number of nodes that were expanded.
    fn grown(options: SelfDraft) -> (BTreeSet<Vec<TokenId>>, usize) {
        let mut tree = DraftTree::new(options);
        tree.grow(&[guesses(&[], options.top_k as usize)]);
        let mut rows: Vec<Vec<TokenId>> = Vec::new();
        while tree.computed() < tree.expanded().tokens.len() {
            let mut level = Vec::new();
            for row in tree.computed()..tree.expanded().tokens.len() {
                let mut path = tree.expanded().parents[row]
                    .map_or_else(Vec::new, |parent| rows[parent as usize].clone());
                path.push(tree.expanded().tokens[row]);
                level.push(guesses(&path, options.top_k as usize));
                rows.push(path);
            }
            assert!(level.len() <= options.top_k as usize);
            tree.grow(&level);
        }
        assert!(rows.len() <= tree.expanded_max());
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

    /// Grows the same tree without any shortcut: expands every level in full, and picks the likeliest nodes at the
    /// end.
    fn naive(options: SelfDraft) -> BTreeSet<Vec<TokenId>> {
        let mut all: Vec<(f32, usize, Vec<TokenId>)> = Vec::new();
        let mut level: Vec<(f32, Vec<TokenId>)> = vec![(1.0, Vec::new())];
        for _ in 0..options.depth {
            let mut next = Vec::new();
            for (prob, path) in &level {
                for guess in guesses(path, options.top_k as usize) {
                    let mut path = path.clone();
                    path.push(guess.token);
                    next.push((prob * guess.prob, path));
                }
            }
            next.retain(|(prob, _)| *prob >= options.path_prob_min);
            for (prob, path) in &next {
                all.push((*prob, all.len(), path.clone()));
            }
            next.sort_by(|a, b| b.0.total_cmp(&a.0));
            next.truncate(options.top_k as usize);
            level = next;
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all.truncate(options.tokens_max as usize);
        all.into_iter().map(|(_, _, path)| path).collect()
    }

    #[test]
    fn the_likeliest_nodes_stay() {
        let mut most = 0;
        for depth in 1..6 {
            for top_k in [1, 2, 3, 7] {
                for tokens_max in [1, 2, 5, 12, 64] {
                    for path_prob_min in [0.0, 0.02, 0.3] {
                        let options = SelfDraft {
                            depth,
                            top_k,
                            tokens_max,
                            path_prob_min,
                            sampled: false,
                        };
                        let (paths, _) = grown(options);
                        assert_eq!(paths, naive(options), "{options:?}");
                        most = most.max(paths.len());
                    }
                }
            }
        }
        assert_eq!(most, 64);
    }

    #[test]
    fn nodes_that_cannot_stay_are_not_expanded() {
        let options = SelfDraft {
            depth: 5,
            top_k: 6,
            tokens_max: 64,
            path_prob_min: 0.0,
            sampled: false,
        };
        assert_eq!(grown(options).1, 24);
        let few = SelfDraft {
            tokens_max: 4,
            ..options
        };
        assert!(grown(few).1 < 10);
        let likely = SelfDraft {
            path_prob_min: 0.5,
            ..options
        };
        assert!(grown(likely).1 <= 4);
    }

    #[test]
    fn guesses_of_probability_zero_or_nan_end_a_path() {
        let mut tree = DraftTree::new(SelfDraft {
            depth: 4,
            top_k: 2,
            tokens_max: 8,
            path_prob_min: 0.0,
            sampled: false,
        });
        let guess = |token, prob| Guess { token, prob };
        tree.grow(&[vec![guess(1, f32::NAN), guess(2, 1.0)]]);
        assert_eq!(tree.expanded().tokens, [2]);
        tree.grow(&[vec![guess(3, 0.0)]]);
        assert_eq!(tree.computed(), tree.expanded().tokens.len());
        let draft = tree.into_draft();
        assert_eq!((draft.tokens, draft.parents), (vec![2], vec![None]));
    }

    #[test]
    fn a_drawn_guess_stays_and_is_not_expanded_if_unlikely() {
        let mut tree = DraftTree::new(SelfDraft {
            depth: 4,
            top_k: 1,
            tokens_max: 4,
            path_prob_min: 0.5,
            sampled: true,
        });
        let guess = |token, prob| Guess { token, prob };
        tree.grow(&[vec![guess(1, 0.9)]]);
        assert_eq!(tree.expanded().tokens, [1]);
        tree.grow(&[vec![guess(2, 0.1)]]);
        assert_eq!(tree.computed(), tree.expanded().tokens.len());
        assert_eq!(tree.into_draft().tokens, [1, 2]);
    }
}
