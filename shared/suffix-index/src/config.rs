//! The settings of an index.

/// Settings of an [`Index`](crate::Index).
#[derive(Clone, Debug, PartialEq)]
pub struct IndexConfig {
    /// Counts of the live part saturate at this value (at least 2). It bounds the work per token on repetitive text.
    /// It distorts a distribution only where several continuations of one pattern reach it.
    pub count_cap: u16,
    /// Longest pattern that a cursor tracks and a search looks for, tokens (at least 1).
    pub pattern_tokens_max: u32,
    /// [`Index::needs_rebuild`](crate::Index::needs_rebuild) becomes true when more than this share of the live
    /// part's tokens is dead.
    pub dead_share_max: f32,
}

impl Default for IndexConfig {
    fn default() -> Self {
        IndexConfig {
            count_cap: 1024,
            pattern_tokens_max: 64,
            dead_share_max: 0.25,
        }
    }
}
