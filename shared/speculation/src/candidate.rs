//! [`Candidate`]: a draft that was found, and what is known about it: its tree, its source, and what speaks for it.

mod source;
mod tree;
mod witnesses;

use refrain_suffix_index::Token;

pub use self::source::{Scope, Source};
pub use self::tree::{DraftNode, DraftTree, Origin};
pub use self::witnesses::Witnesses;

/// The best draft that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The draft tokens to verify; not empty.
    pub tree: DraftTree,
    /// SCORE: the expected tokens of the step, including the target's own; more than 1.
    pub score: f32,
    /// Length of the pattern under which it was found, in tokens.
    pub match_len: u32,
    /// The source that found it.
    pub source: Source,
    /// The text that it was read from.
    pub scope: Scope,
    /// The context's last token, which it follows, if that is known.
    pub after: Option<Token>,
}

impl Candidate {
    /// A draft of these nodes; `None` if they are none, or no tree: a parent does not stand before its child, or two
    /// siblings have one token.
    pub fn new(
        nodes: Vec<DraftNode>,
        match_len: u32,
        source: Source,
        scope: Scope,
    ) -> Option<Self> {
        let tree = DraftTree::of_nodes(nodes).filter(|tree| !tree.is_empty())?;
        Some(Self::of_tree(tree, match_len, source, scope))
    }

    /// A draft of this tree, whose SCORE is by its D(N).
    pub(crate) fn of_tree(tree: DraftTree, match_len: u32, source: Source, scope: Scope) -> Self {
        Candidate {
            score: tree.score(),
            tree,
            match_len,
            source,
            scope,
            after: None,
        }
    }

    /// The same draft, which follows this token.
    pub(crate) fn following(self, after: Option<Token>) -> Self {
        Candidate { after, ..self }
    }

    /// The part of the draft that has these nodes, ascending. A node whose parent is left out is left out as well.
    pub fn part(&self, nodes: &[u32]) -> Candidate {
        let tree = self.tree.select(nodes);
        Candidate {
            score: tree.score(),
            tree,
            ..*self
        }
    }
}
