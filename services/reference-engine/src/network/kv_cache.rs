//! The KV cache of one sequence: blocks of 32 positions, which sequences share until one of them writes.
//!
//! A block holds all layers. Keys lie in panels whose rows are positions, so that scores are a panel product.
//! Values lie position by position, as panels whose *depth* is the position. So the weighted sum over positions
//! is a panel product too, in order of position.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, BackendSequence};
use crate::kernels::{PANEL_ROWS, PanelElements, Panels};
use crate::model::Architecture;

/// Positions per block.
pub(crate) const BLOCK_TOKENS: usize = PANEL_ROWS;

/// The number of blocks that exist in all caches of an engine. A shared block counts once.
pub(crate) type BlockCount = Arc<AtomicU64>;

/// The layout of a block. The default is that of a block without keys and values.
#[derive(Clone, Copy, Debug, Default)]
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

    /// Returns the number of panels that one head's values fill.
    pub(crate) fn value_panels(self) -> usize {
        self.head_dim.div_ceil(PANEL_ROWS)
    }

    fn key_len(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    fn head_len(self) -> usize {
        self.key_len() + self.value_panels() * PANEL_ROWS * BLOCK_TOKENS
    }

    /// Returns the index at which the keys of a layer's head begin. Its values follow them.
    fn head_start(self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * self.head_len()
    }

    /// Returns the number of floats in a block.
    pub(crate) fn block_len(self) -> usize {
        self.layers * self.kv_heads * self.head_len()
    }
}

/// The floats of a block, which others may hold beside the caches.
pub(crate) type BlockFloats = Arc<Vec<f32>>;

/// The floats of 32 positions. A block is counted for as long as it exists in a cache.
#[derive(Debug)]
pub(crate) struct CountedBlock {
    floats: BlockFloats,
    count: BlockCount,
}

impl CountedBlock {
    /// Creates a block of `len` zeros.
    pub(crate) fn new(len: usize, count: &BlockCount) -> Self {
        CountedBlock::of(Arc::new(vec![0.0; len]), count)
    }

    fn of(floats: BlockFloats, count: &BlockCount) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        CountedBlock {
            floats,
            count: count.clone(),
        }
    }

    pub(crate) fn floats(&self) -> &[f32] {
        &self.floats
    }

    /// Returns the floats for writing. They are copied first if others hold them.
    pub(crate) fn floats_mut(&mut self) -> &mut [f32] {
        Arc::make_mut(&mut self.floats).as_mut_slice()
    }
}

impl Clone for CountedBlock {
    fn clone(&self) -> Self {
        CountedBlock::of(self.floats.clone(), &self.count)
    }
}

impl Drop for CountedBlock {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Keys and values of a sequence's first `len` positions.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    shape: KvShape,
    blocks: Vec<Arc<CountedBlock>>,
    len: usize,
    count: BlockCount,
    /// The place of the keys and values, if a backend has them. The blocks are empty then, and only counted.
    sequence: Option<BackendSequence>,
}

impl KvCache {
    pub(crate) fn new(shape: KvShape, count: BlockCount) -> Self {
        KvCache {
            shape,
            blocks: Vec::new(),
            len: 0,
            count,
            sequence: None,
        }
    }

    /// Creates a cache whose keys and values a backend has, if there is one, or else its blocks.
    pub(crate) fn in_backend(
        backend: Option<&Arc<dyn Backend>>,
        shape: KvShape,
        count: BlockCount,
    ) -> Self {
        match backend {
            Some(backend) => KvCache {
                sequence: Some(BackendSequence::new(backend.clone())),
                ..KvCache::new(KvShape::default(), count)
            },
            None => KvCache::new(shape, count),
        }
    }

    /// Whether a backend has no sequence left for it, so that it holds nothing.
    pub(crate) fn is_void(&self) -> bool {
        let sequence = self.sequence.as_ref();
        sequence.is_some_and(|sequence| sequence.id().is_none())
    }

