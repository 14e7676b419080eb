//! The lossless acceptance rule for drafts that are certain tokens.

use refrain_suffix_index::Token;

use crate::DraftTree;

/// What one verified tree came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walk {
    /// Indices of the accepted nodes, from the root down.
    pub accepted: Vec<u32>,
    /// Their tokens, then the target's own: never empty.
    pub emitted: Vec<Token>,
}

/// Draws the target's token at each node, once; descends while it is a child, else stops with it.
///
/// `target(path)` is the token that the target draws after the context and `path`. Drafts decide only
/// how far one forward pass reaches: each emitted token is the target's own draw after those before it, so
/// the output is that of plain decoding, for greedy decoding and for any sampling (a draft is a point mass,
/// for which the rule of Leviathan et al., arXiv 2211.17192, accepts with exactly the target's
/// probability of it).
pub fn walk(tree: &DraftTree, mut target: impl FnMut(&[Token]) -> Token) -> Walk {
    let mut walk = Walk::default();
    let mut at = None;
    loop {
        let token = target(&walk.emitted);
        walk.emitted.push(token);
        let Some(child) = tree.child(at, token) else {
            return walk;
        };
        walk.accepted.push(child);
        at = Some(child);
    }
}
