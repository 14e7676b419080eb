//! [`Index`]: documents in, cursors and matches out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::automaton::{Automaton, Place, ROOT, STATES_MAX, Spot};
use crate::document::Document;
use crate::{Cursor, DocumentKey, IndexError, Matches, Token, Work};

/// How an [`Index`] counts and remembers.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexConfig {
    /// Counts saturate here (at least 2). It bounds the work per token on repetitive text; a distribution
    /// is only bent where several continuations of one pattern reach it.
    pub count_cap: u16,
    /// Longest pattern that a cursor keeps track of, tokens (at least 1).
    pub pattern_tokens_max: u32,
    /// [`Index::needs_rebuild`] once more than this share of the tokens is dead.
    pub dead_share_max: f32,
}

impl Default for IndexConfig {
    fn default() -> Self {
        IndexConfig {
            count_cap: 1024,
            pattern_tokens_max: 64,
            dead_share_max: 0.25,
        }
    }
}

/// Every automaton ever made in this process has its own generation, so a cursor is never mistaken for one
/// of another index or of an index before its rebuild.
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// Removed documents that are put up with whatever the number of those left.
const REMOVED_DOCUMENTS_MAX: usize = 1024;

/// All documents of one scope, and the automaton over them.
///
/// A document is a left context (matched, never offered) and an output that grows. Matches never cross from
/// one document into another. Whatever is offered stands in a document that is there now: not in a removed
/// one, not in a tail that was cut off.
pub struct Index {
    pub(crate) config: IndexConfig,
    pub(crate) generation: u64,
    pub(crate) automaton: Automaton,
    /// By slot. Slots are not reused within a generation: places in the automaton name them.
    pub(crate) documents: Vec<Document>,
    /// Slots of the documents that are there.
    slots: HashMap<DocumentKey, u32>,
    live_tokens: u64,
    dead_tokens: u64,
}

impl Index {
    /// An index without documents.
    pub fn new(config: IndexConfig) -> Self {
        let config = IndexConfig {
            pattern_tokens_max: config.pattern_tokens_max.max(1),
            ..config
        };
        Index {
            automaton: Automaton::new(config.count_cap),
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            documents: Vec::new(),
            slots: HashMap::new(),
            live_tokens: 0,
            dead_tokens: 0,
            config,
        }
    }

