//! [`Lookup`]: where drafts are searched.

use refrain_suffix_index::{Cursor, Index, Sighting, Token};

use crate::candidate::{Origin, Scope, Source};

/// One place to search for a draft: an index, and the position of the context in it.
#[derive(Clone, Copy)]
pub struct Lookup<'a> {
    /// Source of the drafts that it finds.
    pub source: Source,
    /// The text that it searches; more local scopes win ties.
    pub scope: Scope,
    /// The index.
    pub index: &'a Index,
    /// The context's cursor in it.
    pub cursor: Cursor,
    /// The end of the context itself, for parts of the index that are searched by text rather than by a cursor. Its
    /// last tokens are enough, as many as the index's `pattern_tokens_max`, since earlier ones are not read.
    pub context: &'a [Token],
}

impl Lookup<'_> {
    /// The origin of a token that was seen there.
    pub(super) fn origin(&self, sighting: Sighting) -> Origin {
        Origin {
            source: self.source,
            scope: self.scope,
            place: self.index.origin(sighting),
        }
    }
}
