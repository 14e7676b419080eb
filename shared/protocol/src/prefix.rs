//! Hashes of the prefixes of a context, by which a scheduler that sees no tokens knows what an engine holds.
//!
//! The simplest way is one hash for each block of a fixed length, as engines have it. With blocks of 64 tokens, a
//! conversation of 100,000 tokens then needs 1,500 hashes in each call. Here the marks lie the further apart, the
//! longer the prefix is, so the same conversation needs 192. Tokens between two marks count as missing.
//!
//! All contexts have the same marks, and a hash covers all tokens up to its mark. So two contexts share the prefix up
//! to the last mark at which their hashes are equal.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{NamespaceId, TokenId};

/// Tokens between two marks, up to the given length of a prefix. Beyond the last length there are no marks.
const SPACING: [(u32, u32); 3] = [(64, 4_096), (512, 65_536), (4_096, 1 << 20)];

/// Most hashes of one context.
pub const PREFIXES_MAX: usize = 64 + 120 + 240;

/// The hash of a prefix of a context, in a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PrefixHash(pub u64);

/// The lengths at which prefixes are hashed, shortest first.
pub fn marks() -> impl Iterator<Item = u32> {
    let mut start = 0;
    SPACING.into_iter().flat_map(move |(step, end)| {
        let marks = (start + step..=end).step_by(step as usize);
        start = end;
        marks
    })
}

/// The length of the prefix of hash number `nth` of a context, counted from 0.
pub fn mark(nth: usize) -> u32 {
    let mut start = 0;
    let mut left = u32::try_from(nth).unwrap_or(u32::MAX).saturating_add(1);
    for (step, end) in SPACING {
        let marks = (end - start) / step;
        if left <= marks {
            return start + left * step;
        }
        left -= marks;
        start = end;
    }
    start
}

/// Hashes the prefixes of `context` at all [`marks`] that it reaches.
pub fn prefix_hashes(namespace: &NamespaceId, context: &[TokenId]) -> Vec<PrefixHash> {
    let mut hasher = PrefixHasher::new(namespace);
    hasher.extend(context);
    hasher.hashes
}

/// Tokens that are turned into bytes at once.
const BLOCK_TOKENS: usize = 512;

/// Hashes the prefixes of a context that grows. Each token is read once, however often the hashes are wanted.
#[derive(Clone)]
pub struct PrefixHasher {
    hasher: Xxh3,
    len: usize,
    hashes: Vec<PrefixHash>,
}

impl PrefixHasher {
    /// Begins an empty context.
    pub fn new(namespace: &NamespaceId) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&namespace.0.to_le_bytes());
        PrefixHasher {
            hasher,
            len: 0,
            hashes: Vec::new(),
        }
    }

    /// Adds the tokens that come next.
    pub fn extend(&mut self, mut tokens: &[TokenId]) {
        let mut bytes = [0_u8; BLOCK_TOKENS * size_of::<TokenId>()];
        while !tokens.is_empty() {
            let mark = next_mark(self.len);
            let up_to_mark = mark.map_or(BLOCK_TOKENS, |mark| mark - self.len);
            let (block, rest) = tokens.split_at(up_to_mark.min(BLOCK_TOKENS).min(tokens.len()));
            let (places, _) = bytes.as_chunks_mut::<{ size_of::<TokenId>() }>();
            for (place, token) in places.iter_mut().zip(block) {
                *place = token.to_le_bytes();
            }
            self.hasher.update(&bytes[..size_of_val(block)]);
            self.len += block.len();
            if mark == Some(self.len) {
                self.hashes.push(PrefixHash(self.hasher.digest()));
            }
            tokens = rest;
        }
    }

    /// Length of the context, tokens.
    pub fn context_len(&self) -> usize {
        self.len
    }

    /// The hashes at all [`marks`] that the context reaches.
    pub fn hashes(&self) -> &[PrefixHash] {
        &self.hashes
    }

    /// The hash of the whole context.
    pub fn whole(&self) -> PrefixHash {
        PrefixHash(self.hasher.digest())
    }
}

