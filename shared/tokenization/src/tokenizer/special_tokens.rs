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
    /// The texts of all special tokens in order, so that the beginnings of tokens are found by bisection.
    sorted: Vec<String>,
    /// Whether some special token begins with this byte.
    first_bytes: [bool; 256],
    longest: usize,
}

impl SpecialTokens {
    pub(super) fn new(mut tokens: Vec<SpecialToken>) -> Result<Self, BuildError> {
        tokens.sort_by_key(|token| token.id);
        let texts = || tokens.iter().map(|token| &*token.text);
        let overlapping = AhoCorasick::new(texts())?;
        let leftmost_longest = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts())?;
        let mut sorted: Vec<String> = texts().map(str::to_owned).collect();
        sorted.sort_unstable();
        let mut first_bytes = [false; 256];
        for byte in texts().filter_map(|text| text.bytes().next()) {
            first_bytes[usize::from(byte)] = true;
        }
        Ok(SpecialTokens {
            overlapping,
            leftmost_longest,
            longest: texts().map(str::len).max().unwrap_or(0),
            sorted,
            first_bytes,
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

    /// The places in the end of `text` from which other text could complete a special token.
    fn incomplete<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let tail = text.len().saturating_sub(self.longest);
        (tail..text.len()).filter(move |at| {
            let bytes = &text.as_bytes()[*at..];
            self.first_bytes[usize::from(bytes[0])] && {
                let next = self
                    .sorted
                    .partition_point(|token| token.as_bytes() < bytes);
                let next = self.sorted.get(next);
                next.is_some_and(|token| token.as_bytes().starts_with(bytes))
            }
        })
    }

    /// Whether [`SpecialTokens::guard`] would change this text.
    pub(super) fn needs_guard(&self, text: &str) -> bool {
        // Unlike the search for all tokens, this one skips over text that has no byte of a token.
        self.leftmost_longest.is_match(text) || self.incomplete(text).next().is_some()
    }

    /// Puts `guard` inside every special token of `text`, and inside every end of `text` that other text could
    /// complete to a special token. `None` if there is no such place.
    pub(super) fn guard(&self, text: &str, guard: char) -> Option<String> {
        if !self.needs_guard(text) {
            return None;
        }
        let found = self.overlapping.find_overlapping_iter(text);
        let mut starts: Vec<usize> = found.map(|found| found.start()).collect();
        starts.extend(self.incomplete(text));
        starts.sort_unstable();
        starts.dedup();
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
