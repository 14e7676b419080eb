//! A drafter's state of one session: its own KV cache, and the captured states that it has not read yet.
//!
//! A drafter catches up with the text only when a draft is requested. A draft model reads the tokens, which the
//! session has anyway. A head reads the target's captured states, of which only the newest are held. So a head that
//! is asked late may have missed the beginning. Its positions then count from where it began, because rotary
//! positions are relative. Less text makes worse drafts, never wrong ones.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::captured_states::{CapturedStates, CapturedStatesShape};
use crate::backend::Backend;
use crate::network::{BLOCK_TOKENS, BlockCount, KvCache, KvShape};

/// Number of positions whose states stay after the head has read them. A text that is cut a little needs its last row
/// again.
const REREAD_TOKENS: usize = BLOCK_TOKENS;

/// The layout and the counters that the drafter states of one engine share.
#[derive(Clone, Debug)]
pub(crate) struct DrafterStateShape {
    kv: KvShape,
    kv_blocks: BlockCount,
    /// The place of keys and values, if a backend has them.
    backend: Option<Arc<dyn Backend>>,
    /// Longest text that the drafter can continue, in tokens.
    context_max: usize,
    /// Shape of the captured states, if the drafter reads any.
    states: Option<CapturedStatesShape>,
}

impl DrafterStateShape {
    /// Creates the shape for a drafter that reads texts of at most `context_max` tokens. Its row i reads the token at
    /// position i. With `states`, its row i reads the captured states at position i and the token at i + 1.
    pub(crate) fn new(
        kv: KvShape,
        backend: Option<Arc<dyn Backend>>,
        context_max: usize,
        states: Option<CapturedStatesShape>,
    ) -> Self {
        DrafterStateShape {
            kv,
            kv_blocks: BlockCount::default(),
            backend,
            context_max,
            states,
        }
    }

    /// Returns the distance from a row's position to the token that it reads.
    fn token_offset(&self) -> usize {
        usize::from(self.states.is_some())
    }

    /// Returns how many blocks all drafter KV caches hold, with `more`.
    pub(crate) fn kv_blocks(&self, more: u64) -> u64 {
        self.kv_blocks.load(Ordering::Relaxed) + more
    }

    /// Returns how many floats all drafter KV caches hold, with `blocks` more blocks.
    pub(crate) fn kv_floats(&self, blocks: u64) -> u64 {
        self.kv_blocks(blocks) * self.kv.block_len() as u64
    }

    /// Returns the number of positions whose states are held. A shared one counts once.
    pub(crate) fn state_tokens(&self) -> u64 {
        let blocks = self.states.as_ref().map(|states| &states.blocks);
        blocks.map_or(0, |blocks| blocks.load(Ordering::Relaxed)) * BLOCK_TOKENS as u64
    }
}

/// A drafter's state of one session.
#[derive(Clone, Debug)]
pub(crate) struct DrafterState {
    shape: DrafterStateShape,
    /// Position of the text that is the drafter's position 0. It has no meaning while `kv` is empty.
    first_position: usize,
    kv: KvCache,
    states: Option<CapturedStates>,
}

impl DrafterState {
    pub(crate) fn new(shape: &DrafterStateShape) -> Self {
        DrafterState {
            first_position: 0,
            kv: KvCache::in_backend(shape.backend.as_ref(), shape.kv, shape.kv_blocks.clone()),
            states: shape.states.clone().map(CapturedStates::new),
            shape: shape.clone(),
        }
    }

    /// Returns the state for a session that has the first `len` tokens of this text. It shares the blocks of this
    /// one.
    pub(crate) fn prefix(&self, len: usize) -> DrafterState {
        let mut prefix = self.clone();
        prefix.take_dropped();
        prefix.truncate(len, len);
        prefix
    }