    /// The place of the keys and values, if a backend has them.
    pub(crate) fn sequence(&self) -> Option<&BackendSequence> {
        self.sequence.as_ref()
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the number of positions.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns an address for each block, which is the same for a block that several caches share.
    pub(crate) fn block_addresses(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|block| Arc::as_ptr(block) as usize)
    }

    /// Drops all positions from `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.blocks.truncate(self.len.div_ceil(BLOCK_TOKENS));
        if let Some(sequence) = &self.sequence {
            sequence.truncate(self.len);
        }
    }

    /// Returns a cache of the first `len` positions. It shares the blocks of this one.
    pub(crate) fn prefix(&self, len: usize) -> KvCache {
        let mut prefix = KvCache {
            shape: self.shape,
            blocks: self.blocks.clone(),
            len: self.len,
            count: self.count.clone(),
            sequence: self.sequence.as_ref().map(|sequence| sequence.prefix(len)),
        };
        prefix.truncate(len);
        prefix
    }

    /// Returns the number of blocks whose positions are all there.
    pub(crate) fn full_blocks(&self) -> usize {
        self.len / BLOCK_TOKENS
    }

    /// Returns the floats of a block that is there. They are shared, not copied.
    pub(crate) fn block_floats(&self, block: usize) -> BlockFloats {
        self.blocks[block].floats.clone()
    }

    /// Replaces all positions from block `from` on by full blocks. The positions before them must be there.
    pub(crate) fn continue_with(&mut self, from: usize, blocks: Vec<BlockFloats>) {
        self.truncate(from * BLOCK_TOKENS);
        let blocks = blocks
            .into_iter()
            .map(|floats| Arc::new(CountedBlock::of(floats, &self.count)));
        self.blocks.extend(blocks);
        self.len = self.blocks.len() * BLOCK_TOKENS;
    }

    /// Returns how many blocks growth to `len` positions can allocate at most. A shared last block has to be copied.
    pub(crate) fn growth_blocks(&self, len: usize) -> u64 {
        let new = len.div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len());
        let shared = self
            .blocks
            .last()
            .is_some_and(|block| Arc::strong_count(block) > 1);
        let partial = !self.len.is_multiple_of(BLOCK_TOKENS);
        new as u64 + u64::from(shared && partial && len > self.len)
    }

    /// Makes room for `len` positions. The content of new positions is arbitrary until it is written.
    pub(crate) fn grow(&mut self, len: usize) {
        if self.sequence.is_some() && len > self.len && !self.len.is_multiple_of(BLOCK_TOKENS) {
            // Nothing is written here, which would make a shared block this cache's own and count it.
            self.blocks.last_mut().map(Arc::make_mut);
        }
        while self.blocks.len() < len.div_ceil(BLOCK_TOKENS) {
            self.blocks.push(Arc::new(CountedBlock::new(
                self.shape.block_len(),
                &self.count,
            )));
        }
        self.len = self.len.max(len);
    }

    /// Writes one position of one layer's head. The position must be below `len`.
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
        let values = Arc::make_mut(&mut self.blocks[block]).floats_mut();
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

    /// Returns the keys of a block: one panel, whose rows are positions.
    pub(crate) fn keys(&self, layer: usize, head: usize, block: usize) -> Panels<'_> {
        let shape = self.shape;
        let values = &self.blocks[block].floats()[shape.head_start(layer, head)..];
        Panels {
            elements: PanelElements::F32(values),
            stride: 0,
            count: 1,
            depth: shape.head_dim,
        }
    }

    /// Returns the values of a block's first `depth` positions: panels whose rows are the head's elements.
    pub(crate) fn values(
        &self,
        layer: usize,
        head: usize,
        block: usize,
        depth: usize,
    ) -> Panels<'_> {
        let shape = self.shape;
        let values =
            &self.blocks[block].floats()[shape.head_start(layer, head) + shape.key_len()..];
        Panels {
            elements: PanelElements::F32(values),
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
        let PanelElements::F32(held) = cache.keys(layer, 0, position / BLOCK_TOKENS).elements
        else {
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
