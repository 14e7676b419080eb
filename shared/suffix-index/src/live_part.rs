//! The live part of an index: documents that may grow, and the automaton over them.

mod automaton;
mod cursor;
mod document;
mod edges;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use self::automaton::{Automaton, ROOT, STATES_MAX};
use crate::{DocumentKey, IndexConfig, IndexError, Origin, Token};

#[cfg(test)]
pub(crate) use self::automaton::WorkCounts;
pub(crate) use self::automaton::{DocumentPosition, StatePoint};
pub use self::cursor::Cursor;
pub(crate) use self::document::Document;
pub(crate) use self::edges::StateId;

/// The next generation. Every automaton in this process has its own generation, so a cursor of another index, or of
/// an index before its rebuild, is never mistaken for a current one.
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// Number of removed documents that never calls for a rebuild by itself.
const REMOVED_DOCUMENTS_MAX: usize = 1024;

/// Documents that may grow. Removed documents and cut-off tails are never offered.
pub(crate) struct LivePart {
    pub(crate) generation: u64,
    pub(crate) automaton: Automaton,
    /// The documents by slot. A slot is not reused within a generation, because positions in the automaton name it.
    pub(crate) documents: Vec<Document>,
    /// The slots of the documents that are not removed.
    slots: HashMap<DocumentKey, u32>,
    tokens: u64,
    dead_tokens: u64,
    pattern_tokens_max: u32,
}

impl LivePart {
    pub(crate) fn new(config: &IndexConfig) -> Self {
        LivePart {
            automaton: Automaton::new(config.count_cap),
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            documents: Vec::new(),
            slots: HashMap::new(),
            tokens: 0,
            dead_tokens: 0,
            pattern_tokens_max: config.pattern_tokens_max,
        }
    }

    pub(crate) fn open(
        &mut self,
        key: DocumentKey,
        left_context: impl ExactSizeIterator<Item = Token>,
    ) -> Result<(), IndexError> {
        if self.slots.contains_key(&key) {
            return Err(IndexError::DuplicateDocument(key));
        }
        self.check_room(0, left_context.len())?;
        let slot = self.documents.len() as u32;
        self.documents.push(Document::new(key));
        self.slots.insert(key, slot);
        self.extend(slot, left_context, false);
        self.documents[slot as usize].end_left_context();
        Ok(())
    }

    pub(crate) fn append(&mut self, key: DocumentKey, tokens: &[Token]) -> Result<(), IndexError> {
        let slot = self.slot(key)?;
        self.check_room(self.documents[slot as usize].positions(), tokens.len())?;
        self.extend(slot, tokens.iter().copied(), true);
        Ok(())
    }

    pub(crate) fn shorten(&mut self, key: DocumentKey, output_len: u32) -> Result<(), IndexError> {
        let slot = self.slot(key)?;
        let pattern_tokens_max = self.pattern_tokens_max;
        let document = &mut self.documents[slot as usize];
        let len = document.output_len();
        if output_len > len {
            return Err(IndexError::BeyondEnd {
                key,
                wanted: output_len,
                len,
            });
        }
        let cut = u64::from(document.shorten(document.left_len() + output_len));
        if cut == 0 {
            return Ok(());
        }
        self.tokens -= cut;
        self.dead_tokens += cut;
        // The automaton has a state for each prefix, but no way back to it, so the text is walked from the root.
        let mut last = ROOT;
        let mut tip = StatePoint::default();
        for token in document.live() {
            last = self.automaton.next(last, token).unwrap_or(ROOT);
            tip = self.automaton.step(tip, token, pattern_tokens_max);
        }
        debug_assert_eq!(self.automaton.state(last).len, document.live_len());
        document.last = last;
        document.tip = tip;
        Ok(())
    }

    /// Removes a document. Returns whether it was there.
    pub(crate) fn remove(&mut self, key: DocumentKey) -> bool {
        let Some(slot) = self.slots.remove(&key) else {
            return false;
        };
        let document = &mut self.documents[slot as usize];
        let gone = u64::from(document.live_len());
        self.tokens -= gone;
        self.dead_tokens += gone;
        document.remove();
        true
    }

    pub(crate) fn contains(&self, key: DocumentKey) -> bool {
        self.slots.contains_key(&key)
    }

