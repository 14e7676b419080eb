//! The core of a replica, which applies messages of the stream and keeps its outbox.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use crate::catalog::{Catalog, EntryVersion};
use crate::log::LogError;
use crate::message::StreamMessage;
use crate::reading::outbox::SentDocument;
use crate::record::replication::{
    LastMessageRecord, OutboxRecord, PositionRecord, StreamErasureRecord, checkpoints_key,
    outbox_key, position_key, stream_erasure_key,
};
use crate::record::{DocumentKey, RecordKind, SegmentId, namespace_key};
use crate::segments::ReceivedSegment;
use crate::writer::core::{DAY_MS, WriterCore};
use crate::writer::outcome::CommitOutcome;

/// A document of another replica as messages of its parts, and whether it has changes that are not in the stream.
pub(crate) type JoinedParts = (Vec<StreamMessage>, bool);

/// The outcome of applying messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedMessages {
    /// Messages that had been applied before.
    pub(crate) repeated: u64,
    /// There are erasures that are not carried out.
    pub(crate) has_erasures: bool,
}

/// A message of the stream with its sequence. `None` stands for one that no replica can read.
pub(crate) type ReceivedMessage = (u64, Option<StreamMessage>);

/// An entry of the outbox that the broker has taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentEntry {
    pub(crate) entry: EntryVersion,
    pub(crate) document: Option<SentDocument>,
    /// Sequence of its last message in the stream; 0 without a message.
    pub(crate) last: u64,
}

impl WriterCore {
    /// Prepares the catalog for replication, if the configuration asks for it. A store that was no replica so far
    /// sends all that it has. One that was, and is no more, forgets where it was: when it is one again, it sends all.
    pub(crate) fn prepare_replication(&mut self, catalog: &mut Catalog) {
        let is_on = self.config.feed.is_some();
        catalog.replication.is_on = is_on;
        catalog.replication.sends_groups =
            self.config.feed.as_ref().is_some_and(|feed| feed.groups);
        let is_known = catalog.replication.position.is_some();
        if is_on && !is_known {
            self.send_all(catalog);
            let position = PositionRecord::default();
            self.repairs.put_record(position_key(), &position);
            catalog.replication.position = Some(position);
            // Nothing of the stream is here, and all that is here is still to be sent.
            let settled_head = catalog.settled_head();
            let moves = &mut catalog.replication.moves;
            moves.restore(Vec::new());
            moves.open(settled_head);
            self.repairs.put_record(checkpoints_key(), &moves.record());
        } else if !is_on && is_known {
            self.repairs.remove(position_key());
            self.repairs.remove(checkpoints_key());
            catalog.replication.position = None;
        }
        // Those that had ended when the store was closed need not wait any more.
        let ended: Vec<_> = catalog
            .replication
            .outbox
            .growing()
            .filter(|key| {
                let known = catalog.document(*key);
                known.is_none_or(|known| known.state.finish != 0)
            })
            .collect();
        for key in ended {
            catalog.replication.outbox.release(key);
        }
    }

    /// Adds all documents to the outbox. That becomes durable with the next commit of messages or of a position.
    fn send_all(&mut self, catalog: &mut Catalog) {
        for (namespace, _) in catalog.namespaces() {
            let documents: Vec<_> = catalog
                .documents(namespace)
                .map(|(document, known)| (document, known.state.finish != 0))
                .collect();
            for (document, is_finished) in documents {
                let key = DocumentKey::new(namespace, document);
                let outbox = &mut catalog.replication.outbox;
                if let Some(number) = outbox.change(key, is_finished, 0) {
                    self.repairs
                        .put_record(outbox_key(number), &OutboxRecord::document(key));
                }
            }
        }
    }

    /// Follows the stream once more from `from`, and sends all documents again. The brokers count its messages in
    /// another way than before, so nobody knows what this replica and the others have missed.
    pub(crate) fn begin_anew(
        &mut self,
        catalog: &mut Catalog,
        from: PositionRecord,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        self.send_all(catalog);
        self.set_position(catalog, from, now_ms)
    }

