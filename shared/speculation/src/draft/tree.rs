//! [`DraftTree`]: candidate tokens under the current context.

use std::fmt;

use refrain_suffix_index::Token;

use super::{Scope, Source};

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

/// The reason why a node does not fit into a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeError {
    /// The parent is not in the tree (yet).
    UnknownParent(u32),
    /// The parent already has a child with this token. Verification could not distinguish the two.
    DuplicateSibling(Token),
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TreeError::UnknownParent(parent) => {
                write!(f, "parent {parent} does not stand before its child")
            }
            TreeError::DuplicateSibling(token) => write!(f, "two siblings have the token {token}"),
        }
    }
}

impl std::error::Error for TreeError {}

impl DraftTree {
    /// An empty tree.
    pub fn new() -> Self {
        DraftTree::default()
    }

    /// Adds a node and returns its index. It compares the node with all nodes after the parent.
    pub fn push(&mut self, node: DraftNode) -> Result<u32, TreeError> {
        let len = self.nodes.len() as u32;
        if let Some(parent) = node.parent.filter(|&parent| parent >= len) {
            return Err(TreeError::UnknownParent(parent));
        }
        if self.child(node.parent, node.token).is_some() {
            return Err(TreeError::DuplicateSibling(node.token));
        }
        self.nodes.push(node);
        Ok(len)
    }

    /// A tree of nodes that are known to form one.
    pub(crate) fn from_nodes(nodes: Vec<DraftNode>) -> Self {
        debug_assert!(
            nodes.iter().enumerate().all(|(at, node)| {
                node.parent.is_none_or(|parent| (parent as usize) < at)
                    && nodes[..at]
                        .iter()
                        .all(|other| (other.parent, other.token) != (node.parent, node.token))
            }),
            "parents before children, siblings distinct"
        );
        DraftTree { nodes }
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

    /// The nodes for whose index `keep` is true, as a new tree.
    ///
    /// A node whose parent is dropped is dropped as well.
    pub fn select(&self, mut keep: impl FnMut(usize) -> bool) -> DraftTree {
        let mut places = vec![None; self.nodes.len()];
        let mut nodes = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            let parent = node.parent.map(|parent| places[parent as usize]);
            if parent == Some(None) || !keep(at) {
                continue;
            }
            places[at] = Some(nodes.len() as u32);
            nodes.push(DraftNode {
                parent: parent.flatten(),
                ..*node
            });
        }
        DraftTree { nodes }
    }

    /// SCORE: the expected tokens of the step, including the target's own (SuffixDecoding, section 3; its sum
    /// includes the root with D = 1). It is 0 for an empty tree.
    pub fn score(&self) -> f32 {
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
            origin,
        }
    }

    #[test]
    fn only_trees_can_be_made() {
        let mut tree = DraftTree::new();
        assert_eq!(
            tree.push(node(1, Some(0))),
            Err(TreeError::UnknownParent(0))
        );
        assert_eq!(tree.push(node(1, None)), Ok(0));
        assert_eq!(tree.push(node(1, Some(0))), Ok(1));
        assert_eq!(
            tree.push(node(1, None)),
            Err(TreeError::DuplicateSibling(1))
        );
        assert_eq!(tree.push(node(2, None)), Ok(2));
        assert_eq!(
            tree.push(node(3, Some(7))),
            Err(TreeError::UnknownParent(7))
        );
        assert_eq!(tree.parents().collect::<Vec<_>>(), [None, Some(0), None]);
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
        let selected = tree.select(|node| node != 0);
        assert_eq!(
            (
                selected.tokens().collect::<Vec<_>>(),
                selected.parents().collect::<Vec<_>>()
            ),
            (vec![2], vec![None])
        );
        let selected = tree.select(|node| node != 2);
        assert_eq!(selected.parents().collect::<Vec<_>>(), [None, Some(0)]);
        tree.truncate(1);
        assert_eq!((tree.len(), tree.score()), (1, 1.5));
        tree.truncate(0);
        assert_eq!((tree.is_empty(), tree.score()), (true, 0.0));
    }
}
