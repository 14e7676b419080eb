//! Read access to the sections of a segment.

use std::ops::Range;

use super::format::{FENCE_TOKENS, Layout, key_words};
use super::ngrams::NgramTables;
use crate::{DocumentKey, Token};

/// Number of fences per entry of the summary. A search of the fences begins in the summary.
pub(super) const SUMMARY_FENCES: usize = 16;

/// Text positions per entry of the document directory.
const DIRECTORY_POSITIONS: usize = 256;

/// A document of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedDocument<'a> {
    /// Its key.
    pub key: DocumentKey,
    /// Tokens that are matched but never offered.
    pub left_context: &'a [Token],
    /// Tokens that are matched and offered.
    pub output: &'a [Token],
}

/// A segment's sections, each as a slice.
#[derive(Clone, Copy)]
pub(crate) struct SegmentView<'a> {
    /// The text: separator, document, separator, document, ..., separator.
    pub(crate) text: &'a [Token],
    /// The suffix array: the positions whose next token is output, sorted by the text that ends there, read
    /// backwards.
    pub(crate) ends: &'a [u32],
    /// The last `FENCE_TOKENS` tokens, read backwards, of every `FENCE_ENTRIES`th entry of `ends`.
    pub(crate) fences: &'a [[Token; FENCE_TOKENS]],
    /// The keys in ascending order, each in four words, highest word first.
    pub(super) keys: &'a [[u32; 4]],
    /// The text position at which each document starts.
    pub(super) starts: &'a [u32],
    /// The length of each document's left context.
    pub(super) lefts: &'a [u32],
    pub(super) directory: &'a [u32],
    pub(crate) summary: &'a [u64],
    pub(super) ngrams: Option<&'a NgramTables>,
}

/// An entry of the summary: the last two tokens of a text, ordered by the last one first.
pub(crate) fn summary(last: Token, last_but_one: Token) -> u64 {
    u64::from(last) << 32 | u64::from(last_but_one)
}

impl<'a> SegmentView<'a> {
    pub(super) fn new(words: &'a [u32], layout: &Layout) -> Self {
        let [text, ends, fences, keys, starts, lefts] = layout.sections(words);
        SegmentView {
            text,
            ends,
            fences: fences.as_chunks().0,
            keys: keys.as_chunks().0,
            starts,
            lefts,
            directory: &[],
            summary: &[],
            ngrams: None,
        }
    }

    pub(crate) fn documents(&self) -> usize {
        self.starts.len()
    }

    pub(crate) fn key(&self, number: usize) -> DocumentKey {
        let key = self.keys[number];
        DocumentKey(
            key.iter()
                .fold(0, |key, &word| key << 32 | u128::from(word)),
        )
    }

    /// The number of the document with this key.
    pub(crate) fn find(&self, key: DocumentKey) -> Option<usize> {
        self.keys.binary_search(&key_words(key)).ok()
    }

    pub(crate) fn document(&self, number: usize) -> SealedDocument<'a> {
        let start = self.starts[number] as usize;
        let (left_context, output) =
            self.text[start..self.end(number)].split_at(self.lefts[number] as usize);
        SealedDocument {
            key: self.key(number),
            left_context,
            output,
        }
    }

    /// The text positions of a document, left context included.
    pub(crate) fn span(&self, number: usize) -> Range<usize> {
        self.starts[number] as usize..self.end(number)
    }

    /// Number of tokens of a document, left context included.
    pub(crate) fn tokens_of(&self, number: usize) -> u64 {
        (self.end(number) - self.starts[number] as usize) as u64
    }

    /// The number of the document that contains a text position.
    pub(crate) fn document_at(&self, position: u32) -> usize {
        let slot = position as usize / DIRECTORY_POSITIONS;
        let first = self.directory.get(slot).map_or(0, |&first| first as usize);
        let last = self
            .directory
            .get(slot + 1)
            .map_or(self.documents(), |&last| last as usize + 1);
        let within = self.starts[first..last.min(self.documents())]
            .partition_point(|&start| start <= position);
        (first + within).saturating_sub(1)
    }

    /// The text positions of a document that are followed by its own output.
    pub(super) fn output_ends(&self, number: usize) -> Range<usize> {
        let (start, end) = (self.starts[number] as usize, self.end(number));
        let first = (start + self.lefts[number] as usize).max(start + 1) - 1;
        first..end.max(1) - 1
    }

    /// The interval of a token, if the tables know it.
    pub(crate) fn interval(&self, token: Token) -> Option<Range<usize>> {
        let interval = self.ngrams?.interval(token)?;
        let all = self.ends.len();
        Some(interval.start.min(all)..interval.end.min(all))
    }

    /// Prefetches the tables' entries for the last two tokens of a context.
    pub(crate) fn prefetch_ngrams(&self, context: &[Token]) {
        if let (&[.., last_but_one, last], Some(ngrams)) = (context, self.ngrams) {
            ngrams.prefetch(last_but_one, last);
        }
    }

    /// Whether some entry may end with the last two tokens of a context.
    pub(crate) fn may_have_pair(&self, context: &[Token]) -> bool {
        match (context, self.ngrams) {
            (&[.., last_but_one, last], Some(ngrams)) => ngrams.may_have(last_but_one, last),
            _ => true,
        }
    }

    /// The token that follows an entry, if the tables have it.
    pub(crate) fn next(&self, entry: usize) -> Option<Token> {
        Some(self.ngrams?.next(entry))
    }

    /// The text position of the token after an entry.
    pub(crate) fn after(&self, entry: u32) -> Option<u32> {
        self.ends.get(entry as usize).map(|end| end + 1)
    }

    /// Number of the document's output tokens before `position`.
    pub(crate) fn output_offset(&self, number: usize, position: u32) -> u32 {
        position.saturating_sub(self.starts[number] + self.lefts[number])
    }

    /// The position of the separator after a document.
    fn end(&self, number: usize) -> usize {
        self.starts
            .get(number + 1)
            .map_or(self.text.len(), |&next| next as usize)
            - 1
    }

    /// The document of every [`DIRECTORY_POSITIONS`]th text position.
    pub(super) fn build_directory(&self) -> Vec<u32> {
        let mut number = 0;
        (0..self.text.len().div_ceil(DIRECTORY_POSITIONS))
            .map(|slot| {
                let position = (slot * DIRECTORY_POSITIONS) as u32;
                while self
                    .starts
                    .get(number + 1)
                    .is_some_and(|&next| next <= position)
                {
                    number += 1;
                }
                number as u32
            })
            .collect()
    }
}