    /// Begins a document. Patterns may reach into `left_context`, but none of its tokens is ever offered.
    pub fn open(&mut self, key: DocumentKey, left_context: &[Token]) -> Result<(), IndexError> {
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

    /// Appends to the output of a document. The tokens can be drafted from at once. Amortised O(1) a token.
    pub fn append(&mut self, key: DocumentKey, tokens: &[Token]) -> Result<(), IndexError> {
        let slot = self.slot(key)?;
        self.check_room(self.documents[slot as usize].positions(), tokens.len())?;
        self.extend(slot, tokens, true);
        Ok(())
    }

    /// Cuts the output of a document to its first `output_len` tokens, for instance where a stop string ended
    /// it after the tokens were appended. The tail is never offered again; appends go on from the cut.
    /// Costs a walk along the rest of the document. Like [`remove`](Self::remove) it leaves something behind.
    pub fn shorten(&mut self, key: DocumentKey, output_len: u32) -> Result<(), IndexError> {
        let slot = self.slot(key)?;
        let pattern_tokens_max = self.config.pattern_tokens_max;
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
        self.live_tokens -= cut;
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

    /// Removes documents; unknown keys are ignored. Nothing of them is offered from here on.
    ///
    /// An automaton cannot forget. Until the next rebuild the removed occurrences still weigh in the counts
    /// of continuations that also stand elsewhere; a continuation whose newest occurrence was removed
    /// is not offered even if an older one remains; and the memory stays. See [`Rebuild`](crate::Rebuild).
    pub fn remove(&mut self, keys: &[DocumentKey]) {
        for key in keys {
            if let Some(slot) = self.slots.remove(key) {
                let document = &mut self.documents[slot as usize];
                let gone = u64::from(document.live_len());
                self.live_tokens -= gone;
                self.dead_tokens += gone;
                document.remove();
            }
        }
    }

    /// Whether a document of this key is there.
    pub fn contains(&self, key: DocumentKey) -> bool {
        self.slots.contains_key(&key)
    }

    /// Length of a document's output, left context excluded.
    pub fn len_of(&self, key: DocumentKey) -> Option<u32> {
        Some(self.document(key)?.output_len())
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.slots.len()
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        self.live_tokens
    }

    /// Tokens that were removed or cut off since the last rebuild, and still cost memory.
    pub fn dead_tokens(&self) -> u64 {
        self.dead_tokens
    }

    /// Whether enough is dead for a rebuild to be worth its while.
    pub fn needs_rebuild(&self) -> bool {
        // Removed documents keep a slot even if they were empty.
        if self.documents.len() > 2 * self.slots.len() + REMOVED_DOCUMENTS_MAX {
            return true;
        }
        self.dead_tokens as f32
            > self.config.dead_share_max * (self.dead_tokens + self.live_tokens) as f32
    }

    /// Estimate of the heap memory held, bytes.
    pub fn bytes(&self) -> usize {
        // A slot of the standard map is the pair and one control byte; capacity is 7/8 of the slots.
        let slots = self.slots.capacity() * 8 / 7 * (size_of::<(DocumentKey, u32)>() + 1);
        self.automaton.bytes()
            + self.documents.capacity() * size_of::<Document>()
            + self.documents.iter().map(Document::bytes).sum::<usize>()
            + slots
    }

    /// States of the automaton, for gauges.
    pub fn states(&self) -> usize {
        self.automaton.len()
    }

    /// What was done so far.
    pub fn work(&self) -> Work {
        self.automaton.work
    }

    /// A cursor for a context, matched from scratch. Costs O(`pattern_tokens_max`).
    pub fn start(&self, context: &[Token]) -> Cursor {
        let from = context
            .len()
            .saturating_sub(self.config.pattern_tokens_max as usize);
        let mut cursor = self.cursor(Spot::default());
        for &token in &context[from..] {
            self.advance(&mut cursor, token);
        }
        cursor
    }

    /// The cursor of a document that is itself in the index, as the context that is being continued: O(1),
    /// and exact whatever was appended meanwhile. Its own tip is no match that offers anything, since nothing
    /// follows it. Prefer it to a cursor of one's own.
    pub fn tip(&self, key: DocumentKey) -> Option<Cursor> {
        Some(self.cursor(self.document(key)?.tip))
    }

    /// Lets a cursor follow its context by one token. Amortised O(1).
    ///
    /// A cursor holds the longest match at the time; where later appends to the index would have made it
    /// longer it stays a valid, shorter match and catches up as the context moves on. A cursor that is not
    /// [current](Self::is_current) starts over with this token.
    pub fn advance(&self, cursor: &mut Cursor, token: Token) {
        let from = if self.is_current(cursor) {
            cursor.spot
        } else {
            Spot::default()
        };
        *cursor = self.cursor(
            self.automaton
                .step(from, token, self.config.pattern_tokens_max),
        );
    }

    /// Whether the cursor was made by this index since its last rebuild. If not, [`start`](Self::start) over
    /// from the end of the context.
    pub fn is_current(&self, cursor: &Cursor) -> bool {
        cursor.generation == self.generation
    }

    /// The places that the cursor's context leads to, longest pattern first: each set of occurrences once,
    /// with the longest pattern that has it, and only if something was seen to follow. A cursor that is not
    /// [current](Self::is_current) has none.
    pub fn matches(&self, cursor: Cursor) -> Matches<'_> {
        Matches::new(self, cursor)
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

    /// Whether an occurrence may be shown.
    pub(crate) fn is_live(&self, place: Place) -> bool {
        // Nearly always nothing is dead, and then this spares the look at the document.
        self.dead_tokens == 0
            || self
                .documents
                .get(place.slot as usize)
                .is_some_and(|document| document.is_live(place.position))
    }

    fn cursor(&self, spot: Spot) -> Cursor {
        Cursor {
            generation: self.generation,
            spot,
        }
    }

    fn slot(&self, key: DocumentKey) -> Result<u32, IndexError> {
        self.slots
            .get(&key)
            .copied()
            .ok_or(IndexError::UnknownDocument(key))
    }

    /// Refuses what would need numbers beyond 32 bits. A token makes at most two states.
    fn check_room(&self, positions: usize, tokens: usize) -> Result<(), IndexError> {
        let fits = self
            .automaton
            .len()
            .saturating_add(tokens.saturating_mul(2))
            <= STATES_MAX
            && positions.saturating_add(tokens) < u32::MAX as usize
            && self.documents.len() < u32::MAX as usize;
        if fits { Ok(()) } else { Err(IndexError::Full) }
    }

    fn extend(&mut self, slot: u32, tokens: &[Token], counted: bool) {
        let document = &mut self.documents[slot as usize];
        let pattern_tokens_max = self.config.pattern_tokens_max;
        document.reserve(tokens.len());
        for &token in tokens {
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
        self.live_tokens += tokens.len() as u64;
    }
}
