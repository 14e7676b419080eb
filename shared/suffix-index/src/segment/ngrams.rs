//! What single tokens and pairs of them say of a text, before anything is searched for: where the entries of a token
//! stand, whether a pair occurs at all, and what follows some of the entries.
//!
//! None of it is part of a segment's bytes. It is made in one pass over the text, and one look at every sixteenth entry.

use std::ops::Range;

use super::{SEPARATOR, View};
use crate::Token;
use crate::memory::{fetch, make_room};

/// Every so many entries the token that follows is at hand.
pub(crate) const NEXT_ENTRIES: usize = 16;

/// Text positions to a word of the set of pairs: one bit each.
const PAIRS_POSITIONS: usize = 64;

/// Where entries of a token stand is kept if it takes no more than a byte for so many positions of the text.
const STARTS_POSITIONS: usize = 16;

/// See the module.
pub(super) struct Grams {
    /// How many entries end with a lower token, by token up to the highest and one more. Empty where token ids reach far
    /// beyond the length of the text.
    starts: Vec<u32>,
    /// The pairs of tokens that entries end with, a Bloom filter: each sets two bits of one word.
    pairs: Vec<u64>,
    /// The token that follows every `NEXT_ENTRIES`th entry.
    next: Vec<Token>,
}

impl Grams {
    pub(super) fn new(view: &View<'_>) -> Self {
        let highest = view.text.iter().filter(|&&token| token != SEPARATOR).max();
        let tokens = highest.map_or(0, |&highest| highest as usize + 2);
        let is_dense =
            tokens.saturating_mul(size_of::<u32>() * STARTS_POSITIONS) <= view.text.len();
        let mut starts = vec![0; if is_dense { tokens } else { 0 }];
        let words = view.text.len().div_ceil(PAIRS_POSITIONS);
        let mut pairs = roomy(words);
        pairs.resize(words, 0);
        for number in 0..view.documents() {
            let document = view.output_ends(number);
            for position in document {
                let [before, last, next] =
                    [position - 1, position, position + 1].map(|at| view.text[at]);
                // A token of that value ends a match wherever it stands.
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
        let marked = view.ends.iter().step_by(NEXT_ENTRIES);
        let mut next = roomy(marked.len());
        // The last separator of a text is no end.
        next.extend(marked.map(|&end| view.text[end as usize + 1]));
        Grams {
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

    /// The entries that end with a token, if that is known. A segment whose array is not what it should be has others
    /// there, and perhaps fewer.
    pub(super) fn interval(&self, token: Token) -> Option<Range<usize>> {
        if self.starts.is_empty() {
            return None;
        }
        let at = |token: usize| self.starts.get(token).or(self.starts.last());
        let (start, end) = (at(token as usize)?, at(token as usize + 1)?);
        Some(*start as usize..*end as usize)
    }

    /// Asks for what [`interval`](Self::interval) and [`may_have`](Self::may_have) read.
    pub(super) fn fetch(&self, last_but_one: Token, last: Token) {
        fetch(&self.pairs, pair(self.pairs.len(), last_but_one, last).0);
        fetch(&self.starts, last as usize);
    }

    /// Whether an entry may end with the pair.
    pub(super) fn may_have(&self, last_but_one: Token, last: Token) -> bool {
        let (word, bits) = pair(self.pairs.len(), last_but_one, last);
        self.pairs.get(word).is_some_and(|word| word & bits == bits)
    }

    /// The token that follows an entry, a multiple of `NEXT_ENTRIES`.
    pub(super) fn next(&self, entry: usize) -> Token {
        self.next[entry / NEXT_ENTRIES]
    }
}

/// Room for so many, where a search finds them fastest.
fn roomy<T>(count: usize) -> Vec<T> {
    let mut list = Vec::new();
    make_room(&mut list, count);
    list
}

/// The word of a pair, of so many, and its bits there.
fn pair(words: usize, last_but_one: Token, last: Token) -> (usize, u64) {
    let both = (u64::from(last_but_one) << 32) | u64::from(last);
    let mixed = (both ^ (both >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let word = ((u128::from(hash) * words as u128) >> 64) as usize;
    // The word is told by the highest bits, so the lowest are still free.
    (word, (1 << (hash & 63)) | (1 << ((hash >> 6) & 63)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DocumentKey, Segment, SegmentBuilder};

    /// Documents with left contexts, of tokens below `alphabet` that are `spread` apart.
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
    fn what_is_known_without_a_search_is_so() {
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
            // A table by token that would be longer than the text is not made.
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
    fn most_pairs_that_never_were_are_known_not_to_be() {
        // Every pair occurs some fifteen times, as many do in text of models.
        let segment = segment(20, 1);
        let view = segment.view();
        let never = (0..1000).filter(|&token| view.may_have_pair(&[token + 1000, token % 20]));
        assert!(never.count() < 150);
    }
}
