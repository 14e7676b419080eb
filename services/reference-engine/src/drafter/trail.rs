//! What a drafter keeps of one session: keys and values of its own, and what waits for it.
//!
//! A drafter follows the text only when it is asked for a draft. A draft model reads the tokens, which the session has
//! anyway. A head reads the target's captured states, which wait for it, but only the newest of them, so a head that
//! is asked late begins late. Its positions count from where it began: rotary positions are relative, and less text makes
//! worse drafts, never wrong ones.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::states::{States, StatesShape};
use crate::kv::{BLOCK_TOKENS, BlockCount, KvCache, KvShape};

/// States of so many positions stay after the head has read them: a text that is cut a little needs the last
/// row again.
const REREAD_TOKENS: usize = BLOCK_TOKENS;

/// What trails of one engine have in common.
#[derive(Clone, Debug)]
pub(crate) struct TrailShape {
    kv: KvShape,
    kv_blocks: BlockCount,
    /// Longest text that the drafter goes on from.
    context_max: usize,
    /// Of states that it reads, if it does.
    states: Option<StatesShape>,
}

impl TrailShape {
    /// Of a drafter that reads tokens and nothing else, row i the one at position i, in texts of at most `context_max`.
    pub(crate) fn reading_tokens(kv: KvShape, context_max: usize) -> Self {
        TrailShape {
            kv,
            kv_blocks: BlockCount::default(),
            context_max,
            states: None,
        }
    }

    /// Of one whose row i reads the states at position i and the token at i + 1.
    pub(crate) fn reading_states(kv: KvShape, states: StatesShape) -> Self {
        TrailShape {
            kv,
            kv_blocks: BlockCount::default(),
            context_max: usize::MAX,
            states: Some(states),
        }
    }

    /// How far ahead of a row's position the token stands that it reads.
    fn ahead(&self) -> usize {
        usize::from(self.states.is_some())
    }

    /// Numbers that all trails' keys and values take, with `blocks` more blocks.
    pub(crate) fn kv_numbers(&self, blocks: u64) -> u64 {
        (self.kv_blocks.load(Ordering::Relaxed) + blocks) * self.kv.block_len() as u64
    }

    /// Tokens whose states are held; a shared one counts once.
    pub(crate) fn state_tokens(&self) -> u64 {
        let blocks = self.states.as_ref().map(|states| &states.blocks);
        blocks.map_or(0, |blocks| blocks.load(Ordering::Relaxed)) * BLOCK_TOKENS as u64
    }
}

/// A drafter's part of a session.
#[derive(Clone, Debug)]
pub(crate) struct Trail {
    shape: TrailShape,
    /// Position of the text that is the drafter's position 0; of no meaning while `kv` is empty.
    base: usize,
    kv: KvCache,
    states: Option<States>,
}

impl Trail {
    pub(crate) fn new(shape: &TrailShape) -> Self {
        Trail {
            base: 0,
            kv: KvCache::new(shape.kv, shape.kv_blocks.clone()),
            states: shape.states.clone().map(States::new),
            shape: shape.clone(),
        }
    }

    /// The trail of a session that has the first `len` tokens of this one's text; no values are copied.
    pub(crate) fn prefix(&self, len: usize) -> Trail {
        let mut prefix = self.clone();
        prefix.take_dropped();
        prefix.truncate(len, len);
        prefix
    }

    /// Follows a cut of the text to its first `keep` tokens, and of what the target has computed of it.
    pub(crate) fn truncate(&mut self, keep: usize, computed: usize) {
        self.keep_rows(keep.saturating_sub(self.shape.ahead()));
        if let Some(states) = &mut self.states {
            states.truncate(computed);
        }
    }

    /// One past the last position that it knows something of.
    pub(crate) fn end(&self) -> usize {
        let states = self.states.as_ref().map_or(0, |states| states.held().end);
        states.max(self.rows_end().unwrap_or(0))
    }

    /// Appends what the target captured at `position`.
    pub(crate) fn push(&mut self, position: usize, captured: &[f32]) {
        let read = self.rows_end().unwrap_or(0);
        if let Some(states) = &mut self.states {
            states.push(position, captured, read);
        }
    }

    /// What the row at a position, one that [`Trail::owed`] gave, reads of the target.
    pub(crate) fn captured(&self, position: usize) -> &[f32] {
        self.states
            .as_ref()
            .map_or(&[][..], |states| states.at(position))
    }

    /// States dropped unread since the last call.
    pub(crate) fn take_dropped(&mut self) -> u64 {
        self.states.as_mut().map_or(0, States::take_dropped)
    }

    /// Rows that the drafter has to compute before it can go on from a text of `text_len` tokens: up to the last one
    /// that it can, which is always among them, since its output is needed. Empty if that row cannot be computed, or the
    /// text is too long. Where states were dropped, a head begins anew behind the gap.
    pub(crate) fn owed(&mut self, text_len: usize) -> Range<usize> {
        let end = text_len - self.shape.ahead();
        let held = self
            .states
            .as_ref()
            .map_or(0..text_len, |states| states.held());
        if text_len > self.shape.context_max || held.end < end || held.start >= end {
            return 0..0;
        }
        let next = match self.rows_end() {
            Some(rows) if rows.min(end - 1) >= held.start => rows.min(end - 1),
            // Only the output of the last row is lost, and with the next position the head can go on.
            Some(rows) if rows >= end => return 0..0,
            _ => {
                self.keep_rows(0);
                self.base = held.start;
                held.start
            }
        };
        self.keep_rows(next);
        if self.kv.len() == 0 {
            self.base = next;
        }
        next..end
    }

    /// The tokens of a text that `rows` read.
    pub(crate) fn tokens<'a, T>(&self, text: &'a [T], rows: &Range<usize>) -> &'a [T] {
        let ahead = self.shape.ahead();
        &text[rows.start + ahead..rows.end + ahead]
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
        if let (Some(rows), Some(states)) = (self.rows_end(), &mut self.states) {
            states.release(rows.saturating_sub(REREAD_TOKENS));
        }
    }

    /// Forgets the drafter's own keys and values.
    pub(crate) fn forget_rows(&mut self) {
        self.keep_rows(0);
    }

    fn rows_end(&self) -> Option<usize> {
        (self.kv.len() > 0).then(|| self.base + self.kv.len())
    }

    fn keep_rows(&mut self, end: usize) {
        self.kv.truncate(end.saturating_sub(self.base));
    }
}