    /// Applies messages of the stream that was created at `stream`, in order. Repeated ones change nothing. The last
    /// message has the checksum `checksum`.
    pub(crate) fn apply_messages(
        &mut self,
        catalog: &mut Catalog,
        stream: u64,
        checksum: u64,
        messages: &[ReceivedMessage],
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut repairs = std::mem::take(&mut self.repairs);
        let mut edit = self.edit(catalog, now_ms);
        let before = edit.catalog.replication.position.unwrap_or_default();
        let mut position = PositionRecord { stream, ..before };
        let mut namespaces = BTreeSet::new();
        for (sequence, message) in messages {
            if *sequence <= position.sequence {
                edit.outcome.repeated_messages += 1;
                continue;
            }
            if let Some(message) = message {
                edit.apply_message(*sequence, message)?;
                if let Some(namespace) = message.namespace() {
                    let moves = &mut edit.catalog.replication.moves;
                    moves.applied(namespace, *sequence);
                    namespaces.insert(namespace);
                }
            }
            position = PositionRecord {
                stream,
                sequence: *sequence,
                checksum,
            };
        }
        self.within_budgets(&mut edit)?;
        if edit.catalog.replication.position != Some(position) {
            repairs.put_record(position_key(), &position);
            edit.catalog.replication.position = Some(position);
        }
        for number in edit.catalog.replication.outbox.settle(position.sequence) {
            repairs.remove(outbox_key(number));
        }
        let settled_head = edit.catalog.settled_head();
        let moves = &mut edit.catalog.replication.moves;
        moves.passed(position.sequence, settled_head, now_ms);
        for namespace in namespaces {
            let key = namespace_key(RecordKind::LastMessage, namespace);
            repairs.put_record(key, &LastMessageRecord(moves.seen(namespace)));
        }
        // They are stored with the position, so that none is ever later than that.
        if moves.take_due(now_ms) {
            repairs.put_record(checkpoints_key(), &moves.record());
        }
        if edit.is_empty() {
            // Most own messages change nothing. After a crash before the next commit they are applied once more.
            self.repairs = repairs;
            return Ok(edit.outcome);
        }
        repairs.merge(std::mem::take(&mut edit.writes.batch));
        edit.writes.batch = repairs;
        let outcome = self.commit(edit, now_ms)?;
        self.note_oldest(outcome.oldest_ms);
        Ok(outcome)
    }

    /// Begins to take over the documents of another replica. They may have more than the stream up to the position,
    /// so readers of others cannot go on here before its end is reached.
    pub(crate) fn begin_joining(
        &mut self,
        catalog: &mut Catalog,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let position = catalog.replication.position.unwrap_or_default();
        self.set_position(catalog, position, now_ms)
    }

    /// Remembers erasures that another replica knows. Those that are new here are to be carried out.
    pub(crate) fn note_erasures(
        &mut self,
        catalog: &mut Catalog,
        erasures: &[StreamErasureRecord],
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for erasure in erasures {
            edit.note_joined_erasure(erasure);
        }
        self.commit(edit, now_ms)
    }

    /// Stores documents of another replica. Those that it has not sent yet are sent by this one, too.
    pub(crate) fn store_joined(
        &mut self,
        catalog: &mut Catalog,
        documents: &[JoinedParts],
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for (messages, is_unsent) in documents {
            for message in messages {
                edit.apply_message(0, message)?;
            }
            if let (true, Some(message)) = (is_unsent, messages.first()) {
                edit.resend(message)?;
            }
        }
        self.within_budgets(&mut edit)?;
        let outcome = self.commit(edit, now_ms)?;
        self.note_oldest(outcome.oldest_ms);
        Ok(outcome)
    }

    /// Puts a segment file of another replica into use under the number `id`.
    pub(crate) fn adopt_segment(
        &mut self,
        catalog: &mut Catalog,
        dir: &Path,
        id: SegmentId,
        received: ReceivedSegment,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        edit.adopt_segment(dir, id, received)?;
        self.within_budgets(&mut edit)?;
        let outcome = self.commit(edit, now_ms)?;
        self.note_oldest(outcome.oldest_ms);
        Ok(outcome)
    }

