//! Hashes of the prefixes of a context, by which a scheduler that sees no tokens knows what an engine holds.
//!
//! The simplest way is one hash for each block of a fixed length, as engines have it. With blocks of 64 tokens, a
//! conversation of 100,000 tokens then needs 1,500 hashes in each call. Here the marks lie the further apart, the
//! longer the prefix is, so the same conversation needs 192. What lies between two marks counts as missing.
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
    let mut hasher = Xxh3::new();
    hasher.update(&namespace.0.to_le_bytes());
    let mut hashed = 0;
    let mut bytes = Vec::new();
    marks()
        .take_while(|mark| *mark as usize <= context.len())
        .map(|mark| {
            let mark = mark as usize;
            bytes.clear();
            bytes.extend(
                context[hashed..mark]
                    .iter()
                    .flat_map(|token| token.to_le_bytes()),
            );
            hasher.update(&bytes);
            hashed = mark;
            PrefixHash(hasher.digest())
        })
        .collect()
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
}
