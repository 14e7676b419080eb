//! The special tokens of a vocabulary, and how they are found in a text.

use std::ops::Range;

use aho_corasick::{AhoCorasick, BuildError, MatchKind};

use crate::TokenId;

/// A marker of the model's own language, such as `<|im_end|>`.
#[derive(Clone, Debug)]
pub(super) struct SpecialToken {
    pub(super) id: TokenId,
    pub(super) text: String,
    /// It absorbs the white space before it.
    pub(super) lstrip: bool,
    /// It absorbs the white space after it.
    pub(super) rstrip: bool,
}

/// All special tokens of a vocabulary.
pub(super) struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    /// Finds all special tokens in a text, including those that overlap.
    overlapping: AhoCorasick,
    /// Finds special tokens one after the other, and the longest of several that begin at one position.
    leftmost_longest: AhoCorasick,
}

impl SpecialTokens {
    pub(super) fn new(mut tokens: Vec<SpecialToken>) -> Result<Self, BuildError> {
        tokens.sort_by_key(|token| token.id);
        let texts = || tokens.iter().map(|token| &*token.text);
        let overlapping = AhoCorasick::new(texts())?;
        let leftmost_longest = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts())?;
        Ok(SpecialTokens {
            overlapping,
            leftmost_longest,
            tokens,
        })
    }

    /// The special tokens of a text from left to right, with their byte ranges.
    pub(super) fn find_in<'a>(
        &'a self,
        text: &'a str,
    ) -> impl Iterator<Item = (Range<usize>, &'a SpecialToken)> {
        let found = self.leftmost_longest.find_iter(text);
        found.map(|found| (found.range(), &self.tokens[found.pattern()]))
    }

    /// Puts `guard` inside every special token of `text`, and inside every end of `text` that other text could
    /// complete to a special token. `None` if there is no such place.
    pub(super) fn guard(&self, text: &str, guard: char) -> Option<String> {
        let found = self.overlapping.find_overlapping_iter(text);
        let mut starts: Vec<usize> = found.map(|found| found.start()).collect();
        let lens = self.tokens.iter().map(|token| token.text.len());
        let tail = text.len().saturating_sub(lens.max().unwrap_or(0));
        let begins_token = |rest: &str| {
            let mut tokens = self.tokens.iter();
            tokens.any(|token| token.text.starts_with(rest))
        };
        let incomplete = (tail..text.len()).filter(|at| text.get(*at..).is_some_and(begins_token));
        starts.extend(incomplete);
        starts.sort_unstable();
        starts.dedup();
        if starts.is_empty() {
            return None;
        }
        let mut guarded = String::with_capacity(text.len() + starts.len() * guard.len_utf8());
        let mut copied = 0;
        for at in starts {
            let character = text[at..].chars().next();
            let after = at + character.map_or(0, char::len_utf8);
            guarded.push_str(&text[copied..after]);
            guarded.push(guard);
            copied = after;
        }
        guarded.push_str(&text[copied..]);
        Some(guarded)
    }
}
