//! Hidden states of the target that wait until a head reads them.
//!
//! They lie in blocks, which sessions with a common prefix share. Only the newest states are held.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::network::{BLOCK_TOKENS, BlockCount, CountedBlock};

/// The layout and the limits that all sessions of an engine share.
#[derive(Clone, Debug)]
pub(crate) struct CapturedStatesShape {
    /// Floats per position.
    width: usize,
    /// Largest number of positions that are held.
    window: usize,
    pub(super) blocks: BlockCount,
}

impl CapturedStatesShape {
    pub(crate) fn new(width: usize, window: usize) -> Self {
        CapturedStatesShape {
            width,
            window,
            blocks: BlockCount::default(),
        }
    }
}

/// Captured states of a range of positions of one text.
#[derive(Clone, Debug)]
pub(super) struct CapturedStates {
    shape: CapturedStatesShape,
    held: Range<usize>,
    /// The first block is that of `held.start`.
    blocks: VecDeque<Arc<CountedBlock>>,
    /// Number of states dropped unread since the last [`CapturedStates::take_dropped`].
    dropped: u64,
}

impl CapturedStates {
    pub(super) fn new(shape: CapturedStatesShape) -> Self {
        CapturedStates {
            shape,
            held: 0..0,
            blocks: VecDeque::new(),
            dropped: 0,
        }
    }

    /// Returns the positions that are held.
    pub(super) fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Drops all positions from `end` on.
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

    /// Appends the states at `position`. After a gap, only the new states are held. `read` is the first position that
    /// the head has not read.
    pub(super) fn push(&mut self, position: usize, states: &[f32], read: usize) {
        if self.held.is_empty() || self.held.end != position {
            self.blocks.clear();
            self.held = position..position;
        }
        let block = position / BLOCK_TOKENS - self.held.start / BLOCK_TOKENS;
        if block == self.blocks.len() {
            let len = BLOCK_TOKENS * self.shape.width;
            let block = CountedBlock::new(len, &self.shape.blocks);
            self.blocks.push_back(Arc::new(block));
        }
        let values = Arc::make_mut(&mut self.blocks[block]).floats_mut();
        values[position % BLOCK_TOKENS * self.shape.width..][..self.shape.width]
            .copy_from_slice(states);
        self.held.end += 1;
        let over = self.held.len().saturating_sub(self.shape.window);
        let unread = self.unread(read);
        self.release(self.held.start + over);
        self.dropped += (unread - self.unread(read)) as u64;
    }

    /// Returns the states at a position that is held.
    pub(super) fn at(&self, position: usize) -> &[f32] {
        let block = position / BLOCK_TOKENS - self.held.start / BLOCK_TOKENS;
        &self.blocks[block].floats()[position % BLOCK_TOKENS * self.shape.width..]
            [..self.shape.width]
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

    /// Returns how many states were dropped unread since the last call.
    pub(super) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn unread(&self, read: usize) -> usize {
        self.held.end.saturating_sub(self.held.start.max(read))
    }
}
