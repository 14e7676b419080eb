//! Removals and erasures in a commit.

use crate::log::LogError;
use crate::metrics::RemovalReason;
use crate::record::{
    DocumentKey, ErasedRecord, ErasureRecord, GONE, RecordKind, TombstoneRecord, document_key,
    erasure_key, namespace_key, piece_key, tombstone_key,
};
use crate::writer::edit::Edit;

impl Edit<'_> {
    /// Removes a document with all its records, and tells followers.
    pub(in crate::writer) fn remove(
        &mut self,
        key: DocumentKey,
        removal: RemovalReason,
    ) -> Result<(), LogError> {
        if removal == RemovalReason::Erased {
            self.catalog.exports.erased(key.namespace);
        } else {
            self.keep_for_exports(key)?;
        }
        let slot = self.catalog.document(key).and_then(|known| known.slot);
        if let Some(slot) = slot {
            self.mark_sealed(slot, GONE)?;
        } else {
            let (from, to) = (piece_key(key, 0), piece_key(key, u32::MAX));
            for piece_key in self.writes.scan(&from, &to)?.into_keys() {
                self.writes.remove(piece_key);
            }
            self.writes.remove(document_key(RecordKind::State, key));
            self.writes.remove(document_key(RecordKind::Head, key));
        }
        self.catalog.take(key);
        self.outgoing().removal(key, removal);
        self.add_tombstone(key);
        self.outcome.removed.push((key, removal));
        self.outcome.leaves_remains = true;
        Ok(())
    }

    pub(in crate::writer) fn add_tombstone(&mut self, key: DocumentKey) {
        let sequence = self.next_sequence();
        self.catalog.add_tombstone(key, sequence);
        self.outcome.changed.insert(key.namespace);
        let tombstone = tombstone_key(key.namespace, sequence);
        let document = key.document.0;
        self.writes.put(tombstone, &TombstoneRecord { document });
        let feed = self.catalog.feed_mut(key.namespace);
        let trimmed = feed.trim(self.tombstones_max);
        if !trimmed.is_empty() {
            let feed_key = namespace_key(RecordKind::Feed, key.namespace);
            self.writes.put(feed_key, &feed.record());
            for sequence in trimmed {
                self.writes.remove(tombstone_key(key.namespace, sequence));
            }
        }
    }

    /// Remembers an erasure. Returns it with the latest time of its scope.
    pub(in crate::writer) fn mark(&mut self, mark: ErasureRecord) -> ErasureRecord {
        let mark = self.catalog.erasures.mark(mark);
        self.writes.put(erasure_key(mark.id()), &mark);
        self.outgoing().erasure(&mark);
        mark
    }

    /// Remembers that a document was erased.
    pub(in crate::writer) fn remember_erased(&mut self, key: DocumentKey) {
        let at_ms = self.now_ms;
        let erased_key = document_key(RecordKind::Erased, key);
        self.writes.put(erased_key, &ErasedRecord { at_ms });
        self.catalog.erasures.erase(key, at_ms);
    }

    /// Remembers that a document was erased which the store does not have, and tells followers and other replicas.
    /// They were told of one that is remembered already.
    pub(in crate::writer) fn refuse_erased(&mut self, key: DocumentKey) {
        if self.catalog.erasures.is_erased(key) {
            return;
        }
        self.remember_erased(key);
        self.add_tombstone(key);
        self.outgoing().refusal(key);
    }

    /// Forgets erasures before a time, and the documents beyond the limit.
    pub(in crate::writer) fn forget_erased(
        &mut self,
        before_ms: u64,
        documents_max: usize,
        limit: usize,
    ) {
        let (marks, keys) = self
            .catalog
            .erasures
            .expire(before_ms, documents_max, limit);
        for id in marks {
            self.writes.remove(erasure_key(id));
        }
        for key in keys {
            self.writes.remove(document_key(RecordKind::Erased, key));
        }
    }
}
