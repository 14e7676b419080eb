//! The text of a live document, and its dead ranges.

use std::ops::Range;

use super::automaton::StatePoint;
use super::edges::StateId;
use crate::{DocumentKey, Token};

/// A text that only grows. Tokens that are cut off stay in place as a dead range, and later tokens come after them.
/// So a position in the automaton always means the same token.
pub(crate) struct Document {
    pub(crate) key: DocumentKey,
    /// Left context and output, dead ranges included.
    text: Vec<Token>,
    /// Length of the left context, which is the beginning of the text.
    left: u32,
    /// Dead ranges of positions, ascending, disjoint and not empty. Usually there are none.
    dead: Vec<Range<u32>>,
    /// How often the document was shortened.
    pub(crate) cuts: u32,
    /// The state of the whole live text.
    pub(crate) last: StateId,
    /// The longest suffix of the live text, up to the index's longest pattern.
    pub(crate) tip: StatePoint,
    /// A removed document keeps its slot, so that positions that name it are known to be dead.
    pub(crate) removed: bool,
}

impl Document {
    pub(crate) fn new(key: DocumentKey) -> Self {
        Document {
            key,
            text: Vec::new(),
            left: 0,
            dead: Vec::new(),
            cuts: 0,
            last: super::automaton::ROOT,
            tip: StatePoint::default(),
            removed: false,
        }
    }

    /// Appends a token. Returns its position.
    pub(crate) fn push(&mut self, token: Token) -> u32 {
        let position = self.text.len() as u32;
        self.text.push(token);
        position
    }

    /// Ends the left context. All tokens so far are matched but never offered.
    pub(crate) fn end_left_context(&mut self) {
        self.left = self.text.len() as u32;
    }

    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.text.reserve(tokens);
    }

    pub(crate) fn positions(&self) -> usize {
        self.text.len()
    }

    /// Number of live tokens, left context included.
    pub(crate) fn live_len(&self) -> u32 {
        self.text.len() as u32
            - self
                .dead
                .iter()
                .map(|range| range.end - range.start)
                .sum::<u32>()
    }

    pub(crate) fn left_len(&self) -> u32 {
        self.left
    }

    pub(crate) fn output_len(&self) -> u32 {
        self.live_len() - self.left
    }

    /// The live tokens in order, left context first.
    pub(crate) fn live(&self) -> impl Iterator<Item = Token> + '_ {
        self.live_from(0)
    }

    /// The live tokens without the first `skipped` ones. Skipped tokens cost nothing.
    pub(crate) fn live_from(&self, skipped: u32) -> impl Iterator<Item = Token> + '_ {
        let mut position = self.live_at_or_after(self.position_of(skipped));
        std::iter::from_fn(move || {
            let at = position?;
            position = self.live_at_or_after(at + 1);
            Some(self.text[at as usize])
        })
    }

    /// Whether the token at `position` is neither removed nor cut off.
    pub(crate) fn is_live(&self, position: u32) -> bool {
        !self.removed && self.live_at_or_after(position) == Some(position)
    }

    /// The position and token that follow `position` in the live text.
    pub(crate) fn after(&self, position: u32) -> Option<(u32, Token)> {
        let next = self.live_at_or_after(position + 1)?;
        Some((next, self.text[next as usize]))
    }

    /// Number of live output tokens before `position`.
    pub(crate) fn output_offset(&self, position: u32) -> u32 {
        let gone: u32 = self
            .dead
            .iter()
            .take_while(|range| range.start < position)
            .map(|range| range.end.min(position) - range.start)
            .sum();
        (position - gone).saturating_sub(self.left)
    }

    /// Cuts the live text to `live_len` tokens. Returns how many tokens were cut.
    pub(crate) fn shorten(&mut self, live_len: u32) -> u32 {
        let cut = self.live_len() - live_len;
        if cut == 0 {
            return 0;
        }
        self.cuts += 1;
        let mut start = self.position_of(live_len);
        // A range that touches the cut or lies behind its start becomes part of the new range.
        while let Some(range) = self.dead.pop_if(|range| range.end >= start) {
            start = start.min(range.start);
        }
        self.dead.push(start..self.text.len() as u32);
        cut
    }

    /// Marks the document as removed and drops its text.
    pub(crate) fn remove(&mut self) {
        self.removed = true;
        self.text = Vec::new();
        self.dead = Vec::new();
        self.left = 0;
    }

    pub(crate) fn bytes(&self) -> usize {
        self.text.capacity() * size_of::<Token>() + self.dead.capacity() * size_of::<Range<u32>>()
    }

    /// The position of live token number `live`, or the end of the text.
    fn position_of(&self, live: u32) -> u32 {
        let mut position = live;
        for range in &self.dead {
            if range.start <= position {
                position += range.end - range.start;
            }
        }
        position
    }

    fn live_at_or_after(&self, position: u32) -> Option<u32> {
        let position = self
            .dead
            .iter()
            .find(|range| range.contains(&position))
            .map_or(position, |range| range.end);
        // Ranges never touch, so the end of one is a live token or the end of the text.
        ((position as usize) < self.text.len()).then_some(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(left: &[Token], output: &[Token]) -> Document {
        let mut document = Document::new(DocumentKey(1));
        left.iter().for_each(|&token| {
            document.push(token);
        });
        document.end_left_context();
        output.iter().for_each(|&token| {
            document.push(token);
        });
        document
    }

    #[test]
    fn cuts_merge_and_positions_stay() {
        let mut document = document(&[9], &[1, 2, 3, 4]);
        assert_eq!(document.shorten(3), 2);
        assert_eq!(document.push(5), 5);
        assert_eq!(document.live().collect::<Vec<_>>(), [9, 1, 2, 5]);
        assert_eq!(document.after(2), Some((5, 5)));
        assert_eq!(document.output_offset(5), 2);
        assert!(document.is_live(2) && !document.is_live(3) && document.is_live(5));
        // A second cut that touches the first one makes one range of both.
        assert_eq!(document.shorten(3), 1);
        assert_eq!(document.push(6), 6);
        assert_eq!(document.live().collect::<Vec<_>>(), [9, 1, 2, 6]);
        // A cut before it absorbs it.
        assert_eq!(document.shorten(2), 2);
        document.push(7);
        assert_eq!(document.live().collect::<Vec<_>>(), [9, 1, 7]);
        assert_eq!(document.dead.len(), 1);
        assert_eq!((document.live_len(), document.output_len()), (3, 2));
    }

    #[test]
    fn a_cut_behind_a_dead_range_keeps_both() {
        let mut document = document(&[], &[1, 2, 3]);
        document.shorten(1);
        document.push(4);
        document.push(5);
        document.shorten(2);
        assert_eq!(document.live().collect::<Vec<_>>(), [1, 4]);
        document.push(6);
        assert_eq!(document.live().collect::<Vec<_>>(), [1, 4, 6]);
        assert_eq!(document.output_offset(5), 2);
        assert_eq!(document.dead, [1..3, 4..5]);
    }
}
