//! The blocks in memory, in order of last use.

use std::num::NonZeroUsize;

use lru::LruCache;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::{TenantId, TokenId};

use super::block::PooledBlock;
use super::chain::{BlockId, BlockKey, is_of_tenant};
use crate::network::BlockFloats;

/// The place that a block in memory came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockSource {
    /// A session of this engine.
    Memory,
    /// The file.
    File,
    /// Another engine.
    Peer,
}

impl BlockSource {
    pub(crate) const ALL: [BlockSource; 3] =
        [BlockSource::Memory, BlockSource::File, BlockSource::Peer];

    /// The value of the label `source`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            BlockSource::Memory => "memory",
            BlockSource::File => "file",
            BlockSource::Peer => "peer",
        }
    }
}

/// Maximum number of prefixes that are named. Each report on the KV cache tells them.
const PREFIXES_MAX: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// Blocks in memory, of bounded number.
pub(super) struct MemoryTier {
    blocks: LruCache<BlockKey, (PooledBlock, BlockSource)>,
    blocks_max: usize,
    /// The last block of each named prefix.
    prefixes: LruCache<PrefixHash, BlockKey>,
    /// How often a tenant was forgotten.
    forgettings: u64,
}

impl MemoryTier {
    pub(super) fn new(blocks_max: usize) -> Self {
        MemoryTier {
            blocks: LruCache::unbounded(),
            blocks_max,
            prefixes: LruCache::new(PREFIXES_MAX),
            forgettings: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Adds a block. Returns whether it pushed another one out.
    pub(super) fn insert(&mut self, block: PooledBlock, source: BlockSource) -> bool {
        self.blocks.put(block.id.key(), (block, source));
        self.blocks.len() > self.blocks_max && self.blocks.pop_lru().is_some()
    }

    /// Makes a block the most recently used one. Returns whether it is here.
    pub(super) fn touch(&mut self, id: &BlockId) -> bool {
        let held = self.blocks.get(&id.key());
        held.is_some_and(|(block, _)| block.id == *id)
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.prefixes.clear();
    }

    /// Forgets the blocks of a tenant, and returns their number.
    pub(super) fn forget(&mut self, tenant: TenantId) -> usize {
        self.forgettings += 1;
        let blocks = self.blocks.iter();
        let of_tenant = blocks.filter(|(_, (block, _))| is_of_tenant(block.tenant, tenant));
        let keys: Vec<BlockKey> = of_tenant.map(|(key, _)| *key).collect();
        for key in &keys {
            self.blocks.pop(key);
        }
        let prefixes = self.prefixes.iter();
        let named = prefixes.filter(|(_, last)| !self.blocks.contains(*last));
        let named: Vec<PrefixHash> = named.map(|(hash, _)| *hash).collect();
        for hash in &named {
            self.prefixes.pop(hash);
        }
        keys.len()
    }

    /// How often a tenant was forgotten so far.
    pub(super) fn forgettings(&self) -> u64 {
        self.forgettings
    }

    pub(super) fn holds(&self, id: &BlockId) -> bool {
        let held = self.blocks.peek(&id.key());
        held.is_some_and(|(block, _)| block.id == *id)
    }

    /// Returns the floats of a block that has this name and these tokens.
    pub(super) fn peek(
        &self,
        id: &BlockId,
        tokens: &[TokenId],
    ) -> Option<(BlockFloats, BlockSource)> {
        let (block, source) = self.blocks.peek(&id.key())?;
        let is_same = block.id == *id && block.tokens == tokens;
        is_same.then(|| (block.floats.clone(), *source))
    }

    pub(super) fn name_prefix(&mut self, hash: PrefixHash, last: BlockKey) {
        self.prefixes.put(hash, last);
    }

    /// Returns the prefixes whose last block is here.
    pub(super) fn prefixes(&self) -> Vec<PrefixHash> {
        let named = self.prefixes.iter();
        let held = named.filter(|(_, last)| self.blocks.contains(*last));
        held.map(|(hash, _)| *hash).collect()
    }

    pub(super) fn get(&self, key: BlockKey) -> Option<PooledBlock> {
        self.blocks.peek(&key).map(|(block, _)| block.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::network::BLOCK_TOKENS;

    fn block(number: u8) -> PooledBlock {
        PooledBlock {
            id: BlockId([number; 32]),
            tenant: TenantId((number % 2 + 1).into()),
            tokens: [number.into(); BLOCK_TOKENS],
            floats: Arc::new(vec![f32::from(number)]),
        }
    }

    #[test]
    fn the_block_that_was_used_longest_ago_makes_room() {
        let mut memory = MemoryTier::new(2);
        assert!(!memory.insert(block(1), BlockSource::Memory));
        assert!(!memory.insert(block(2), BlockSource::File));
        assert!(memory.touch(&block(1).id));
        assert!(memory.insert(block(3), BlockSource::Peer));
        assert!(memory.holds(&block(1).id) && !memory.holds(&block(2).id));
        assert_eq!(memory.len(), 2);
    }

    #[test]
    fn a_forgotten_tenant_has_no_block_and_no_prefix_and_others_keep_theirs() {
        let mut memory = MemoryTier::new(8);
        for number in 1..=4 {
            memory.insert(block(number), BlockSource::Memory);
            memory.name_prefix(PrefixHash(number.into()), block(number).id.key());
        }
        // Nobody said whose block this is.
        let unknown = PooledBlock {
            tenant: TenantId(0),
            ..block(5)
        };
        memory.insert(unknown, BlockSource::Peer);
        assert_eq!((memory.forget(TenantId(1)), memory.forgettings()), (3, 1));
        let held = (1..=5).filter(|number| memory.holds(&block(*number).id));
        assert_eq!(held.collect::<Vec<_>>(), [1, 3]);
        let mut prefixes = memory.prefixes();
        prefixes.sort();
        assert_eq!(prefixes, [PrefixHash(1), PrefixHash(3)]);
        assert_eq!(memory.forget(TenantId(1)), 0);
    }

    #[test]
    fn a_block_with_the_same_key_but_another_name_or_other_tokens_is_not_taken() {
        let mut memory = MemoryTier::new(2);
        memory.insert(block(1), BlockSource::Memory);
        let (id, tokens) = (block(1).id, [1; BLOCK_TOKENS]);
        assert!(memory.peek(&id, &tokens).is_some());
        assert!(memory.peek(&id, &[2; BLOCK_TOKENS]).is_none());
        let mut other = id;
        other.0[31] = 0;
        assert_eq!(other.key(), id.key());
        assert!(memory.peek(&other, &tokens).is_none());
        assert!(!memory.holds(&other) && !memory.touch(&other));
    }
}