    /// Follows a cut of the text to its first `keep` tokens, of which the target has computed the first `computed`.
    pub(crate) fn truncate(&mut self, keep: usize, computed: usize) {
        self.keep_rows(keep.saturating_sub(self.shape.token_offset()));
        if let Some(states) = &mut self.states {
            states.truncate(computed);
        }
    }

    /// Returns the end of the positions that the drafter has read or can read.
    pub(crate) fn end(&self) -> usize {
        let states = self.states.as_ref().map_or(0, |states| states.held().end);
        states.max(self.rows_end().unwrap_or(0))
    }

    /// Appends the states that the target captured at `position`.
    pub(crate) fn push_captured(&mut self, position: usize, captured: &[f32]) {
        let read = self.rows_end().unwrap_or(0);
        if let Some(states) = &mut self.states {
            states.push(position, captured, read);
        }
    }

    /// Returns the captured states of a row that [`DrafterState::missing_rows`] returned.
    pub(crate) fn captured(&self, position: usize) -> &[f32] {
        self.states
            .as_ref()
            .map_or(&[][..], |states| states.at(position))
    }

    /// Returns how many states were dropped unread since the last call.
    pub(crate) fn take_dropped(&mut self) -> u64 {
        self.states.as_mut().map_or(0, CapturedStates::take_dropped)
    }

    /// Returns the rows that the drafter must compute before it can continue a text of `text_len` tokens. They end
    /// with the last row of the text, whose output is always needed. The range is empty if that row cannot be
    /// computed, or if the text is too long. If states were dropped, a head starts over after the gap.
    pub(crate) fn missing_rows(&mut self, text_len: usize) -> Range<usize> {
        let end = text_len - self.shape.token_offset();
        let held = self
            .states
            .as_ref()
            .map_or(0..text_len, |states| states.held());
        if text_len > self.shape.context_max || held.end < end || held.start >= end {
            return 0..0;
        }
        let next = match self.rows_end() {
            Some(rows) if rows.min(end - 1) >= held.start => rows.min(end - 1),
            // Only the output of the last row is lost. The head can continue with the next position.
            Some(rows) if rows >= end => return 0..0,
            _ => {
                self.keep_rows(0);
                self.first_position = held.start;
                held.start
            }
        };
        self.keep_rows(next);
        if self.kv.len() == 0 {
            self.first_position = next;
        }
        next..end
    }

    /// Returns the tokens of a text that `rows` read.
    pub(crate) fn row_tokens<'a, T>(&self, text: &'a [T], rows: &Range<usize>) -> &'a [T] {
        let offset = self.shape.token_offset();
        &text[rows.start + offset..rows.end + offset]
    }

    /// Returns how many blocks the computation of `rows` can allocate at most.
    pub(crate) fn growth_blocks(&self, rows: &Range<usize>) -> u64 {
        match rows.is_empty() {
            true => 0,
            false => self.kv.growth_blocks(rows.end - self.first_position),
        }
    }

    /// Makes room for `rows`, which [`DrafterState::missing_rows`] returned. Returns the cache and the first row's
    /// position in it.
    pub(crate) fn grow_rows(&mut self, rows: &Range<usize>) -> (&mut KvCache, usize) {
        self.kv.grow(rows.end - self.first_position);
        (&mut self.kv, rows.start - self.first_position)
    }

    /// Returns the cache. A draft continues after its last row.
    pub(crate) fn kv(&mut self) -> &mut KvCache {
        &mut self.kv
    }

    /// Drops states that the head has read, except the last ones.
    pub(crate) fn release_read_states(&mut self) {
        if let (Some(rows), Some(states)) = (self.rows_end(), &mut self.states) {
            states.release(rows.saturating_sub(REREAD_TOKENS));
        }
    }

    fn rows_end(&self) -> Option<usize> {
        (self.kv.len() > 0).then(|| self.first_position + self.kv.len())
    }

    /// Drops the drafter's own keys and values of the rows from `end` on.
    pub(crate) fn keep_rows(&mut self, end: usize) {
        self.kv.truncate(end.saturating_sub(self.first_position));
    }
}
