//! [`DraftTree`]: candidate tokens under the current context.

use refrain_suffix_index::Token;

use super::{Scope, Source, Witnesses};

/// The source that is credited when a draft token is accepted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Origin {
    /// The source that drafted it.
    pub source: Source,
    /// The text that it was read from.
    pub scope: Scope,
    /// A place where the text has it, if it was read from a text.
    pub place: Option<refrain_suffix_index::Origin>,
}

/// One draft token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftNode {
    /// The token.
    pub token: Token,
    /// Index of its parent; `None` for a child of the context's last token.
    pub parent: Option<u32>,
    /// D(N): estimated probability that the whole path to this node is accepted (SuffixDecoding, section 3).
    pub probability: f32,
    /// Number of times that it was seen after its parent, at least 1 if it was read from a text; 0 if nothing was
    /// counted.
    pub count: u32,
    /// Length of the match under which it was found, in tokens.
    pub match_len: u32,
    /// The matches for and against it; `None` if it was drafted under one.
    pub witnesses: Option<Witnesses>,
    /// The source and the place that it was read from.
    pub origin: Origin,
}

/// Draft tokens as a tree whose root, the context's last token, is not part of it. A chain is a tree of
/// width one.
///
/// Parents come before their children and siblings differ in token, so any prefix of the nodes is a tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftTree {
    nodes: Vec<DraftNode>,
}

impl DraftTree {
    /// A tree of these nodes; `None` if a parent does not stand before its child, or if two siblings have one token,
    /// which verification could not distinguish.
    pub(crate) fn of_nodes(nodes: Vec<DraftNode>) -> Option<Self> {
        let tree = DraftTree { nodes };
        tree.is_sound().then_some(tree)
    }

    /// A tree of nodes that are known to form one.
    pub(crate) fn of_sound_nodes(nodes: Vec<DraftNode>) -> Self {
        let tree = DraftTree { nodes };
        debug_assert!(
            tree.is_sound(),
            "parents before children, siblings distinct"
        );
        tree
    }

    fn is_sound(&self) -> bool {
        // A child is only found after its parent, and only the first one of several.
        (0u32..)
            .zip(&self.nodes)
            .all(|(at, node)| self.child(node.parent, node.token) == Some(at))
    }

    /// Number of draft tokens.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing is drafted.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The nodes, parents before children.
    pub fn nodes(&self) -> &[DraftNode] {
        &self.nodes
    }

    /// Token of each node.
    pub fn tokens(&self) -> impl Iterator<Item = Token> + '_ {
        self.nodes.iter().map(|node| node.token)
    }

    /// Parent of each node.
    pub fn parents(&self) -> impl Iterator<Item = Option<u32>> + '_ {
        self.nodes.iter().map(|node| node.parent)
    }

    /// The child of `parent` with this token; `None` as the parent is the root.
    pub fn child(&self, parent: Option<u32>, token: Token) -> Option<u32> {
        let from = parent.map_or(0, |parent| parent as usize + 1);
        let within = self
            .nodes
            .get(from..)?
            .iter()
            .position(|node| node.parent == parent && node.token == token)?;
        Some((from + within) as u32)
    }

    /// Keeps the first `len` nodes. Proposals have their best nodes first, so the least valuable nodes are dropped.
    pub fn truncate(&mut self, len: usize) {
        self.nodes.truncate(len);
    }

    /// The depth of each node, 1 for a child of the root.
    pub(crate) fn depths(&self) -> impl Iterator<Item = u32> + '_ {
        let mut depths: Vec<u32> = Vec::with_capacity(self.nodes.len());
        self.nodes.iter().map(move |node| {
            let above = node.parent.map_or(0, |parent| depths[parent as usize]);
            depths.push(above + 1);
            above + 1
        })
    }

    /// These nodes as a new tree; `nodes` is ascending. A node whose parent is dropped is dropped as well.
    pub(crate) fn select(&self, nodes: &[u32]) -> DraftTree {
        let mut places = vec![None; self.nodes.len()];
        let mut selected = Vec::with_capacity(nodes.len());
        for &at in nodes {
            let Some(node) = self.nodes.get(at as usize) else {
                break;
            };
            let parent = node.parent.map(|parent| places[parent as usize]);
            if parent == Some(None) {
                continue;
            }
            places[at as usize] = Some(selected.len() as u32);
            selected.push(DraftNode {
                parent: parent.flatten(),
                ..*node
            });
        }
        DraftTree { nodes: selected }
    }

    /// SCORE: the expected tokens of the step, including the target's own (SuffixDecoding, section 3; its sum
    /// includes the root with D = 1). It is 0 for an empty tree.
    pub(crate) fn score(&self) -> f32 {
        if self.nodes.is_empty() {
            0.0
        } else {
            self.nodes
                .iter()
                .fold(1.0, |sum, node| sum + node.probability)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(token: Token, parent: Option<u32>) -> DraftNode {
        let origin = Origin {
            source: Source::Eagle3,
            scope: Scope::Request,
            place: None,
        };
        DraftNode {
            token,
            parent,
            probability: 0.5,
            count: 0,
            match_len: 0,
            witnesses: None,
            origin,
        }
    }

    #[test]
    fn only_trees_can_be_made() {
        let tree = |nodes: &[DraftNode]| DraftTree::of_nodes(nodes.to_vec());
        assert_eq!(tree(&[node(1, Some(0))]), None);
        assert_eq!(tree(&[node(1, None), node(3, Some(7))]), None);
        assert_eq!(tree(&[node(1, None), node(1, None)]), None);
        assert_eq!(tree(&[]), Some(DraftTree::default()));
        let mut tree = tree(&[node(1, None), node(1, Some(0)), node(2, None)]).unwrap();
        assert_eq!(tree.parents().collect::<Vec<_>>(), [None, Some(0), None]);
        assert_eq!(tree.depths().collect::<Vec<_>>(), [1, 2, 1]);
        assert_eq!(
            (
                tree.child(None, 2),
                tree.child(Some(0), 2),
                tree.child(Some(9), 2)
            ),
            (Some(2), None, None)
        );
        assert_eq!(tree.score(), 2.5);
        // Token 2 stays; token 1 is dropped with its child.
        let selected = tree.select(&[1, 2]);
        assert_eq!(
            (
                selected.tokens().collect::<Vec<_>>(),
                selected.parents().collect::<Vec<_>>()
            ),
            (vec![2], vec![None])
        );
        let selected = tree.select(&[0, 1]);
        assert_eq!(selected.parents().collect::<Vec<_>>(), [None, Some(0)]);
        tree.truncate(1);
        assert_eq!((tree.len(), tree.score()), (1, 1.5));
        tree.truncate(0);
        assert_eq!((tree.is_empty(), tree.score()), (true, 0.0));
    }
}
