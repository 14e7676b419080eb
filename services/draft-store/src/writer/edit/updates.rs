//! Applying one update to a document.

use std::cmp::Ordering;

use refrain_protocol::TokenId;
use refrain_protocol::document::{DocumentUpdate, ERASED_LEN, FENCED_LEN, LEFT_CONTEXT_TOKENS};

use crate::catalog::GroupUpdate;
use crate::codec::Damage;
use crate::log::LogError;
use crate::metrics::RemovalReason;
use crate::reading::document_text::TextError;
use crate::record::{
    DocumentKey, HeadRecord, RecordKind, STATIC, StateRecord, document_key, finish_code, finish_of,
    piece_key,
};
use crate::writer::edit::Edit;
use crate::writer::edit::text_pieces::{pieces, store_text};
use crate::writer::placement::{Placement, place};
use crate::writer::requests::{Append, UpdateAuthor};

impl Edit<'_> {
    /// Applies an update. Returns the document's new length, [`ERASED_LEN`] or [`FENCED_LEN`]. A document whose
    /// stored text turns out to be damaged is removed, and has length 0.
    pub(in crate::writer) fn apply(
        &mut self,
        append: &Append,
        update: &DocumentUpdate,
    ) -> Result<u32, LogError> {
        let key = DocumentKey::new(append.namespace, update.document);
        self.waited_ms = append.waited_ms;
        let known = self.catalog.document(key).is_some();
        let erasures = &self.catalog.erasures;
        self.static_code = match append.author {
            UpdateAuthor::Operator { is_static: true } => STATIC,
            _ => 0,
        };
        if append.author == UpdateAuthor::Worker
            && erasures.refuses(key, known, &append.names, &update.head)
        {
            self.refuse_erased(key);
            return Ok(ERASED_LEN);
        }
        let state = self.catalog.document(key).map(|document| &document.state);
        let placement = place(state, update);
        if placement == Placement::Fenced {
            self.outcome.fenced_tokens += update.tokens.len() as u64;
            return Ok(FENCED_LEN);
        }
        match self.try_apply(key, update, placement) {
            Ok(()) => {
                if let Some(prompt) = update.head.prompt_hash.filter(|_| !known) {
                    self.catalog.set_prompt(key, prompt);
                }
            }
            Err(TextError::Log(error)) => return Err(error),
            Err(TextError::Damaged(_)) => self.remove(key, RemovalReason::Damage)?,
        }
        Ok(self
            .catalog
            .document(key)
            .map_or(0, |document| document.state.len))
    }

    fn try_apply(
        &mut self,
        key: DocumentKey,
        update: &DocumentUpdate,
        placement: Placement,
    ) -> Result<(), TextError> {
        let known = self.catalog.document(key);
        match placement {
            Placement::Fenced => Ok(()),
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
                let is_newer = update.epoch > state.epoch;
                if is_newer {
                    self.outgoing().set_revision(key, 0);
                }
                let state = StateRecord {
                    epoch: update.epoch,
                    epoch_start,
                    ..state
                };
                let tokens = update.tokens.get(skip..).unwrap_or_default();
                self.write(key, state, update, to, tokens)?;
                if is_newer && self.catalog.replication.is_on {
                    // A reader who came from another replica may have a shorter text.
                    self.catalog.settle(key);
                }
                Ok(())
            }
            Placement::Overwrite { epoch_start } => {
                self.keep_for_exports(key)?;
                self.overwrite(key, update, epoch_start)
            }
        }
    }

    /// Makes an existing document static, if the append asks for it.
    fn make_static(&mut self, key: DocumentKey) -> Result<(), TextError> {
        if self.static_code == 0 {
            return Ok(());
        }
        // The records of a segment do not change, so the document moves to the log and is sealed again.
        self.unseal(key)?;
        let mut state = self.state(key)?;
        state.finish |= self.static_code;
        self.catalog.put(key, state, None);
        self.states.insert(key);
        self.outgoing()
            .change(key, finish_of(state.finish).is_some());
        Ok(())
    }

    pub(super) fn create(&mut self, key: DocumentKey, update: &DocumentUpdate) -> StateRecord {
        let mut head = update.head.clone();
        let surplus = head.left_context.len().saturating_sub(LEFT_CONTEXT_TOKENS);
        head.left_context.drain(..surplus);
        let head_key = document_key(RecordKind::Head, key);
        let bytes = self.writes.put(head_key, &HeadRecord(head));
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

    /// Applies a late update of the document's own epoch. The update is right; the text there may belong to an older
    /// epoch.
    fn overwrite(
        &mut self,
        key: DocumentKey,
        update: &DocumentUpdate,
        epoch_start: u32,
    ) -> Result<(), TextError> {
        self.unseal(key)?;
        let mut state = self.state(key)?;
        let pieces = pieces(&self.writes, key, piece_key(key, 0), state.len)?;
        let text: Vec<TokenId> = pieces.into_iter().flat_map(|piece| piece.tokens).collect();
        let start = update.prev_len as usize;
        let stands = text.get(start..).ok_or(Damage::Length)?;
        let common = stands.len().min(update.tokens.len());
        state.epoch_start = epoch_start;
        if stands[..common] == update.tokens[..common] {
            let new = &update.tokens[common..];
            if new.is_empty() && (update.finish.is_none() || common < stands.len()) {
                // Followers would not notice any difference.
                self.catalog.put(key, state, None);
                self.states.insert(key);
                return Ok(());
            }
            return self.write(key, state, update, state.len, new);
        }
        let mut tokens = update.tokens.clone();
        tokens.extend_from_slice(&stands[common..]);
        self.outgoing().correction(key);
        // Within an epoch followers only ever append. So they are told to drop the document, and get it again.
        self.add_tombstone(key);
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
    pub(super) fn write(
        &mut self,
        key: DocumentKey,
        mut state: StateRecord,
        update: &DocumentUpdate,
        to: u32,
        tokens: &[TokenId],
    ) -> Result<(), TextError> {
        store_text(&mut self.writes, key, &mut state, to, tokens)?;
        state.finish = finish_code(update.finish) | state.finish & STATIC | self.static_code;
        state.used_ms = self.now_ms;
        state.sequence = self.next_sequence();
        self.outcome.appended_tokens += tokens.len() as u64;
        self.outcome.changed.insert(key.namespace);
        self.catalog.put(key, state, Some(to));
        self.states.insert(key);
        let sends_groups = self.catalog.replication.sends_groups;
        let is_ready = update.finish.is_some() || sends_groups && update.head.group.is_some();
        self.outgoing().change(key, is_ready);
        if let Some(group) = &update.head.group {
            let group_update = GroupUpdate {
                len: state.len,
                sequence: state.sequence,
                emitted_ms: self.now_ms.saturating_sub(u64::from(self.waited_ms)),
            };
            self.enrol(key, group, group_update);
        }
        Ok(())
    }

    /// Adds an update of a document to its group, if that is registered.
    fn enrol(&mut self, key: DocumentKey, group: &str, update: GroupUpdate) {
        let tokens_max = self.group_tokens_max;
        let enrolment = self.catalog.groups.enrol(key, group, update, tokens_max);
        self.outcome.group_rejections.extend(enrolment.refused);
        if let Some(key) = enrolment.leaving {
            let sequence = self.next_sequence();
            self.catalog.groups.depart(key, sequence, true);
        }
        if enrolment.is_new {
            // Readers of the group may be past the document's earlier changes. So they get all of it as one change.
            self.catalog.settle(key);
        }
    }
}
