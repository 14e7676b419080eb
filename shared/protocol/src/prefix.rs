//! Hashes of the prefixes of a context, by which a scheduler that sees no tokens knows what an engine holds.
//!
//! The simplest way is one hash for each block of a fixed length, as engines have it. With blocks of 64 tokens, a
//! conversation of 100,000 tokens then needs 1,500 hashes in each call. Here the marks lie the further apart, the longer
//! the prefix is, so the same conversation needs 192. What lies between two marks counts as missing.
//!
//! All contexts have the same marks, and a hash covers all tokens up to its mark. So two contexts share the prefix up
//! to the last mark at which their hashes are equal.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{NamespaceId, TokenId};

/// Tokens between two marks, up to the given length of a prefix. Beyond the last length there are no marks.
const SPACING: [(u32, u32); 3] = [(64, 4_096), (512, 65_536), (4_096, 1 << 20)];

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

/// Hashes the prefixes of `context` at all [`marks`] that it reaches.
pub fn prefix_hashes(namespace: &NamespaceId, context: &[TokenId]) -> Vec<PrefixHash> {
    let mut hasher = PrefixHasher::new(namespace);
    hasher.append(context);
    hasher.hashes
}

/// The hashes of the prefixes of a context that grows.
#[derive(Clone)]
pub struct PrefixHasher {
    hasher: Xxh3,
    len: usize,
    /// The next mark; `None` beyond the last one.
    next: Option<u32>,
    hashes: Vec<PrefixHash>,
}

impl PrefixHasher {
    /// Begins with no tokens.
    pub fn new(namespace: &NamespaceId) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&namespace.0.to_le_bytes());
        PrefixHasher {
            hasher,
            len: 0,
            next: marks().next(),
            hashes: Vec::new(),
        }
    }

    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends tokens to the context.
    pub fn append(&mut self, mut tokens: &[TokenId]) {
        while let Some(mark) = self.next {
            let missing = mark as usize - self.len;
            if missing > tokens.len() {
                break;
            }
            let (to_mark, rest) = tokens.split_at(missing);
            update(&mut self.hasher, to_mark);
            self.len = mark as usize;
            self.hashes.push(PrefixHash(self.hasher.digest()));
            self.next = marks().nth(self.hashes.len());
            tokens = rest;
        }
        update(&mut self.hasher, tokens);
        self.len += tokens.len();
    }

    /// The hash of the longest hashed prefix of at most `len` tokens.
    pub fn longest(&self, len: usize) -> Option<PrefixHash> {
        let reached = marks()
            .take(self.hashes.len())
            .take_while(|mark| *mark as usize <= len)
            .count();
        self.hashes[..reached].last().copied()
    }
}

impl std::fmt::Debug for PrefixHasher {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("PrefixHasher");
        shown.field("len", &self.len).finish_non_exhaustive()
    }
}

/// The hash of all tokens of a context, by which two services check that they mean the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContextHash(pub u64);

/// Hashes a context as it grows, so that a check at its end costs nothing for what came before.
#[derive(Clone, Default)]
pub struct ContextHasher {
    hasher: Xxh3,
    len: usize,
}

impl ContextHasher {
    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends tokens to the context.
    pub fn append(&mut self, tokens: &[TokenId]) {
        update(&mut self.hasher, tokens);
        self.len += tokens.len();
    }

    /// The hash of the context so far.
    pub fn hash(&self) -> ContextHash {
        ContextHash(self.hasher.digest())
    }
}

impl std::fmt::Debug for ContextHasher {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("ContextHasher");
        shown.field("len", &self.len).finish_non_exhaustive()
    }
}

/// Adds the little-endian bytes of tokens to a hash.
fn update(hasher: &mut Xxh3, tokens: &[TokenId]) {
    let mut bytes = [0; 256];
    for piece in tokens.chunks(bytes.len() / size_of::<TokenId>()) {
        let bytes = &mut bytes[..size_of_val(piece)];
        for (place, token) in bytes.chunks_exact_mut(size_of::<TokenId>()).zip(piece) {
            place.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(bytes);
    }
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
    fn a_context_that_grows_has_the_hashes_of_the_whole() {
        let namespace = NamespaceId(3);
        let context: Vec<TokenId> = (0..5_000).collect();
        let whole = prefix_hashes(&namespace, &context);
        let mut all = ContextHasher::default();
        all.append(&context);
        for step in [1, 63, 64, 65, 700, 4_999] {
            let mut grown = PrefixHasher::new(&namespace);
            let mut hash = ContextHasher::default();
            for piece in context.chunks(step) {
                grown.append(piece);
                hash.append(piece);
            }
            assert_eq!((grown.len(), &grown.hashes), (5_000, &whole));
            assert_eq!((hash.len(), hash.hash()), (5_000, all.hash()));
            assert_eq!(grown.longest(63), None);
            assert_eq!(grown.longest(130), Some(whole[1]));
            assert_eq!(grown.longest(5_000), whole.last().copied());
        }
        all.append(&[1]);
        let mut shorter = ContextHasher::default();
        shorter.append(&context[1..]);
        assert_ne!(all.hash(), shorter.hash());
    }
}
