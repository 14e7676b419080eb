//! The entries that a commit adds to the outbox of a replica. A store without a feed adds nothing.

use crate::metrics::RemovalReason;
use crate::record::replication::{OutboxRecord, RevisionRecord, outbox_key};
use crate::record::{DocumentKey, ErasureRecord, RecordKind, document_key};
use crate::writer::edit::Edit;

impl Edit<'_> {
    /// Notes that a document changed here. One that still grows is sent later.
    pub(super) fn note_change(&mut self, key: DocumentKey, is_ready: bool) {
        if self.is_received || !self.catalog.replication.is_on {
            return;
        }
        let outbox = &mut self.catalog.replication.outbox;
        let added = outbox.change(key, is_ready, self.head_before);
        if let Some(number) = added {
            self.batch
                .put_record(outbox_key(number), &OutboxRecord::document(key));
        }
        self.outcome.sends |= is_ready;
    }

    /// Notes that a document was removed. Damage is the loss of this replica alone, so the others keep theirs.
    pub(super) fn note_removal(&mut self, key: DocumentKey, removal: RemovalReason) {
        self.set_revision(key, 0);
        if let Some(number) = self.catalog.replication.outbox.forget(key) {
            self.batch.remove(outbox_key(number));
        }
        if removal != RemovalReason::Damage {
            let is_erased = removal == RemovalReason::Erased;
            self.send(OutboxRecord::removal(key, is_erased));
        }
    }

    /// Notes that a document that was erased is not taken. Other replicas may get its next update.
    pub(super) fn note_refusal(&mut self, key: DocumentKey) {
        self.send(OutboxRecord::removal(key, true));
    }

    /// Notes an operator's erasure.
    pub(super) fn note_erasure(&mut self, mark: &ErasureRecord) {
        self.send(OutboxRecord::Erasure(mark.clone()));
    }

    fn send(&mut self, record: OutboxRecord) {
        if self.is_received || !self.catalog.replication.is_on {
            return;
        }
        let outbox = &mut self.catalog.replication.outbox;
        let number = outbox.add(record.clone(), self.head_before);
        self.batch.put_record(outbox_key(number), &record);
        self.outcome.sends = true;
    }

    /// Notes that the text of a document was corrected within its epoch. The corrected text counts more than the
    /// one before, whatever their tokens are.
    pub(super) fn correct(&mut self, key: DocumentKey) {
        if self.catalog.replication.is_on {
            let revision = self.catalog.replication.revision(key);
            self.set_revision(key, revision.saturating_add(1));
        }
    }

    pub(super) fn set_revision(&mut self, key: DocumentKey, revision: u32) {
        if !self.catalog.replication.set_revision(key, revision) {
            return;
        }
        let record_key = document_key(RecordKind::Revision, key);
        match revision {
            0 => self.batch.remove(record_key),
            _ => {
                self.batch.put_record(record_key, &RevisionRecord(revision));
            }
        }
    }
}
