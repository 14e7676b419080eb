//! Comparison of a context with the texts that end at a segment's entries.

use std::cmp::Ordering;

use super::view::SegmentView;
use crate::Token;
use crate::memory_hints::prefetch;

/// Number of tokens that are compared at once.
const BLOCK: usize = 8;

/// A context and the segment with which it is compared.
#[derive(Clone, Copy)]
pub(super) struct ContextComparison<'a> {
    pub(super) view: SegmentView<'a>,
    /// The end of the context, as long as the longest pattern of interest. It contains no separator.
    pub(super) context: &'a [Token],
}

impl<'a> ContextComparison<'a> {
    /// Prefetches the text `known` tokens before each of the positions `ends`.
    pub(super) fn prefetch(&self, ends: &[u32], known: usize) {
        for &end in ends {
            prefetch(self.view.text, (end as usize).saturating_sub(known));
        }
    }

    /// Prefetches the tables' entries for the last two tokens of the context.
    pub(super) fn prefetch_ngrams(&self) {
        self.view.prefetch_ngrams(self.context);
    }

    /// Length of the common suffix of the context and the text that ends at a position.
    pub(super) fn common(&self, end: u32) -> usize {
        self.compare(end, self.context, 0).0
    }

    /// Whether the text that ends at a position ends with the last `len` tokens of the context.
    pub(super) fn ends_with(&self, end: u32, len: usize) -> bool {
        self.view.text[..=end as usize].ends_with(self.pattern(len))
    }

    /// Compares the text that ends at a position with a pattern. Returns the length of their common suffix, and the
    /// order of the text relative to the pattern, which is equal if the text ends with the whole pattern. The last
    /// `known` tokens are known to agree.
    pub(super) fn compare(&self, end: u32, pattern: &[Token], known: usize) -> (usize, Ordering) {
        let pattern = &pattern[..pattern.len() - known];
        let text = &self.view.text[..(end as usize + 1).saturating_sub(known)];
        // Usually the next token decides, and the block around it would begin in another cache line.
        if let (Some(one), Some(other)) = (text.last(), pattern.last())
            && one != other
        {
            return (known, one.cmp(other));
        }
        // Whole blocks first, since they are compared at once.
        let same = text
            .rchunks_exact(BLOCK)
            .zip(pattern.rchunks_exact(BLOCK))
            .take_while(|(one, other)| one == other)
            .count()
            * BLOCK;
        let text = &text[..text.len() - same];
        let pattern = &pattern[..pattern.len() - same];
        let (common, order) = compare(text.iter().rev(), pattern.iter().rev());
        (known + same + common, order)
    }

    /// The last `len` tokens of the context.
    pub(super) fn pattern(&self, len: usize) -> &'a [Token] {
        &self.context[self.context.len() - len..]
    }
}

/// Compares two sequences. Returns the length of their common prefix, and the order of the first relative to the
/// second, which is equal if the first begins with the whole second one.
pub(super) fn compare<'t>(
    mut one: impl Iterator<Item = &'t Token>,
    other: impl Iterator<Item = &'t Token>,
) -> (usize, Ordering) {
    let mut common = 0;
    for token in other {
        // A text begins with a separator, which no context contains, so it does not run out.
        let order = one.next().map_or(Ordering::Greater, |one| one.cmp(token));
        if order != Ordering::Equal {
            return (common, order);
        }
        common += 1;
    }
    (common, Ordering::Equal)
}
