//! Applying what other replicas sent, and what came back of this one's own.
//!
//! Own messages are applied, too: a message of another replica may have come before them in the stream.

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::{DocumentId, NamespaceId};

use crate::log::LogError;
use crate::message::{DocumentPart, Removals, StreamChange, StreamMessage, Uses, head_bytes};
use crate::metrics::RemovalReason;
use crate::reading::document_text::TextError;
use crate::record::replication::{StreamErasureRecord, stream_erasure_key};
use crate::record::{
    DocumentKey, ErasureRecord, HeadRecord, RecordKind, STATIC, StateRecord, document_key,
    finish_of,
};
use crate::writer::edit::Edit;
use crate::writer::join::{Joined, LocalText, ReceivedText, join};

impl Edit<'_> {
    /// Applies a message of the stream.
    pub(in crate::writer) fn apply_message(
        &mut self,
        sequence: u64,
        message: &StreamMessage,
    ) -> Result<(), LogError> {
        self.outbox.is_received = true;
        let applied = match &message.change {
            StreamChange::Start => Ok(()),
            StreamChange::Document(_) | StreamChange::Documents(_) => {
                let mut documents = message.change.documents().iter();
                documents.try_for_each(|part| self.apply_document(message, part))
            }
            StreamChange::Removals(removals) => self.apply_removals(removals),
            StreamChange::Uses(uses) => {
                self.apply_uses(uses);
                Ok(())
            }
            StreamChange::Erasure(mark) => {
                self.apply_erasure(sequence, message.origin, mark);
                Ok(())
            }
        };
        self.outbox.is_received = false;
        applied
    }

    fn apply_document(
        &mut self,
        message: &StreamMessage,
        part: &DocumentPart,
    ) -> Result<(), LogError> {
        let key = part.key();
        let is_own = message.origin == self.store.generation;
        let known = self.catalog.document(key).map(|known| known.state);
        let (names, head) = (&part.names, part.head());
        let replication = &self.catalog.replication;
        if replication.refuses(message.seen, names, head, part.stored_ms) {
            if is_own && known.is_some() {
                // This replica knows the erasure by now, and kept the document.
                self.send_again(key)?;
            }
            return Ok(());
        }
        // A part whose tokens cannot be read is damaged for all replicas alike.
        let Ok(tokens) = part.tokens() else {
            return Ok(());
        };
        let end = part.start as usize + tokens.len();
        if is_own
            && known.is_some_and(|state| {
                state.sequence == part.sequence
                    && state.epoch == part.epoch
                    && state.len as usize >= end
            })
        {
            return Ok(());
        }
        self.introduce(key.namespace, &part.names);
        let update = DocumentUpdate {
            document: key.document,
            epoch: part.epoch,
            prev_len: part.start,
            tokens,
            head: part.head().clone(),
            finish: finish_of(part.finish),
        };
        let mut joined = self.try_join(key, part, &update);
        if let Err(TextError::Damaged(_)) = joined {
            self.remove(key, RemovalReason::Damage)?;
            joined = self.try_join(key, part, &update);
        }
        match joined {
            Ok(()) => Ok(()),
            Err(TextError::Log(error)) => Err(error),
            Err(TextError::Damaged(damage)) => Err(LogError::Corrupt(damage.to_string())),
        }
    }

    fn try_join(
        &mut self,
        key: DocumentKey,
        part: &DocumentPart,
        update: &DocumentUpdate,
    ) -> Result<(), TextError> {
        let local = match self.catalog.document(key) {
            Some(_) => Some((self.state(key)?, self.current_document(key)?)),
            None => None,
        };
        let revision = self.catalog.replication.revision(key);
        let text = local.as_ref().map(|(state, document)| LocalText {
            version: (state.epoch, revision),
            text: &document.tokens,
            finish: state.finish & !STATIC,
        });
        let received = ReceivedText {
            version: (part.epoch, part.revision),
            start: part.start,
            before: part.before,
            tokens: &update.tokens,
            finish: part.finish,
        };
        self.static_code = if part.is_static { STATIC } else { 0 };
        self.waited_ms = 0;
        match join(text, &received) {
            Joined::Gap => return Ok(()),
            Joined::Nothing => {}
            Joined::Finish => {
                self.unseal(key)?;
                let state = self.state(key)?;
                self.write(key, state, update, state.len, &[])?;
            }
            Joined::Write { to, skip } => {
                let before = local.as_ref().map(|(state, _)| *state);
                self.write_received(key, part, update, before, to, skip)?;
            }
        }
        match local {
            Some((_, document)) => self.join_properties(key, part, &document.head),
            None => {
                if let Some(prompt) = update.head.prompt_hash {
                    self.catalog.set_prompt(key, prompt);
                }
                Ok(())
            }
        }
    }

    /// Cuts the text to `to`, and adds the received tokens from `skip` on.
    fn write_received(
        &mut self,
        key: DocumentKey,
        part: &DocumentPart,
        update: &DocumentUpdate,
        before: Option<StateRecord>,
        to: u32,
        skip: usize,
    ) -> Result<(), TextError> {
        let (epoch, len) = before.map_or((part.epoch, 0), |state| (state.epoch, state.len));
        let mut state = if before.is_some() {
            if to < len {
                self.keep_for_exports(key)?;
            }
            self.unseal(key)?;
            self.state(key)?
        } else {
            self.outcome.oldest_ms = Some(
                self.outcome
                    .oldest_ms
                    .map_or(part.stored_ms, |oldest| oldest.min(part.stored_ms)),
            );
            let created = self.create(key, update);
            StateRecord {
                stored_ms: part.stored_ms,
                ..created
            }
        };
        let is_newer =
            (part.epoch, part.revision) > (epoch, self.catalog.replication.revision(key));
        if is_newer {
            state.epoch_start = 0;
        }
        state.epoch = part.epoch;
        self.outgoing().set_revision(key, part.revision);
        // Within an epoch followers only ever append.
        let is_corrected = part.epoch == epoch && to < len;
        if is_corrected {
            self.add_tombstone(key);
            // Messages on the way have the text from before. No part of it counts as sent.
            self.catalog.replication.outbox.renew(key);
        }
        let tokens = update.tokens.get(skip..).unwrap_or_default();
        self.write(key, state, update, to, tokens)?;
        if is_corrected || is_newer {
            // A reader who came from another replica may have a shorter text.
            self.catalog.settle(key);
        }
        Ok(())
    }

    /// Joins what does not depend on the text: when the document was first stored, whether it is static, and its
    /// head.
    fn join_properties(
        &mut self,
        key: DocumentKey,
        part: &DocumentPart,
        head: &DocumentHead,
    ) -> Result<(), TextError> {
        let state = self.state(key)?;
        let is_older = part.stored_ms < state.stored_ms;
        let becomes_static = part.is_static && !state.is_static();
        // Replicas only need to agree on one head.
        let has_other_head = head_bytes(part.head()) > head_bytes(head);
        if !(is_older || becomes_static || has_other_head) {
            return Ok(());
        }
        self.unseal(key)?;
        let mut state = self.state(key)?;
        if is_older {
            state.stored_ms = part.stored_ms;
            let oldest_ms = self.outcome.oldest_ms.unwrap_or(u64::MAX);
            self.outcome.oldest_ms = Some(oldest_ms.min(part.stored_ms));
        }
        if becomes_static {
            state.finish |= STATIC;
        }
        if has_other_head {
            let head_key = document_key(RecordKind::Head, key);
            let before = self.stored_head_bytes(&head_key)?;
            let record = HeadRecord(part.head().clone());
            let after = self.writes.put(head_key, &record);
            state.bytes = state.bytes.saturating_sub(before).saturating_add(after);
        }
        self.catalog.put(key, state, None);
        self.states.insert(key);
        if let Some(prompt) = part.head().prompt_hash.filter(|_| has_other_head) {
            self.catalog.set_prompt(key, prompt);
        }
        Ok(())
    }

    /// Bytes of the key and value of a head in the log.
    fn stored_head_bytes(&self, head_key: &[u8]) -> Result<u32, LogError> {
        let value = self.writes.get(head_key)?;
        Ok(value.map_or(0, |value| (head_key.len() + value.len()) as u32))
    }

    fn apply_removals(&mut self, removals: &Removals) -> Result<(), LogError> {
        let namespace = NamespaceId(removals.namespace);
        for document in &removals.documents {
            let key = DocumentKey::new(namespace, DocumentId(*document));
            if self.catalog.document(key).is_none() {
                if removals.is_erasure {
                    self.refuse_erased(key);
                }
                continue;
            }
            if removals.is_erasure {
                self.remove(key, RemovalReason::Erased)?;
                self.remember_erased(key);
            } else {
                self.keep_or_remove(key)?;
            }
        }
        Ok(())
    }

    /// Removes a document that others have removed, unless it has changes that they do not have.
    fn keep_or_remove(&mut self, key: DocumentKey) -> Result<(), LogError> {
        if self.catalog.replication.outbox.has(key) {
            // Messages on the way to others may be older than the document here.
            return self.send_again(key);
        }
        self.remove(key, RemovalReason::OtherReplica)
    }

    /// Removes a document that another replica does not have any more.
    pub(in crate::writer) fn remove_received(&mut self, key: DocumentKey) -> Result<(), LogError> {
        if self.catalog.document(key).is_none() {
            return Ok(());
        }
        self.outbox.is_received = true;
        let removed = self.keep_or_remove(key);
        self.outbox.is_received = false;
        removed
    }

    /// Sends the document of a message, which its sender has not sent yet.
    pub(in crate::writer) fn resend(&mut self, message: &StreamMessage) -> Result<(), LogError> {
        for part in message.change.documents() {
            if self.catalog.document(part.key()).is_some() {
                self.send_again(part.key())?;
            }
        }
        Ok(())
    }

    /// Remembers an erasure that another replica knows, unless this one knows it.
    pub(in crate::writer) fn note_joined_erasure(&mut self, erasure: &StreamErasureRecord) {
        let known = self.catalog.replication.erasures();
        let id = erasure.mark.id();
        let is_known = known
            .filter(|known| known.mark.id() == id)
            .any(|known| known.sequence >= erasure.sequence);
        if !is_known {
            self.outbox.is_received = true;
            self.apply_erasure(erasure.sequence, 0, &erasure.mark);
            self.outbox.is_received = false;
        }
    }

    /// Sends a document once more as a whole. It counts as changed, so that the broker does not take the message for
    /// a repetition of one that came before the removal.
    fn send_again(&mut self, key: DocumentKey) -> Result<(), LogError> {
        // The records of a segment do not change. So the document moves to the log, or a restart would send it with
        // the sequence from before.
        match self.unseal(key) {
            Ok(()) => {}
            Err(TextError::Log(error)) => return Err(error),
            // Nobody can send it.
            Err(TextError::Damaged(_)) => return Ok(()),
        }
        if let Ok(mut state) = self.state(key) {
            state.sequence = self.next_sequence();
            self.catalog.put(key, state, Some(state.len));
            // A reader who came from the replica that removed it does not have it any more.
            self.catalog.settle(key);
            self.states.insert(key);
            self.outcome.changed.insert(key.namespace);
            let is_received = std::mem::take(&mut self.outbox.is_received);
            self.outgoing().change(key, true);
            self.outbox.is_received = is_received;
            self.catalog.replication.outbox.renew(key);
        }
        Ok(())
    }

    fn apply_uses(&mut self, uses: &Uses) {
        let namespace = NamespaceId(uses.namespace);
        for (document, used_ms) in &uses.documents {
            let key = DocumentKey::new(namespace, DocumentId(*document));
            let known = self.catalog.document(key).map(|known| known.state.used_ms);
            if known.is_some_and(|known_ms| known_ms < *used_ms)
                && self.catalog.touch(key, *used_ms, *used_ms)
            {
                self.write_state(key);
            }
        }
    }

    /// Remembers an erasure of the stream. The documents that it hits are removed afterwards, in small steps.
    fn apply_erasure(&mut self, sequence: u64, origin: u64, mark: &ErasureRecord) {
        self.catalog.end_exports(mark);
        self.erase_statistics(|names| mark.hits_namespace(names));
        self.mark(mark.clone());
        let erasure = self.catalog.replication.note_erasure(StreamErasureRecord {
            sequence,
            mark: mark.clone(),
            applied_ms: self.now_ms,
            is_own: origin == self.store.generation,
            is_done: false,
        });
        self.writes.put(stream_erasure_key(mark.id()), &erasure);
    }
}
