//! Tables that answer some questions without a search: the entries of a single token, whether a pair of tokens
//! occurs, and the token after every sixteenth entry.
//!
//! They are not part of a segment's bytes. They take one pass over the text and one look at every sixteenth entry.

use std::ops::Range;

use super::format::SEPARATOR;
use crate::Token;
use crate::memory_hints::{prefetch, reserve_huge};

/// The token that follows is stored for every entry whose number is a multiple of this.
pub(crate) const NEXT_ENTRIES: usize = 16;

/// Text positions per word of the set of pairs, one bit each.
const PAIRS_POSITIONS: usize = 64;

/// The table of entries by token is built only if it takes at most one byte per this many text positions.
const STARTS_POSITIONS: usize = 16;

/// Tables of single tokens and pairs.
pub(super) struct NgramTables {
    /// The number of entries that end with a lower token, by token, up to the highest token and one more. Empty if
    /// token ids are much larger than the text is long.
    starts: Vec<u32>,
    /// The pairs of tokens with which entries end, as a Bloom filter: each pair sets two bits of one word.
    pairs: Vec<u64>,
    /// The token after every `NEXT_ENTRIES`th entry.
    next: Vec<Token>,
}

impl NgramTables {
    /// Builds the tables. `outputs` are the text positions of each document that are followed by its own output.
    pub(super) fn new(
        text: &[Token],
        ends: &[u32],
        outputs: impl Iterator<Item = Range<usize>>,
    ) -> Self {
        let highest = text.iter().filter(|&&token| token != SEPARATOR).max();
        let tokens = highest.map_or(0, |&highest| highest as usize + 2);
        let is_dense = tokens.saturating_mul(size_of::<u32>() * STARTS_POSITIONS) <= text.len();
        let mut starts = vec![0; if is_dense { tokens } else { 0 }];
        let words = text.len().div_ceil(PAIRS_POSITIONS);
        let mut pairs = with_room(words);
        pairs.resize(words, 0);
        for positions in outputs {
            for position in positions {
                let [before, last, next] =
                    [position - 1, position, position + 1].map(|at| text[at]);
                // A separator ends a match, wherever it is.
                if last == SEPARATOR || next == SEPARATOR {
                    continue;
                }
                if let Some(start) = starts.get_mut(last as usize + 1) {
                    *start += 1;
                }
                let (word, bits) = pair(pairs.len(), before, last);
                if pairs[word] & bits != bits {
                    pairs[word] |= bits;
                }
            }
        }
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let marked = ends.iter().step_by(NEXT_ENTRIES);
        let mut next = with_room(marked.len());
        // The last separator of a text is not an entry, so there always is a next token.
        next.extend(marked.map(|&end| text[end as usize + 1]));
        NgramTables {
            starts,
            pairs,
            next,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.starts.capacity() * size_of::<u32>()
            + self.pairs.capacity() * size_of::<u64>()
            + self.next.capacity() * size_of::<Token>()
    }

    /// The interval of entries that end with a token, if the table exists. In a segment with a wrong suffix array,
    /// other entries may be there, or fewer.
    pub(super) fn interval(&self, token: Token) -> Option<Range<usize>> {
        if self.starts.is_empty() {
            return None;
        }
        let at = |token: usize| self.starts.get(token).or(self.starts.last());
        let (start, end) = (at(token as usize)?, at(token as usize + 1)?);
        Some(*start as usize..*end as usize)
    }

    /// Prefetches the memory that [`interval`](Self::interval) and [`may_have`](Self::may_have) read.
    pub(super) fn prefetch(&self, last_but_one: Token, last: Token) {
        prefetch(&self.pairs, pair(self.pairs.len(), last_but_one, last).0);
        prefetch(&self.starts, last as usize);
    }

    /// Whether some entry may end with the pair.
    pub(super) fn may_have(&self, last_but_one: Token, last: Token) -> bool {
        let (word, bits) = pair(self.pairs.len(), last_but_one, last);
        self.pairs.get(word).is_some_and(|word| word & bits == bits)
    }

    /// The token after an entry. The entry's number is a multiple of [`NEXT_ENTRIES`].
    pub(super) fn next(&self, entry: usize) -> Token {
        self.next[entry / NEXT_ENTRIES]
    }
}

/// An empty list with room for this many elements, on huge pages if it fills one.
fn with_room<T>(count: usize) -> Vec<T> {
    let mut list = Vec::new();
    reserve_huge(&mut list, count);
    list
}

/// The word of a pair among `words` words, and its bits there.
fn pair(words: usize, last_but_one: Token, last: Token) -> (usize, u64) {
    let both = (u64::from(last_but_one) << 32) | u64::from(last);
    let mixed = (both ^ (both >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let word = ((u128::from(hash) * words as u128) >> 64) as usize;
    // The highest bits of the hash choose the word, so the lowest ones are still free to choose bits.
    (word, (1 << (hash & 63)) | (1 << ((hash >> 6) & 63)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DocumentKey, Segment, SegmentBuilder};

    /// A segment of documents with left contexts. Their tokens are multiples of `spread`, `alphabet` different ones.
    fn segment(alphabet: u32, spread: u32) -> Segment {
        let mut builder = SegmentBuilder::new();
        for number in 0..40 {
            let mut document = crate::tests::random(150, alphabet, number + 1);
            document.iter_mut().for_each(|token| *token *= spread);
            let (left, output) = document.split_at(number as usize % 7);
            let key = DocumentKey(number.into());
            builder.add(key, left.iter().copied(), output.iter().copied());
        }
        builder.build().expect("distinct keys")
    }

    #[test]
    fn tables_agree_with_the_entries() {
        for (alphabet, spread) in [(1, 1), (60, 1), (300, 1), (60, 1 << 20)] {
            let segment = segment(alphabet, spread);
            let view = segment.view();
            let last = |entry: usize| view.text[view.ends[entry] as usize];
            for (entry, &end) in view.ends.iter().enumerate() {
                let end = end as usize;
                assert!(view.may_have_pair(&view.text[end - 1..=end]));
                if entry % NEXT_ENTRIES == 0 {
                    assert_eq!(view.next(entry), Some(view.text[end + 1]));
                }
            }
            // The table by token is not built where it would be longer than the text.
            let is_dense = spread == 1 && alphabet < 80;
            for token in (0..alphabet + 2).map(|token| token * spread) {
                let truth: Vec<usize> = (0..view.ends.len())
                    .filter(|&at| last(at) == token)
                    .collect();
                match view.interval(token) {
                    Some(interval) => assert_eq!(interval.collect::<Vec<_>>(), truth, "{token}"),
                    None => assert!(!is_dense),
                }
            }
            assert_eq!(view.interval(0).is_some(), is_dense, "{alphabet} {spread}");
        }
    }

    #[test]
    fn the_filter_excludes_most_pairs_that_never_occur() {
        // Every pair occurs about fifteen times, as many pairs do in outputs of models.
        let segment = segment(20, 1);
        let view = segment.view();
        let passed = (0..1000).filter(|&token| view.may_have_pair(&[token + 1000, token % 20]));
        assert!(passed.count() < 150);
    }
}
