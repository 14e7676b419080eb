//! One sequence's part of a forward pass, and the paths of its draft tree.

use std::ops::Range;

use super::kv_cache::KvCache;

/// One sequence's part of a pass.
pub(crate) struct Branch<'a> {
    /// The cache of the positions before `chain`. It has been grown to hold those of `chain` too.
    pub(crate) kv: &'a mut KvCache,
    /// Position of `chain[0]`.
    pub(crate) start: usize,
    /// Tokens that become part of the sequence.
    pub(crate) chain: &'a [u32],
    /// Tokens of the draft tree, whose root is the chain's last token.
    pub(crate) nodes: &'a [u32],
    /// Parent of each node, which is an earlier node. `None` stands for the chain's last token.
    pub(crate) parents: &'a [Option<u32>],
    /// Number of nodes that earlier passes computed into the same `DraftKv`. They are not rows of this pass.
    pub(crate) computed_nodes: usize,
    /// Whether the pass returns logits of the chain's last token, if there is a chain, and of every new node.
    pub(crate) wants_logits: bool,
    /// Whether the pass returns the hidden states that `ModelForward` captures.
    pub(crate) wants_states: bool,
}

impl<'a> Branch<'a> {
    /// Creates a branch of a chain without a draft, which wants neither logits nor states.
    pub(crate) fn new(kv: &'a mut KvCache, start: usize, chain: &'a [u32]) -> Self {
        Branch {
            kv,
            start,
            chain,
            nodes: &[],
            parents: &[],
            computed_nodes: 0,
            wants_logits: false,
            wants_states: false,
        }
    }

    /// Returns the number of rows of this pass: the chain and the new nodes.
    pub(crate) fn rows(&self) -> usize {
        self.chain.len() + self.nodes.len() - self.computed_nodes
    }

    /// Returns the token of each row.
    pub(crate) fn row_tokens(&self) -> impl Iterator<Item = usize> {
        let nodes = &self.nodes[self.computed_nodes..];
        self.chain.iter().chain(nodes).map(|token| *token as usize)
    }

    /// Returns the number of rows whose logits are wanted. They are the last rows.
    fn logit_rows(&self) -> usize {
        if self.wants_logits {
            usize::from(!self.chain.is_empty()) + self.nodes.len() - self.computed_nodes
        } else {
            0
        }
    }
}

/// The path from the root to each node of a draft tree, the node included.
#[derive(Clone, Debug, Default)]
pub(crate) struct TreePaths {
    nodes: Vec<u32>,
    starts: Vec<usize>,
}

impl TreePaths {
    pub(crate) fn new(parents: &[Option<u32>]) -> Self {
        let mut paths = TreePaths {
            nodes: Vec::new(),
            starts: vec![0],
        };
        for (node, parent) in parents.iter().enumerate() {
            if let Some(parent) = parent {
                let parent = *parent as usize;
                paths
                    .nodes
                    .extend_from_within(paths.starts[parent]..paths.starts[parent + 1]);
            }
            paths.nodes.push(node as u32);
            paths.starts.push(paths.nodes.len());
        }
        paths
    }

    /// Returns the nodes from the root to `node`, both included.
    pub(crate) fn of(&self, node: usize) -> &[u32] {
        &self.nodes[self.starts[node]..self.starts[node + 1]]
    }
}

/// Returns, for each branch, the rows of the pass whose logits are wanted.
pub(crate) fn logit_rows(branches: &[Branch<'_>]) -> impl Iterator<Item = Range<usize>> {
    branches.iter().scan(0, |end, branch| {
        *end += branch.rows();
        Some(*end - branch.logit_rows()..*end)
    })
}