    /// Removes documents that another replica does not have any more. Those with changes that nobody has stay, and
    /// are sent.
    pub(crate) fn drop_missing(
        &mut self,
        catalog: &mut Catalog,
        keys: &[DocumentKey],
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for key in keys {
            edit.remove_received(*key)?;
        }
        self.commit(edit, now_ms)
    }

    /// Sets how far the stream is applied, after everything up to there was taken over.
    pub(crate) fn set_position(
        &mut self,
        catalog: &mut Catalog,
        position: PositionRecord,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let repairs = std::mem::take(&mut self.repairs);
        let mut edit = self.edit(catalog, now_ms);
        edit.writes.batch.merge(repairs);
        edit.writes.put(position_key(), &position);
        edit.writes.remove(checkpoints_key());
        for namespace in edit.catalog.replication.moves.namespaces() {
            edit.writes
                .remove(namespace_key(RecordKind::LastMessage, namespace));
        }
        edit.catalog.replication.position = Some(position);
        edit.catalog.replication.moves.begin(position.sequence);
        self.commit(edit, now_ms)
    }

    /// Notes that everything is applied that was in the stream when the session began.
    pub(crate) fn note_end_of_stream(&mut self, catalog: &mut Catalog, now_ms: u64) {
        let (sequence, settled_head) = (catalog.replication.sequence(), catalog.settled_head());
        let moves = &mut catalog.replication.moves;
        moves.reached_end();
        moves.passed(sequence, settled_head, now_ms);
        if moves.take_due(now_ms) {
            self.repairs.put_record(checkpoints_key(), &moves.record());
        }
    }

    /// Notes that the broker has taken entries of the outbox. They go once this replica has applied their messages,
    /// and that becomes durable with the next commit. Until then a restart sends them again, which is harmless.
    pub(crate) fn note_taken(&mut self, catalog: &mut Catalog, sent: &[SentEntry]) {
        let applied = catalog.replication.sequence();
        let outbox = &mut catalog.replication.outbox;
        for SentEntry {
            entry,
            document,
            last,
        } in sent
        {
            if let Some(document) = document
                && let Some(text) = document.text
            {
                outbox.note_sent(document.key, *entry, text);
            }
            outbox.taken(*entry, *last);
        }
        for number in outbox.settle(applied) {
            self.repairs.remove(outbox_key(number));
        }
    }

    /// Takes the uses since the last time, with the times of use in Unix milliseconds.
    pub(crate) fn take_uses(&mut self) -> HashMap<DocumentKey, u64> {
        std::mem::take(&mut self.uses_to_send)
    }

    /// Lets growing documents be sent that are silent since `silent_ms`.
    pub(crate) fn release_silent(&self, catalog: &mut Catalog, silent_ms: u64) -> bool {
        let silent: Vec<DocumentKey> = catalog
            .replication
            .outbox
            .growing()
            .filter(|key| {
                let known = catalog.document(*key);
                known.is_none_or(|known| known.state.used_ms < silent_ms)
            })
            .collect();
        for key in &silent {
            catalog.replication.outbox.release(*key);
        }
        !silent.is_empty()
    }

    /// Records that this replica has carried out an erasure of the stream, if it is still the latest of its scope.
    pub(crate) fn complete_erasure(
        &mut self,
        catalog: &mut Catalog,
        id: u128,
        sequence: u64,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        if let Some(erasure) = edit.catalog.replication.erasure_mut(id)
            && erasure.sequence == sequence
        {
            erasure.is_done = true;
            let record = erasure.clone();
            edit.writes.put(stream_erasure_key(id), &record);
        }
        self.commit(edit, now_ms)
    }

    /// Forgets erasures of the stream that are older than any document.
    pub(super) fn forget_stream_erasures(&mut self, catalog: &mut Catalog, now_ms: u64) {
        // A replica that was away that long has no document left that an earlier erasure could hit.
        let retention_ms = u64::from(self.config.retention_days) * DAY_MS;
        let before_ms = now_ms.saturating_sub(retention_ms);
        for id in catalog.replication.forget_erasures(before_ms) {
            self.repairs.remove(stream_erasure_key(id));
        }
    }
}
