//! Drafts made by hand, for tests.

use refrain_suffix_index::Token;

use crate::candidate::{Candidate, DraftNode, Origin, Scope, Source};

/// (parent, token, D, count)
pub(crate) type Node = (Option<u32>, Token, f32, u32);

/// A draft as a match of `match_len` tokens in `scope` would bring it.
pub(crate) fn draft(scope: Scope, match_len: u32, nodes: &[Node]) -> Candidate {
    let nodes = nodes
        .iter()
        .map(|&(parent, token, probability, count)| DraftNode {
            token,
            parent,
            probability,
            count,
            match_len,
            witnesses: None,
            origin: Origin {
                source: Source::Suffix,
                scope,
                place: None,
            },
        });
    Candidate::new(nodes.collect(), match_len, Source::Suffix, scope).unwrap()
}

/// A draft of one earlier copy: D = 1/2 everywhere.
pub(crate) fn drafted_once(
    scope: Scope,
    match_len: u32,
    nodes: &[(Token, Option<u32>)],
) -> Candidate {
    let nodes = nodes
        .iter()
        .map(|(token, parent)| (*parent, *token, 0.5, 1));
    draft(scope, match_len, &nodes.collect::<Vec<Node>>())
}
