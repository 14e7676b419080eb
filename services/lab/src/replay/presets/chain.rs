//! Drafts that are copied text.

use refrain_speculation::draft::{Candidate, DraftNode, DraftTree, Origin, Scope, Source};
use refrain_suffix_index::Token;

/// Copied text as a draft; `None` if it is empty. A copy was counted once, and its tokens have probability 1.
pub(super) fn chain(tokens: &[Token], match_len: u32, scope: Scope) -> Option<Candidate> {
    let mut tree = DraftTree::new();
    for &token in tokens {
        let node = DraftNode {
            token,
            parent: (tree.len() as u32).checked_sub(1),
            probability: 1.0,
            count: 1,
            origin: Origin {
                source: Source::Suffix,
                scope,
                place: None,
            },
        };
        tree.push(node).ok()?;
    }
    (!tree.is_empty()).then(|| Candidate {
        score: tree.score(),
        tree,
        match_len,
        source: Source::Suffix,
        scope,
    })
}
