//! Drafts that are copied text.

use refrain_speculation::draft::{Candidate, DraftNode, Origin, Scope, Source};
use refrain_suffix_index::Token;

/// Copied text as a draft; `None` if it is empty. A copy was counted once, and its tokens have probability 1.
pub(super) fn chain(tokens: &[Token], match_len: u32, scope: Scope) -> Option<Candidate> {
    let nodes = (0u32..).zip(tokens).map(|(at, &token)| DraftNode {
        token,
        parent: at.checked_sub(1),
        probability: 1.0,
        count: 1,
        match_len,
        witnesses: None,
        origin: Origin {
            source: Source::Suffix,
            scope,
            place: None,
        },
    });
    Candidate::new(nodes.collect(), match_len, Source::Suffix, scope)
}
