//! One commit in the making: changes the catalog and gathers the writes that make the change durable.

mod pieces;
mod sealed;

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use refrain_protocol::document::{DocumentUpdate, LEFT_CONTEXT_TOKENS};
use refrain_protocol::{Namespace, NamespaceId, TokenId};

use super::{Append, By, Outcome, Registration, Removal};
use crate::catalog::Catalog;
use crate::codec::{self, Damage};
use crate::log::{Batch, LogError, RecordLog};
use crate::placement::{Placement, place};
use crate::record::{
    DocumentKey, ErasedRecord, ErasureRecord, GONE, HeadRecord, Kind, NamespaceRecord, STATIC,
    StateRecord, StoreRecord, TombstoneRecord, document_key, erasure_key, finish_code, finish_of,
    namespace_key, piece_key, store_key, tombstone_key,
};
use crate::segments::Marks;
use crate::text::TextError;
use sealed::mark_of;

/// Sequences reserved on disk at a time. A restart skips what was not used of them.
const SEQUENCES_RESERVED: u64 = 1 << 16;

/// What an edit keeps within.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Documents for which the log's index was built anew.
    pub(super) reread: Arc<HashSet<DocumentKey>>,
    pub(super) tombstones_max: usize,
    pub(super) group_tokens_max: u64,
}

/// See the module.
pub(super) struct Edit<'a> {
    pub(super) catalog: &'a mut Catalog,
    pub(super) outcome: Outcome,
    pub(super) log: Arc<dyn RecordLog>,
    store: StoreRecord,
    limits: Limits,
    now_ms: u64,
    pub(super) batch: Batch,
    /// Documents whose state is to be written, once each.
    states: BTreeSet<DocumentKey>,
    /// Marks of sealed documents, as they will be.
    marks: Marks,
    /// What the append at hand adds to the finish code: [`STATIC`] or nothing.
    static_code: u8,
}

impl<'a> Edit<'a> {
    pub(super) fn new(
        catalog: &'a mut Catalog,
        log: Arc<dyn RecordLog>,
        store: StoreRecord,
        limits: Limits,
        now_ms: u64,
    ) -> Self {
        Edit {
            catalog,
            outcome: Outcome::default(),
            log,
            store,
            limits,
            now_ms,
            batch: Batch::default(),
            states: BTreeSet::new(),
            marks: Marks::default(),
            static_code: 0,
        }
    }

    /// The writes, the store's record after them, and documents whose feed entries are now several.
    pub(super) fn finish(
        mut self,
    ) -> Result<(Batch, StoreRecord, Vec<DocumentKey>, Outcome), LogError> {
        let mut split = Vec::new();
        for key in std::mem::take(&mut self.states) {
            let Some(document) = self.catalog.document_mut(key) else {
                continue;
            };
            document.used_ms_stored = document.state.used_ms;
            if document.is_split() {
                split.push(key);
            }
            if let Some(place) = document.place {
                let used_s = mark_of(document.state.used_ms);
                self.mark_sealed(place, used_s)?;
                continue;
            }
            let state_key = document_key(Kind::State, key);
            let value = codec::seal(&state_key, &document.state);
            self.batch.put(state_key, value);
        }
        self.forget_emptied();
        self.write_marks();
        Ok((self.batch, self.store, split, self.outcome))
    }

    /// Takes over writes that recovery prepared.
    pub(super) fn adopt(&mut self, repairs: Batch) {
        for (key, value) in repairs.writes() {
            match value {
                Some(value) => self.batch.put(key.clone(), value.clone()),
                None => self.batch.remove(key.clone()),
            }
        }
    }

    /// Stores the names of a namespace unless they are known.
    pub(super) fn introduce(&mut self, namespace: NamespaceId, names: &Namespace) {
        if self.catalog.introduce(namespace, names) {
            let key = namespace_key(Kind::Namespace, namespace);
            let value = codec::seal(&key, &NamespaceRecord::from(names));
            self.batch.put(key, value);
        }
    }

    /// Remembers an erasure.
    pub(super) fn mark(&mut self, mark: ErasureRecord) {
        let key = erasure_key(mark.id());
        let value = codec::seal(&key, &mark);
        self.batch.put(key, value);
        self.catalog.erasures_mut().mark(mark);
    }

    /// Remembers that a document was erased.
    pub(super) fn remember_erased(&mut self, key: DocumentKey) {
        let at_ms = self.now_ms;
        let erased_key = document_key(Kind::Erased, key);
        let value = codec::seal(&erased_key, &ErasedRecord { at_ms });
        self.batch.put(erased_key, value);
        self.catalog.erasures_mut().erase(key, at_ms);
    }

    /// Forgets what was erased before a time, and what is too much.
    pub(super) fn forget_erased(&mut self, before_ms: u64, documents_max: usize, limit: usize) {
        let (marks, keys) = self
            .catalog
            .erasures_mut()
            .expire(before_ms, documents_max, limit);
        for id in marks {
            self.batch.remove(erasure_key(id));
        }
        for key in keys {
            self.batch.remove(document_key(Kind::Erased, key));
        }
    }

