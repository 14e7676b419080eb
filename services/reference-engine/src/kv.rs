//! The KV cache of one sequence: blocks of 32 positions, shared between sequences until one writes.
//!
//! A block holds all layers. Keys lie as panels whose rows are positions, so that scores are the same product
//! as everything else; values lie position by position, which is a panel whose *depth* is the position, so
//! that the weighted sum over positions is that product too, in order of position.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::architecture::Architecture;
use crate::simd::{Elements, PANEL_ROWS, Panels};

/// Positions of a block.
pub(crate) const BLOCK_TOKENS: usize = PANEL_ROWS;

/// Blocks that exist, over all caches of an engine; a shared block counts once.
pub(crate) type BlockCount = Arc<AtomicU64>;

/// Where things lie in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvShape {
    pub(crate) layers: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl KvShape {
    pub(crate) fn of(architecture: &Architecture) -> Self {
        KvShape {
            layers: architecture.layers,
            kv_heads: architecture.kv_heads,
            head_dim: architecture.head_dim,
        }
    }

    /// Panels that the values of one head fill.
    pub(crate) fn value_panels(self) -> usize {
        self.head_dim.div_ceil(PANEL_ROWS)
    }

    fn key_len(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    fn head_len(self) -> usize {
        self.key_len() + self.value_panels() * PANEL_ROWS * BLOCK_TOKENS
    }

    /// Where the keys of a layer's head begin; its values follow them.
    fn head_start(self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * self.head_len()
    }

    /// Numbers of a block.
    pub(crate) fn block_len(self) -> usize {
        self.layers * self.kv_heads * self.head_len()
    }
}

/// What is held of 32 positions, counted while it exists.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) values: Vec<f32>,
    count: BlockCount,
}

impl Block {
    /// `len` zeros.
    pub(crate) fn new(len: usize, count: &BlockCount) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Block {
            values: vec![0.0; len],
            count: count.clone(),
        }
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        self.count.fetch_add(1, Ordering::Relaxed);
        Block {
            values: self.values.clone(),
            count: self.count.clone(),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Keys and values of positions 0..`len` of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    shape: KvShape,
    blocks: Vec<Arc<Block>>,
    len: usize,
    count: BlockCount,
}

impl KvCache {
    pub(crate) fn new(shape: KvShape, count: BlockCount) -> Self {
        KvCache {
            shape,
            blocks: Vec::new(),
            len: 0,
            count,
        }
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Positions that are held.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Forgets all positions from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.blocks.truncate(self.len.div_ceil(BLOCK_TOKENS));
    }

    /// The first `len` positions of this cache as a cache of its own; no values are copied.
    pub(crate) fn prefix(&self, len: usize) -> KvCache {
        let mut prefix = self.clone();
        prefix.truncate(len);
        prefix
    }

    /// Most blocks that growing to `len` positions can allocate: new ones, and a copy of a shared last one.
    pub(crate) fn growth_blocks(&self, len: usize) -> u64 {
        let new = len.div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len());
        let shared = self
            .blocks
            .last()
            .is_some_and(|block| Arc::strong_count(block) > 1);
        let partial = !self.len.is_multiple_of(BLOCK_TOKENS);
        new as u64 + u64::from(shared && partial && len > self.len)
    }

    /// Makes room for positions up to `len`. Their content is arbitrary until it is written.
    pub(crate) fn grow(&mut self, len: usize) {
        while self.blocks.len() < len.div_ceil(BLOCK_TOKENS) {
            self.blocks
                .push(Arc::new(Block::new(self.shape.block_len(), &self.count)));
        }
        self.len = self.len.max(len);
    }

    /// Writes one position of one layer's head. The position lies below `len`.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        head: usize,
        position: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let shape = self.shape;
        let (block, slot) = (position / BLOCK_TOKENS, position % BLOCK_TOKENS);
        let values = &mut Arc::make_mut(&mut self.blocks[block]).values;
        let (keys, rows) = values[shape.head_start(layer, head)..][..shape.head_len()]
            .split_at_mut(shape.key_len());
        for (column, key) in keys.chunks_exact_mut(BLOCK_TOKENS).zip(key) {
            column[slot] = *key;
        }
        for (panel, value) in value.chunks(PANEL_ROWS).enumerate() {
            let at = (panel * BLOCK_TOKENS + slot) * PANEL_ROWS;
            rows[at..][..value.len()].copy_from_slice(value);
        }
    }

    /// Keys of a block: one panel, its rows the positions.
    pub(crate) fn keys(&self, layer: usize, head: usize, block: usize) -> Panels<'_> {
        let shape = self.shape;
        let values = &self.blocks[block].values[shape.head_start(layer, head)..];
        Panels {
            elements: Elements::F32(values),
            stride: 0,
            count: 1,
            depth: shape.head_dim,
        }
    }

    /// Values of the first `depth` positions of a block: panels whose rows are the head's elements.
    pub(crate) fn values(
        &self,
        layer: usize,
        head: usize,
        block: usize,
        depth: usize,
    ) -> Panels<'_> {
        let shape = self.shape;
        let values = &self.blocks[block].values[shape.head_start(layer, head) + shape.key_len()..];
        Panels {
            elements: Elements::F32(values),
            stride: BLOCK_TOKENS * PANEL_ROWS,
            count: shape.value_panels(),
            depth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        layers: 2,
        kv_heads: 1,
        head_dim: 4,
    };

    fn key(cache: &KvCache, layer: usize, position: usize) -> f32 {
        let Elements::F32(held) = cache.keys(layer, 0, position / BLOCK_TOKENS).elements else {
            panic!("keys are f32")
        };
        held[position % BLOCK_TOKENS]
    }

    #[test]
    fn a_shared_prefix_costs_nothing_until_it_is_written() {
        let count = BlockCount::default();
        let mut first = KvCache::new(SHAPE, count.clone());
        first.grow(40);
        for position in 0..40 {
            first.write(1, 0, position, &[position as f32; 4], &[0.0; 4]);
        }
        let mut second = first.prefix(35);
        assert_eq!((second.len(), count.load(Ordering::Relaxed)), (35, 2));
        assert_eq!(
            (
                second.growth_blocks(36),
                second.growth_blocks(65),
                second.growth_blocks(35)
            ),
            (1, 2, 0)
        );
        second.grow(36);
        second.write(1, 0, 35, &[-1.0; 4], &[0.0; 4]);
        assert_eq!(count.load(Ordering::Relaxed), 3);
        assert_eq!(
            (key(&first, 1, 35), key(&second, 1, 35), key(&second, 1, 34)),
            (35.0, -1.0, 34.0)
        );
        drop(first);
        assert_eq!(count.load(Ordering::Relaxed), 2);
        second.truncate(32);
        assert_eq!((second.len(), count.load(Ordering::Relaxed)), (32, 1));
    }
}
