//! The features of a draft node that are known before it is verified.

use refrain_suffix_index::Token;

use crate::candidate::{Scope, Source, Witnesses};

/// Sources and scopes that have tables of their own: see [`kind`].
pub(super) const KINDS: usize = Scope::ALL.len() + 2;

/// The features of a draft node that are known before it is verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NodeFeatures {
    /// The source that drafted it.
    pub(crate) source: Source,
    /// The text it was read from; only used for [`Source::Suffix`].
    pub(crate) scope: Scope,
    /// Length of the pattern it was found under, in tokens.
    pub(crate) match_len: u32,
    /// Its depth in the draft, 1 for a child of the root.
    pub(crate) depth: u32,
    /// How often it was seen there; 0 if nothing was counted.
    pub(crate) count: u32,
    /// C(N), its share of all continuations that were seen there. It is the estimate until something was observed.
    pub(crate) share: f32,
    /// The matches for and against it; `None` if it was drafted under one.
    pub(crate) witnesses: Option<Witnesses>,
    /// The token before it, if it is known.
    pub(crate) after: Option<Token>,
    /// The token. Without it the tokens are no feature.
    pub(crate) token: Option<Token>,
}

impl NodeFeatures {
    /// A node of which only the match is known.
    pub(super) fn under_match(source: Source, scope: Scope, match_len: u32) -> Self {
        NodeFeatures {
            source,
            scope,
            match_len,
            depth: 1,
            count: 0,
            share: 0.0,
            witnesses: None,
            after: None,
            token: None,
        }
    }
}

/// The kinds of these sources and scopes, as bits.
pub(crate) fn kinds(of: impl Iterator<Item = (Source, Scope)>) -> u8 {
    of.filter_map(|(source, scope)| kind(source, scope))
        .fold(0, |kinds, kind| kinds | 1 << kind)
}

/// The table of a source and scope; `None` where nothing is drafted.
pub(super) fn kind(source: Source, scope: Scope) -> Option<usize> {
    match source {
        // The order is that of the tables as bytes, where new ones come last.
        Source::Suffix => Some(match scope {
            Scope::Request => 0,
            Scope::Group => 1,
            Scope::Tenant => 2,
        }),
        Source::Prediction => Some(3),
        Source::Eagle3 => Some(4),
        // Forced tokens are certain, so nothing is learnt from them.
        Source::Grammar | Source::None => None,
    }
}
