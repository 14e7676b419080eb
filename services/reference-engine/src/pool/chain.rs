//! Names of blocks: a chain of hashes over a namespace, the weights, and all tokens up to a block's end.

use refrain_protocol::{NamespaceId, TenantId, TokenId};
use sha2::{Digest as _, Sha256};

use crate::network::BLOCK_TOKENS;

/// Changes whenever engines compute other bits than before, or lay them out differently.
const LAYOUT: &str = "refrain kv 1";

/// The weights that a block was computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightsIdentity {
    /// The hash of the model's shape and weights.
    pub(crate) fingerprint: u128,
    /// The version that steps report.
    pub(crate) version: u64,
}

/// The name of a block: SHA-256 over the name of the block before it and its own tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockId(pub(crate) [u8; 32]);

/// The first half of a block's name, by which it is looked up. The other half and the tokens are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey(pub(crate) u128);

impl BlockId {
    /// The name before the first block of a text.
    pub(crate) fn root(namespace: NamespaceId, weights: WeightsIdentity) -> Self {
        let mut hash = Sha256::new();
        hash.update(LAYOUT);
        // Sums are the same on all machines by design, but nobody has compared them on others than these.
        hash.update(std::env::consts::ARCH);
        hash.update(namespace.0.to_le_bytes());
        hash.update(weights.fingerprint.to_le_bytes());
        hash.update(weights.version.to_le_bytes());
        BlockId(hash.finalize().into())
    }

    fn child(&self, tokens: &[TokenId]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        BlockId(hash.finalize().into())
    }

    pub(crate) fn key(&self) -> BlockKey {
        let (key, _) = self.0.split_at(size_of::<u128>());
        BlockKey(key.iter().fold(0, |key, byte| key << 8 | u128::from(*byte)))
    }
}

impl std::fmt::Display for BlockKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

/// Whether a block or session is one of a tenant's, or nobody said whose it is. Erasing too much costs time only.
pub(crate) fn is_of_tenant(owner: TenantId, tenant: TenantId) -> bool {
    owner == tenant || owner == TenantId::default()
}

/// The names of the full blocks of a text that grows.
#[derive(Clone, Debug)]
pub(crate) struct TextChain {
    root: BlockId,
    ids: Vec<BlockId>,
}

impl TextChain {
    pub(crate) fn new(root: BlockId) -> Self {
        TextChain {
            root,
            ids: Vec::new(),
        }
    }

    /// Names the full blocks of `text`, which begins with the text that was named before.
    pub(crate) fn extend(&mut self, text: &[TokenId]) {
        let blocks = text.chunks_exact(BLOCK_TOKENS);
        for tokens in blocks.skip(self.ids.len()) {
            let before = self.ids.last().unwrap_or(&self.root);
            self.ids.push(before.child(tokens));
        }
    }

    /// Forgets the blocks that do not end within the first `len` tokens.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len / BLOCK_TOKENS);
    }

    pub(crate) fn ids(&self) -> &[BlockId] {
        &self.ids
    }
}

/// A session's text, as the pool sees it.
#[derive(Clone, Debug)]
pub(crate) struct PooledText {
    pub(crate) chain: TextChain,
    /// Number of first blocks that the pool was given.
    pub(crate) kept: usize,
    /// Whether the text is still being read. Later pieces are then taken from the pool as well.
    pub(crate) is_read: bool,
}

impl PooledText {
    pub(crate) fn new(root: BlockId) -> Self {
        PooledText {
            chain: TextChain::new(root),
            kept: 0,
            is_read: true,
        }
    }

    /// Follows a cut of the text to `len` tokens.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.chain.truncate(len);
        self.kept = self.kept.min(len / BLOCK_TOKENS);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const WEIGHTS: WeightsIdentity = WeightsIdentity {
        fingerprint: 7,
        version: 3,
    };

    fn ids(namespace: u128, weights: WeightsIdentity, text: &[TokenId]) -> Vec<BlockId> {
        let mut chain = TextChain::new(BlockId::root(NamespaceId(namespace), weights));
        chain.extend(text);
        chain.ids().to_vec()
    }

    #[test]
    fn a_name_covers_all_that_a_block_depends_on() {
        let text: Vec<TokenId> = (0..100).collect();
        let first = ids(1, WEIGHTS, &text);
        assert_eq!(first.len(), 3);
        let other = |fingerprint, version| WeightsIdentity {
            fingerprint,
            version,
        };
        let mut changed = text.clone();
        changed[0] = 5;
        let mut all: HashSet<BlockKey> = first.iter().map(BlockId::key).collect();
        for ids in [
            ids(2, WEIGHTS, &text),
            ids(1, other(8, 3), &text),
            ids(1, other(7, 4), &text),
            ids(1, WEIGHTS, &changed),
        ] {
            all.extend(ids.iter().map(BlockId::key));
        }
        assert_eq!(all.len(), 15);
    }

    #[test]
    fn a_text_that_grows_and_is_cut_has_the_names_of_the_whole_one() {
        let text: Vec<TokenId> = (0..200).map(|token| token * 3).collect();
        let whole = ids(1, WEIGHTS, &text);
        let mut chain = TextChain::new(BlockId::root(NamespaceId(1), WEIGHTS));
        for len in [0, 31, 32, 33, 96, 200] {
            chain.extend(&text[..len]);
            assert_eq!(chain.ids(), &whole[..len / 32]);
        }
        chain.truncate(95);
        assert_eq!(chain.ids(), &whole[..2]);
        chain.extend(&text);
        assert_eq!(chain.ids(), whole);
    }

    #[test]
    fn a_key_is_the_first_half_of_the_name() {
        let mut name = [0; 32];
        (name[0], name[15], name[16]) = (0xab, 1, 9);
        let key = BlockId(name).key();
        assert_eq!(key.to_string(), "ab000000000000000000000000000001");
    }
}
