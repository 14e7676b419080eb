//! What a head keeps of one session: captured states that wait for it, and keys and values of its own.
//!
//! The head follows the text only when it is asked for a draft. Until then the target's captured states wait,
//! in blocks that sessions with the same beginning share; only the newest `window` of them, so a head that is
//! asked late begins late. Its positions count from where it began: rotary positions are relative, and less
//! text makes worse drafts, never wrong ones.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::kv::{BLOCK_TOKENS, Block, BlockCount, KvCache, KvShape};

/// States of so many positions stay after the head has read them: a text that is cut a little needs the last
/// row again.
const REREAD_TOKENS: usize = BLOCK_TOKENS;

/// What trails of one engine have in common.
#[derive(Clone, Debug)]
pub(crate) struct TrailShape {
    pub(crate) kv: KvShape,
    /// Numbers that are captured per position.
    pub(crate) width: usize,
    /// Most positions whose states wait.
    pub(crate) window: usize,
    pub(crate) kv_blocks: BlockCount,
    pub(crate) state_blocks: BlockCount,
}

/// A head's part of a session.
#[derive(Clone, Debug)]
pub(crate) struct Trail {
    shape: TrailShape,
    /// Position of the text that is the head's position 0; of no meaning while `kv` is empty.
    base: usize,
    /// Row i of the head has read the states at position i and the token at i + 1.
    kv: KvCache,
    /// Positions whose states are held.
    states: Range<usize>,
    /// From the block of `states.start` on.
    blocks: VecDeque<Arc<Block>>,
    /// States that were dropped unread, since the last [`Trail::take_dropped`].
    dropped: u64,
}

impl Trail {
    pub(crate) fn new(shape: &TrailShape) -> Self {
        Trail {
            base: 0,
            kv: KvCache::new(shape.kv, shape.kv_blocks.clone()),
            states: 0..0,
            blocks: VecDeque::new(),
            dropped: 0,
            shape: shape.clone(),
        }
    }

    /// The trail of a session that has the first `len` tokens of this one's text; no values are copied.
    pub(crate) fn prefix(&self, len: usize) -> Trail {
        let mut prefix = self.clone();
        prefix.dropped = 0;
        prefix.truncate(len, len);
        prefix
    }

    /// Follows a cut of the text to its first `keep` tokens, and of what the target has computed of it.
    pub(crate) fn truncate(&mut self, keep: usize, computed: usize) {
        self.keep_rows(keep.saturating_sub(1));
        self.states.end = self.states.end.min(computed);
        if self.states.is_empty() {
            self.states = 0..0;
        }
        let blocks = self.block_range();
        self.blocks.truncate(blocks.len());
    }

    /// One past the last position that it knows something of.
    pub(crate) fn end(&self) -> usize {
        self.states.end.max(self.rows_end().unwrap_or(0))
    }

    /// States that the head has not read yet.
    pub(crate) fn waiting(&self) -> usize {
        let read = self.rows_end().unwrap_or(0);
        self.states.end.saturating_sub(self.states.start.max(read))
    }

    /// Appends the states at `position`. What does not join on starts anew.
    pub(crate) fn push(&mut self, position: usize, states: &[f32]) {
        if self.states.is_empty() || self.states.end != position {
            self.blocks.clear();
            self.states = position..position;
        }
        let block = position / BLOCK_TOKENS - self.states.start / BLOCK_TOKENS;
        if block == self.blocks.len() {
            let len = BLOCK_TOKENS * self.shape.width;
            let block = Block::new(len, &self.shape.state_blocks);
            self.blocks.push_back(Arc::new(block));
        }
        let values = &mut Arc::make_mut(&mut self.blocks[block]).values;
        values[position % BLOCK_TOKENS * self.shape.width..][..self.shape.width]
            .copy_from_slice(states);
        self.states.end += 1;
        let over = self.states.len().saturating_sub(self.shape.window);
        let unread = self.waiting();
        self.release(self.states.start + over);
        self.dropped += (unread - self.waiting()) as u64;
    }

    /// The states at a held position.
    pub(crate) fn states(&self, position: usize) -> &[f32] {
        let block = position / BLOCK_TOKENS - self.states.start / BLOCK_TOKENS;
        &self.blocks[block].values[position % BLOCK_TOKENS * self.shape.width..][..self.shape.width]
    }

    /// States dropped unread since the last call.
    pub(crate) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// Rows that the head has to compute before it can go on from a text of `text_len` tokens: up to that of
    /// the last token but one, which is always among them, since its output is needed. Empty if the states of
    /// that row are not here. Where states were dropped, the head begins anew behind the gap.
    pub(crate) fn owed(&mut self, text_len: usize) -> Range<usize> {
        let end = text_len - 1;
        if self.states.end < end || self.states.start >= end {
            return 0..0;
        }
        let next = match self.rows_end() {
            Some(rows) if rows.min(end - 1) >= self.states.start => rows.min(end - 1),
            // Only the output of the last row is lost, and with the next position the head can go on.
            Some(rows) if rows >= end => return 0..0,
            _ => {
                self.keep_rows(0);
                self.base = self.states.start;
                self.states.start
            }
        };
        self.keep_rows(next);
        if self.kv.len() == 0 {
            self.base = next;
        }
        next..end
    }

    /// Most blocks that computing `rows` can allocate.
    pub(crate) fn growth_blocks(&self, rows: &Range<usize>) -> u64 {
        match rows.is_empty() {
            true => 0,
            false => self.kv.growth_blocks(rows.end - self.base),
        }
    }

    /// Makes room for `rows`, which [`Trail::owed`] gave, and gives the cache and the first one's place in it.
    pub(crate) fn extend(&mut self, rows: &Range<usize>) -> (&mut KvCache, usize) {
        self.kv.grow(rows.end - self.base);
        (&mut self.kv, rows.start - self.base)
    }

    /// The cache as it is; the row after the last one is the next of a draft.
    pub(crate) fn kv(&mut self) -> &mut KvCache {
        &mut self.kv
    }

    /// Lets go of states that the head has read, but for the last ones.
    pub(crate) fn release_read(&mut self) {
        if let Some(rows) = self.rows_end() {
            self.release(rows.saturating_sub(REREAD_TOKENS));
        }
    }

    /// Forgets the head's own keys and values.
    pub(crate) fn forget_rows(&mut self) {
        self.keep_rows(0);
    }

    fn rows_end(&self) -> Option<usize> {
        (self.kv.len() > 0).then(|| self.base + self.kv.len())
    }

    fn keep_rows(&mut self, end: usize) {
        self.kv.truncate(end.saturating_sub(self.base));
    }

    /// Drops states before `start`.
    fn release(&mut self, start: usize) {
        let start = start.clamp(self.states.start, self.states.end);
        let gone = start / BLOCK_TOKENS - self.states.start / BLOCK_TOKENS;
        self.blocks.drain(..gone.min(self.blocks.len()));
        self.states.start = start;
        if self.states.is_empty() {
            self.blocks.clear();
        }
    }

    fn block_range(&self) -> Range<usize> {
        match self.states.is_empty() {
            true => 0..0,
            false => self.states.start / BLOCK_TOKENS..self.states.end.div_ceil(BLOCK_TOKENS),
        }
    }
}