/// The first mark behind `len` tokens; `None` behind the last one.
fn next_mark(len: usize) -> Option<usize> {
    let spacing = SPACING.map(|(step, end)| (step as usize, end as usize));
    let (step, _) = spacing.into_iter().find(|(_, end)| len < *end)?;
    Some((len / step + 1) * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_grow_apart() {
        let marks: Vec<u32> = marks().collect();
        assert_eq!(marks[..3], [64, 128, 192]);
        assert_eq!(marks[63..66], [4_096, 4_608, 5_120]);
        assert!(marks.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(marks.last(), Some(&(1 << 20)));
        assert_eq!(marks.iter().filter(|mark| **mark <= 100_000).count(), 192);
        for (nth, length) in marks.iter().enumerate() {
            assert_eq!(mark(nth), *length);
        }
        assert_eq!(mark(usize::MAX), 1 << 20);
        assert_eq!(marks.len(), PREFIXES_MAX);
    }

    #[test]
    fn contexts_share_hashes_up_to_the_last_mark_before_they_differ() {
        let namespace = NamespaceId(1);
        let one: Vec<TokenId> = (0..1_000).collect();
        let mut other = one.clone();
        other[200] = 7;
        let (of_one, of_other) = (
            prefix_hashes(&namespace, &one),
            prefix_hashes(&namespace, &other),
        );
        assert_eq!(of_one.len(), 15);
        let shared = of_one
            .iter()
            .zip(&of_other)
            .take_while(|(a, b)| a == b)
            .count();
        assert_eq!(shared, 3);
        assert!(of_one[3..].iter().zip(&of_other[3..]).all(|(a, b)| a != b));
        assert_ne!(prefix_hashes(&NamespaceId(2), &one)[0], of_one[0]);
        assert_eq!(prefix_hashes(&namespace, &one[..63]), []);
    }

    #[test]
    fn a_context_that_grows_has_the_hashes_of_the_whole_one() {
        let namespace = NamespaceId(7);
        let context: Vec<TokenId> = (0..(1 << 20) + 5_000).map(|token| token * 31).collect();
        // The simplest way: each prefix by itself.
        let expected: Vec<PrefixHash> = marks()
            .take(70)
            .map(|mark| {
                let mut hasher = Xxh3::new();
                hasher.update(&namespace.0.to_le_bytes());
                for token in &context[..mark as usize] {
                    hasher.update(&token.to_le_bytes());
                }
                PrefixHash(hasher.digest())
            })
            .collect();
        for piece in [1, 63, 64, 65, 4_097, context.len()] {
            let mut hasher = PrefixHasher::new(&namespace);
            for (number, tokens) in context.chunks(piece).enumerate() {
                hasher.extend(tokens);
                if number % 1_000 == 0 {
                    assert_eq!(
                        hasher.hashes().len(),
                        marks()
                            .take_while(|mark| *mark as usize <= hasher.context_len())
                            .count()
                    );
                }
            }
            assert_eq!(hasher.context_len(), context.len());
            assert_eq!(hasher.hashes()[..70], expected, "pieces of {piece}");
            assert_eq!(hasher.hashes(), prefix_hashes(&namespace, &context));
            assert_eq!(hasher.hashes().len(), marks().count());
        }
    }

    #[test]
    fn the_whole_context_has_a_hash_at_any_length() {
        let hash = |tokens: &[TokenId]| {
            let mut hasher = PrefixHasher::new(&NamespaceId(1));
            hasher.extend(tokens);
            hasher.whole()
        };
        assert_eq!(hash(&[1, 2, 3]), hash(&[1, 2, 3]));
        assert_ne!(hash(&[1, 2, 3]), hash(&[1, 2]));
        let mut hasher = PrefixHasher::new(&NamespaceId(2));
        hasher.extend(&[1, 2, 3]);
        assert_ne!(hasher.whole(), hash(&[1, 2, 3]));
    }
}
