//! Captured states of the target that wait for a head.
//!
//! They lie in blocks that sessions with the same beginning share; only the newest so many are held.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::kv::{BLOCK_TOKENS, Block, BlockCount};

/// What the states of one engine's sessions have in common.
#[derive(Clone, Debug)]
pub(crate) struct StatesShape {
    /// Numbers that are captured per position.
    width: usize,
    /// Most positions that are held.
    window: usize,
    pub(super) blocks: BlockCount,
}

impl StatesShape {
    pub(crate) fn new(width: usize, window: usize) -> Self {
        StatesShape {
            width,
            window,
            blocks: BlockCount::default(),
        }
    }
}

/// States of a range of positions of one text.
#[derive(Clone, Debug)]
pub(super) struct States {
    shape: StatesShape,
    held: Range<usize>,
    /// From the block of `held.start` on.
    blocks: VecDeque<Arc<Block>>,
    /// Dropped unread, since the last [`States::take_dropped`].
    dropped: u64,
}

impl States {
    pub(super) fn new(shape: StatesShape) -> Self {
        States {
            shape,
            held: 0..0,
            blocks: VecDeque::new(),
            dropped: 0,
        }
    }

    /// Positions that are held.
    pub(super) fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Forgets all positions from `end` on.
    pub(super) fn truncate(&mut self, end: usize) {
        self.held.end = self.held.end.min(end);
        if self.held.is_empty() {
            self.held = 0..0;
        }
        let blocks = match self.held.is_empty() {
            true => 0,
            false => self.held.end.div_ceil(BLOCK_TOKENS) - self.held.start / BLOCK_TOKENS,
        };
        self.blocks.truncate(blocks);
    }

    /// Appends the states at `position`; the head has read those before `read`. What does not join on starts anew.
    pub(super) fn push(&mut self, position: usize, states: &[f32], read: usize) {
        if self.held.is_empty() || self.held.end != position {
            self.blocks.clear();
            self.held = position..position;
        }
        let block = position / BLOCK_TOKENS - self.held.start / BLOCK_TOKENS;
        if block == self.blocks.len() {
            let len = BLOCK_TOKENS * self.shape.width;
            let block = Block::new(len, &self.shape.blocks);
            self.blocks.push_back(Arc::new(block));
        }
        let values = &mut Arc::make_mut(&mut self.blocks[block]).values;
        values[position % BLOCK_TOKENS * self.shape.width..][..self.shape.width]
            .copy_from_slice(states);
        self.held.end += 1;
        let over = self.held.len().saturating_sub(self.shape.window);
        let unread = self.unread(read);
        self.release(self.held.start + over);
        self.dropped += (unread - self.unread(read)) as u64;
    }

    /// The states at a held position.
    pub(super) fn at(&self, position: usize) -> &[f32] {
        let block = position / BLOCK_TOKENS - self.held.start / BLOCK_TOKENS;
        &self.blocks[block].values[position % BLOCK_TOKENS * self.shape.width..][..self.shape.width]
    }

    /// Drops states before `start`.
    pub(super) fn release(&mut self, start: usize) {
        let start = start.clamp(self.held.start, self.held.end);
        let gone = start / BLOCK_TOKENS - self.held.start / BLOCK_TOKENS;
        self.blocks.drain(..gone.min(self.blocks.len()));
        self.held.start = start;
        if self.held.is_empty() {
            self.blocks.clear();
        }
    }

    /// How many were dropped unread since the last call.
    pub(super) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn unread(&self, read: usize) -> usize {
        self.held.end.saturating_sub(self.held.start.max(read))
    }
}