    /// Has the state of a document written with this commit.
    pub(super) fn write_state(&mut self, key: DocumentKey) {
        self.states.insert(key);
    }

    /// Takes an update. Returns the length that the document has then; a document whose stored text turns
    /// out to be damaged is removed, and has none.
    pub(super) fn apply(
        &mut self,
        append: &Append,
        update: &DocumentUpdate,
    ) -> Result<u32, LogError> {
        let key = DocumentKey {
            namespace: append.namespace,
            document: update.document,
        };
        let known = self.catalog.document(key).is_some();
        let erasures = self.catalog.erasures();
        self.static_code = match append.by {
            By::Operator { is_static: true } => STATIC,
            _ => 0,
        };
        if append.by == By::Worker && erasures.refuses(key, known, &append.names, &update.head) {
            // Answered as if it were stored: less would have the worker send all of it again, for ever.
            let added = u32::try_from(update.tokens.len()).unwrap_or(u32::MAX);
            return Ok(update.prev_len.saturating_add(added));
        }
        match self.try_apply(key, update) {
            Ok(()) => {}
            Err(TextError::Log(error)) => return Err(error),
            Err(TextError::Damaged(_)) => self.remove_damaged(key)?,
        }
        Ok(self
            .catalog
            .document(key)
            .map_or(0, |document| document.state.len))
    }

    /// Removes a document that cannot be read.
    ///
    /// # Errors
    /// `Unreadable` where the log's index is to be built anew first: it may be the index that is damaged.
    pub(super) fn remove_damaged(&mut self, key: DocumentKey) -> Result<(), LogError> {
        let is_sealed = self.catalog.sealed(key).is_some();
        if self.log.can_be_rebuilt() && !is_sealed && !self.limits.reread.contains(&key) {
            return Err(LogError::Unreadable(key));
        }
        self.remove(key, Removal::Damage)
    }

    fn try_apply(&mut self, key: DocumentKey, update: &DocumentUpdate) -> Result<(), TextError> {
        let known = self.catalog.document(key);
        match place(known.map(|document| document.text()), update) {
            Placement::Nothing { at_end } => {
                if let Some(document) = known
                    && at_end
                    && document.state.finish == 0
                    && update.finish.is_some()
                {
                    self.unseal(key)?;
                    let state = self.state(key)?;
                    self.write(key, state, update, state.len, &[])?;
                } else if at_end && known.is_some_and(|known| !known.state.is_static()) {
                    self.make_static(key)?;
                }
                Ok(())
            }
            Placement::Write {
                to,
                skip,
                epoch_start,
            } => {
                let state = match known.map(|known| known.state.len) {
                    Some(len) => {
                        if to < len {
                            self.keep_for_exports(key)?;
                        }
                        self.unseal(key)?;
                        self.state(key)?
                    }
                    None => self.create(key, update),
                };
                let state = StateRecord {
                    epoch: update.epoch,
                    epoch_start,
                    ..state
                };
                self.write(
                    key,
                    state,
                    update,
                    to,
                    update.tokens.get(skip..).unwrap_or_default(),
                )
            }
            Placement::Overwrite { epoch_start } => {
                self.keep_for_exports(key)?;
                self.overwrite(key, update, epoch_start)
            }
        }
    }

    /// Makes a document that is there static, if that is what the append wants.
    fn make_static(&mut self, key: DocumentKey) -> Result<(), TextError> {
        if self.static_code == 0 {
            return Ok(());
        }
        // A segment's records do not change: it is sealed again from the log.
        self.unseal(key)?;
        let mut state = self.state(key)?;
        state.finish |= self.static_code;
        self.catalog.put(key, state, None);
        self.states.insert(key);
        Ok(())
    }

    fn create(&mut self, key: DocumentKey, update: &DocumentUpdate) -> StateRecord {
        let mut head = update.head.clone();
        let surplus = head.left_context.len().saturating_sub(LEFT_CONTEXT_TOKENS);
        head.left_context.drain(..surplus);
        let head_key = document_key(Kind::Head, key);
        let value = codec::seal(&head_key, &HeadRecord(head));
        let bytes = (head_key.len() + value.len()) as u32;
        self.batch.put(head_key, value);
        StateRecord {
            epoch: update.epoch,
            epoch_start: 0,
            len: 0,
            finish: 0,
            sequence: 0,
            stored_ms: self.now_ms,
            used_ms: self.now_ms,
            tail_start: 0,
            tail_pieces: 0,
            bytes,
        }
    }

