//! The live part of an index: documents that grow, and the automaton over them.

pub(crate) mod automaton;
pub(crate) mod document;
pub(crate) mod edges;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use self::automaton::{Automaton, Place, ROOT, STATES_MAX, Spot};
use self::document::Document;
use self::edges::StateId;
use crate::{Cursor, DocumentKey, IndexConfig, IndexError, Origin, Token};

/// Every automaton ever made in this process has its own generation, so a cursor is never mistaken for one
/// of another index or of an index before its rebuild.
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// Removed documents that are put up with whatever the number of those left.
const REMOVED_DOCUMENTS_MAX: usize = 1024;

/// Documents that may grow. What is offered stands in a document that is there now: not in a removed one, not in a
/// tail that was cut off.
pub(crate) struct Live {
    pub(crate) generation: u64,
    pub(crate) automaton: Automaton,
    /// By slot. Slots are not reused within a generation: places in the automaton name them.
    pub(crate) documents: Vec<Document>,
    /// Slots of the documents that are there.
    slots: HashMap<DocumentKey, u32>,
    tokens: u64,
    dead_tokens: u64,
    pattern_tokens_max: u32,
}

impl Live {
    pub(crate) fn new(config: &IndexConfig) -> Self {
        Live {
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
        // The automaton has the state of each prefix, but not the way back to it.
        let mut last = ROOT;
        let mut tip = Spot::default();
        for token in document.live() {
            last = self.automaton.next(last, token).unwrap_or(ROOT);
            tip = self.automaton.step(tip, token, pattern_tokens_max);
        }
        debug_assert_eq!(self.automaton.state(last).len, document.live_len());
        document.last = last;
        document.tip = tip;
        Ok(())
    }

    /// Returns whether it was there.
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

    /// Tokens alive, left contexts included.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn dead_tokens(&self) -> u64 {
        self.dead_tokens
    }

    pub(crate) fn needs_rebuild(&self, dead_share_max: f32) -> bool {
        // Removed documents keep a slot even if they were empty.
        if self.documents.len() > 2 * self.slots.len() + REMOVED_DOCUMENTS_MAX {
            return true;
        }
        self.dead_tokens as f32 > dead_share_max * (self.dead_tokens + self.tokens) as f32
    }

    pub(crate) fn bytes(&self) -> usize {
        // A slot of the standard map is the pair and one control byte; capacity is 7/8 of the slots.
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
            cursor.spot
        } else {
            Spot::default()
        };
        *cursor = self.cursor(self.automaton.step(from, token, self.pattern_tokens_max));
    }

    pub(crate) fn is_current(&self, cursor: &Cursor) -> bool {
        cursor.generation == self.generation
    }

    pub(crate) fn cursor(&self, spot: Spot) -> Cursor {
        Cursor {
            generation: self.generation,
            spot,
        }
    }

    pub(crate) fn document(&self, key: DocumentKey) -> Option<&Document> {
        Some(&self.documents[*self.slots.get(&key)? as usize])
    }

    /// Slots and documents that are there, in the order in which they were opened.
    pub(crate) fn present(&self) -> impl Iterator<Item = (u32, &Document)> {
        (0u32..)
            .zip(&self.documents)
            .filter(|(_, document)| !document.removed)
    }

    /// Transitions of a state: token, target, and how often that may be offered. Not at all: it is left context, or
    /// its newest occurrence, the only one whose place is known, was removed.
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

    pub(crate) fn origin(&self, place: Place) -> Option<Origin> {
        let document = self.documents.get(place.slot as usize)?;
        document.is_live(place.position).then(|| Origin {
            document: document.key,
            position: document.output_offset(place.position),
        })
    }

    /// Whether an occurrence may be shown.
    fn is_live(&self, place: Place) -> bool {
        // Nearly always nothing is dead, and then this spares the look at the document.
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

    /// Refuses what would need numbers beyond 32 bits. A token makes at most two states.
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
                .record(document.last, Place { slot, position }, counted);
            let last = self.automaton.state(document.last);
            document.tip = if self.automaton.state(last.link).len < pattern_tokens_max {
                // The usual case, without a look-up: the longest pattern is a string of the last state.
                Spot {
                    state: document.last,
                    len: last.len.min(pattern_tokens_max),
                }
            } else {
                self.automaton.step(document.tip, token, pattern_tokens_max)
            };
        }
    }
}
