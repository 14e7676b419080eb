//! The entries that a commit adds to the outbox of a replica. A store without a feed adds nothing.

use crate::catalog::Replication;
use crate::metrics::RemovalReason;
use crate::record::replication::{OutboxRecord, RevisionRecord, outbox_key};
use crate::record::{DocumentKey, ErasureRecord, RecordKind, document_key};
use crate::writer::edit::pending_writes::PendingWrites;

/// The state of a commit that concerns the outbox.
pub(super) struct OutboxState {
    /// The last sequence before this commit.
    pub(super) head_before: u64,
    /// The current change came by the stream, so other replicas have it.
    pub(super) is_received: bool,
    /// Something may be sent now.
    pub(super) sends: bool,
}

/// The parts of a commit that an entry of the outbox changes.
pub(super) struct Outgoing<'e> {
    pub(super) state: &'e mut OutboxState,
    pub(super) replication: &'e mut Replication,
    pub(super) writes: &'e mut PendingWrites,
}

impl Outgoing<'_> {
    fn is_off(&self) -> bool {
        self.state.is_received || !self.replication.is_on
    }

    /// Notes that a document changed here. One that still grows is sent later.
    pub(super) fn change(self, key: DocumentKey, is_ready: bool) {
        if self.is_off() {
            return;
        }
        let outbox = &mut self.replication.outbox;
        if let Some(number) = outbox.change(key, is_ready, self.state.head_before) {
            let record = OutboxRecord::document(key);
            self.writes.put(outbox_key(number), &record);
        }
        self.state.sends |= is_ready;
    }

    /// Notes that a document was removed. Damage is the loss of this replica alone, so the others keep theirs.
    pub(super) fn removal(mut self, key: DocumentKey, removal: RemovalReason) {
        self.set_revision(key, 0);
        if let Some(number) = self.replication.outbox.forget(key) {
            self.writes.remove(outbox_key(number));
        }
        if removal != RemovalReason::Damage {
            let is_erased = removal == RemovalReason::Erased;
            self.send(OutboxRecord::removal(key, is_erased));
        }
    }

    /// Notes that a document that was erased is not taken. Other replicas may get its next update.
    pub(super) fn refusal(self, key: DocumentKey) {
        self.send(OutboxRecord::removal(key, true));
    }

    /// Notes an operator's erasure.
    pub(super) fn erasure(self, mark: &ErasureRecord) {
        self.send(OutboxRecord::Erasure(mark.clone()));
    }

    fn send(self, record: OutboxRecord) {
        if self.is_off() {
            return;
        }
        let head_before = self.state.head_before;
        let number = self.replication.outbox.add(record.clone(), head_before);
        self.writes.put(outbox_key(number), &record);
        self.state.sends = true;
    }

    /// Notes that the text of a document was corrected within its epoch. The corrected text counts more than the
    /// one before, whatever their tokens are.
    pub(super) fn correction(mut self, key: DocumentKey) {
        if self.replication.is_on {
            let revision = self.replication.revision(key);
            self.set_revision(key, revision.saturating_add(1));
        }
    }

    pub(super) fn set_revision(&mut self, key: DocumentKey, revision: u32) {
        if !self.replication.set_revision(key, revision) {
            return;
        }
        let record_key = document_key(RecordKind::Revision, key);
        match revision {
            0 => self.writes.remove(record_key),
            _ => drop(self.writes.put(record_key, &RevisionRecord(revision))),
        }
    }
}
