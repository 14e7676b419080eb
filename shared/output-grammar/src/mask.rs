//! Sets of tokens.

use llguidance::toktrie::SimpleVob;

use crate::TokenId;

/// A set of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask(pub(crate) SimpleVob);

impl TokenMask {
    /// Whether the set has the token.
    pub fn contains(&self, token: TokenId) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }

    /// The number of its tokens.
    pub fn count(&self) -> usize {
        self.0.num_set()
    }

    /// Its tokens in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.0.iter()
    }

    /// Its only token, if it has no other.
    pub fn only(&self) -> Option<TokenId> {
        let mut tokens = self.iter();
        tokens.next().filter(|_| tokens.next().is_none())
    }

    /// The set as bits: token `t` is bit `t % 32` of word `t / 32`.
    pub fn words(&self) -> &[u32] {
        self.0.as_slice()
    }
}
