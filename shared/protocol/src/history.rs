//! Lengths of earlier outputs to the same prompt: an estimate of the next one's.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{SignedNamespace, TokenId};

/// The hash of a whole prompt's token ids. It tells prompts of one namespace apart, and is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PromptHash(pub u128);

impl PromptHash {
    /// Hashes a prompt. No prompt has the hash 0.
    pub fn of(prompt: &[TokenId]) -> Self {
        let mut hasher = Xxh3::new();
        let mut bytes = Vec::with_capacity(4 * HASHED_AT_ONCE.min(prompt.len()));
        for tokens in prompt.chunks(HASHED_AT_ONCE) {
            bytes.clear();
            bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            hasher.update(&bytes);
        }
        PromptHash(hasher.digest128().max(1))
    }
}

/// Tokens whose bytes are hashed at once, so that a long prompt is not copied as a whole.
const HASHED_AT_ONCE: usize = 1_024;

/// Asks for the lengths of earlier outputs to a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputLengthsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The prompt.
    pub prompt: PromptHash,
}

/// The lengths of the newest outputs to a prompt that ended by themselves or at their limit, in tokens. All are 0
/// where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputLengths {
    /// Number of outputs that were looked at.
    pub count: u32,
    /// Their median; the greater of the two in the middle.
    pub median: u32,
    /// The longest.
    pub longest: u32,
}

impl OutputLengths {
    /// Summarizes lengths in any order.
    pub fn of(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        OutputLengths {
            count: u32::try_from(lengths.len()).unwrap_or(u32::MAX),
            median: lengths.get(lengths.len() / 2).copied().unwrap_or(0),
            longest: lengths.last().copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORED: u128 = 162_394_043_806_993_709_127_896_945_169_855_524_686;

    #[test]
    fn a_prompt_has_one_hash_however_long_it_is() {
        let long: Vec<TokenId> = (0..3_000).collect();
        assert_eq!(PromptHash::of(&long), PromptHash::of(&long.clone()));
        let mut other = long.clone();
        other[2_999] = 7;
        assert_ne!(PromptHash::of(&long), PromptHash::of(&other));
        assert_ne!(PromptHash::of(&long), PromptHash::of(&long[..2_999]));
        // The hash is stored with documents, so it must not change.
        let stored = PromptHash::of(&[1, 2, 70_000]);
        assert_eq!(stored.0, STORED);
        assert_ne!(PromptHash::of(&[]).0, 0);
    }

    #[test]
    fn lengths_are_summarized_in_any_order() {
        assert_eq!(OutputLengths::of(vec![]), OutputLengths::default());
        let of = |count, median, longest| OutputLengths {
            count,
            median,
            longest,
        };
        assert_eq!(OutputLengths::of(vec![9]), of(1, 9, 9));
        assert_eq!(OutputLengths::of(vec![9, 1, 5, 7]), of(4, 7, 9));
    }
}