    /// Number of documents.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Live tokens, left contexts included.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn dead_tokens(&self) -> u64 {
        self.dead_tokens
    }

    pub(crate) fn needs_rebuild(&self, dead_share_max: f32) -> bool {
        // Removed documents keep their slot, even if they were empty.
        if self.documents.len() > 2 * self.slots.len() + REMOVED_DOCUMENTS_MAX {
            return true;
        }
        self.dead_tokens as f32 > dead_share_max * (self.dead_tokens + self.tokens) as f32
    }

    pub(crate) fn bytes(&self) -> usize {
        // A slot of the standard map takes the pair and one control byte. The capacity is 7/8 of the slots.
        let slots = self.slots.capacity() * 8 / 7 * (size_of::<(DocumentKey, u32)>() + 1);
        self.automaton.bytes()
            + self.documents.capacity() * size_of::<Document>()
            + self.documents.iter().map(Document::bytes).sum::<usize>()
            + slots
    }

    pub(crate) fn tip(&self, key: DocumentKey) -> Option<Cursor> {
        Some(self.cursor(self.document(key)?.tip))
    }

    pub(crate) fn tip_at(&self, key: DocumentKey, output_len: u32) -> Option<Cursor> {
        let document = self.document(key)?;
        (document.output_len() == output_len).then(|| self.cursor(document.tip))
    }

    pub(crate) fn advance(&self, cursor: &mut Cursor, token: Token) {
        let from = if self.is_current(cursor) {
            cursor.point
        } else {
            StatePoint::default()
        };
        *cursor = self.cursor(self.automaton.step(from, token, self.pattern_tokens_max));
    }

    pub(crate) fn is_current(&self, cursor: &Cursor) -> bool {
        cursor.generation == self.generation
    }

    pub(crate) fn cursor(&self, point: StatePoint) -> Cursor {
        Cursor {
            generation: self.generation,
            point,
        }
    }

    pub(crate) fn document(&self, key: DocumentKey) -> Option<&Document> {
        Some(&self.documents[*self.slots.get(&key)? as usize])
    }

    /// The slots and documents that are not removed, in the order in which they were opened.
    pub(crate) fn present(&self) -> impl Iterator<Item = (u32, &Document)> {
        (0u32..)
            .zip(&self.documents)
            .filter(|(_, document)| !document.removed)
    }

    /// The transitions of a state: token, target, and the count that may be offered. The count is 0 for left context,
    /// and if the newest occurrence was removed. No other occurrence's position is known.
    pub(crate) fn transitions(
        &self,
        state: StateId,
    ) -> impl Iterator<Item = (Token, StateId, u32)> + '_ {
        self.automaton.edges(state).map(|edge| {
            let target = self.automaton.state(edge.target);
            let is_offered = target.count > 0 && self.is_live(target.place);
            let count = if is_offered { target.count.into() } else { 0 };
            (edge.token, edge.target, count)
        })
    }

    pub(crate) fn origin(&self, place: DocumentPosition) -> Option<Origin> {
        let document = self.documents.get(place.slot as usize)?;
        document.is_live(place.position).then(|| Origin {
            document: document.key,
            position: document.output_offset(place.position),
        })
    }

    /// Whether an occurrence is neither removed nor cut off.
    fn is_live(&self, place: DocumentPosition) -> bool {
        // Usually nothing is dead, and this check spares the look at the document.
        self.dead_tokens == 0
            || self
                .documents
                .get(place.slot as usize)
                .is_some_and(|document| document.is_live(place.position))
    }

    fn slot(&self, key: DocumentKey) -> Result<u32, IndexError> {
        self.slots
            .get(&key)
            .copied()
            .ok_or(IndexError::UnknownDocument(key))
    }

    /// Refuses tokens that would need numbers beyond 32 bits. A token makes at most two states.
    pub(crate) fn check_room(&self, positions: usize, tokens: usize) -> Result<(), IndexError> {
        let states = self.automaton.len();
        let fits = states.saturating_add(tokens.saturating_mul(2)) <= STATES_MAX
            && positions.saturating_add(tokens) < u32::MAX as usize
            && self.documents.len() < u32::MAX as usize;
        if fits { Ok(()) } else { Err(IndexError::Full) }
    }

    fn extend(&mut self, slot: u32, tokens: impl ExactSizeIterator<Item = Token>, counted: bool) {
        let document = &mut self.documents[slot as usize];
        let pattern_tokens_max = self.pattern_tokens_max;
        self.tokens += tokens.len() as u64;
        document.reserve(tokens.len());
        for token in tokens {
            let position = document.push(token);
            document.last = self.automaton.extend(document.last, token);
            self.automaton
                .record(document.last, DocumentPosition { slot, position }, counted);
            let last = self.automaton.state(document.last);
            document.tip = if self.automaton.state(last.link).len < pattern_tokens_max {
                // The usual case needs no look-up: the longest pattern is a string of the last state.
                StatePoint {
                    state: document.last,
                    len: last.len.min(pattern_tokens_max),
                }
            } else {
                self.automaton.step(document.tip, token, pattern_tokens_max)
            };
        }
    }
}