    /// A late piece of the document's own epoch. What it says is right, and what stands there may be of an
    /// older epoch.
    fn overwrite(
        &mut self,
        key: DocumentKey,
        update: &DocumentUpdate,
        epoch_start: u32,
    ) -> Result<(), TextError> {
        self.unseal(key)?;
        let mut state = self.state(key)?;
        let pieces = self.pieces(key, piece_key(key, 0), state.len)?;
        let text: Vec<TokenId> = pieces.into_iter().flat_map(|piece| piece.tokens).collect();
        let start = update.prev_len as usize;
        let stands = text.get(start..).ok_or(Damage::Length)?;
        let common = stands.len().min(update.tokens.len());
        state.epoch_start = epoch_start;
        if stands[..common] == update.tokens[..common] {
            let new = &update.tokens[common..];
            if new.is_empty() && (update.finish.is_none() || common < stands.len()) {
                // Nothing that followers would notice.
                self.catalog.put(key, state, None);
                self.states.insert(key);
                return Ok(());
            }
            return self.write(key, state, update, state.len, new);
        }
        let mut tokens = update.tokens.clone();
        tokens.extend_from_slice(&stands[common..]);
        // In one epoch followers only ever add. So they are told to drop the document, and get it anew.
        self.bury(key);
        let stored = finish_of(state.finish);
        let finish = match update.tokens.len().cmp(&stands.len()) {
            Ordering::Less => stored,
            Ordering::Equal => update.finish.or(stored),
            Ordering::Greater => update.finish,
        };
        let update = DocumentUpdate {
            finish,
            ..update.clone()
        };
        self.write(key, state, &update, update.prev_len, &tokens)?;
        self.catalog.settle(key);
        Ok(())
    }

    /// Cuts the text to `to`, adds tokens, and tells followers.
    fn write(
        &mut self,
        key: DocumentKey,
        mut state: StateRecord,
        update: &DocumentUpdate,
        to: u32,
        tokens: &[TokenId],
    ) -> Result<(), TextError> {
        self.store_text(key, &mut state, to, tokens, update.finish.is_some())?;
        state.finish = finish_code(update.finish) | state.finish & STATIC | self.static_code;
        state.used_ms = self.now_ms;
        state.sequence = self.next_sequence();
        self.outcome.appended_tokens += tokens.len() as u64;
        self.outcome.changed.insert(key.namespace);
        self.catalog.put(key, state, Some(to));
        self.states.insert(key);
        if let Some(group) = &update.head.group {
            self.enrol(key, group, update.head.weight_version, state.len);
        }
        Ok(())
    }

    /// Puts a document into its group, if that is registered.
    fn enrol(&mut self, key: DocumentKey, group: &str, weight_version: u64, len: u32) {
        let tokens_max = self.limits.group_tokens_max;
        let groups = self.catalog.groups_mut();
        let enrolment = groups.enrol(key, group, weight_version, len, tokens_max);
        self.outcome.group_rejections += u64::from(enrolment.is_full);
        self.leave_groups(enrolment.leaving);
    }

    /// Registers a group.
    pub(super) fn register_group(&mut self, registration: Registration) {
        let sequence = self.next_sequence();
        let leaving = self.catalog.groups_mut().register(
            registration.group,
            sequence,
            self.now_ms.saturating_add(registration.ttl_ms),
            registration.weight_version,
        );
        self.leave_groups(leaving);
    }

    fn leave_groups(&mut self, leaving: Vec<DocumentKey>) {
        for key in leaving {
            let sequence = self.next_sequence();
            self.catalog.groups_mut().depart(key, sequence, true);
        }
    }

    /// Removes a document with all its records, and tells followers.
    pub(super) fn remove(&mut self, key: DocumentKey, removal: Removal) -> Result<(), LogError> {
        if removal == Removal::Erased {
            self.catalog.exports().erased(key.namespace);
        } else {
            self.keep_for_exports(key)?;
        }
        let place = self.catalog.document(key).and_then(|known| known.place);
        if let Some(place) = place {
            self.mark_sealed(place, GONE)?;
        } else {
            let (from, to) = (piece_key(key, 0), piece_key(key, u32::MAX));
            for piece_key in self.batch.scan_over(&*self.log, &from, &to)?.into_keys() {
                self.batch.remove(piece_key);
            }
            self.batch.remove(document_key(Kind::State, key));
            self.batch.remove(document_key(Kind::Head, key));
        }
        self.catalog.take(key);
        self.bury(key);
        self.outcome.removed.push((key, removal));
        Ok(())
    }

    fn bury(&mut self, key: DocumentKey) {
        let sequence = self.next_sequence();
        self.catalog.bury(key, sequence);
        self.outcome.changed.insert(key.namespace);
        let tombstone = tombstone_key(key.namespace, sequence);
        let value = codec::seal(
            &tombstone,
            &TombstoneRecord {
                document: key.document.0,
            },
        );
        self.batch.put(tombstone, value);
        let feed = self.catalog.feed_mut(key.namespace);
        let trimmed = feed.trim(self.limits.tombstones_max);
        if !trimmed.is_empty() {
            let feed_key = namespace_key(Kind::Feed, key.namespace);
            let value = codec::seal(&feed_key, &feed.record());
            self.batch.put(feed_key, value);
            for sequence in trimmed {
                self.batch.remove(tombstone_key(key.namespace, sequence));
            }
        }
    }

    fn next_sequence(&mut self) -> u64 {
        let sequence = self.catalog.advance();
        if sequence >= self.store.sequence_reserved {
            self.store.sequence_reserved = sequence + SEQUENCES_RESERVED;
            let key = store_key();
            let value = codec::seal(&key, &self.store);
            self.batch.put(key, value);
        }
        sequence
    }
}
