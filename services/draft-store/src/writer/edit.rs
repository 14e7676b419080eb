//! One commit in the making. It changes the catalog, and gathers the log writes that make the change durable.
//!
//! This file has the state of an edit, and its end. `updates.rs` applies an update to a document, `text_pieces.rs`
//! stores its text, `removal.rs` removes and erases, `sealed_documents.rs` handles documents in segments.
//! `groups.rs`, `acceptance_statistics.rs`, `tenants.rs` and `usage.rs` are one concern each. `outbox.rs` notes what
//! other replicas must learn, `received.rs` applies what they sent, and `adopted_segment.rs` takes over a file of
//! one.

pub(super) mod acceptance_statistics;
mod adopted_segment;
mod groups;
mod outbox;
mod received;
mod removal;
mod sealed_documents;
mod tenants;
mod text_pieces;
mod updates;
pub(super) mod usage;

use std::collections::BTreeSet;
use std::sync::Arc;

use refrain_protocol::{Namespace, NamespaceId};

use crate::catalog::Catalog;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{
    DocumentKey, NamespaceRecord, RecordKind, StoreRecord, document_key, namespace_key, store_key,
};
use crate::segments::{Marks, mark_of};
use crate::writer::outcome::CommitOutcome;

/// Sequences reserved on disk at a time. A restart skips the unused ones.
const SEQUENCES_RESERVED: u64 = 1 << 16;

/// A commit in the making.
pub(super) struct Edit<'a> {
    pub(super) catalog: &'a mut Catalog,
    pub(super) outcome: CommitOutcome,
    pub(super) log: Arc<dyn RecordLog>,
    store: StoreRecord,
    tombstones_max: usize,
    group_tokens_max: u64,
    now_ms: u64,
    pub(super) batch: Batch,
    /// Documents whose state is to be written, once each.
    states: BTreeSet<DocumentKey>,
    /// Marks of sealed documents after this commit.
    marks: Marks,
    /// A bit that the current append adds to the finish code: `STATIC` or nothing.
    static_code: u8,
    /// Milliseconds that the current append had waited for its call.
    waited_ms: u32,
    /// The current change came by the stream, so other replicas have it.
    is_received: bool,
    /// The last sequence before this commit.
    head_before: u64,
}

impl<'a> Edit<'a> {
    pub(in crate::writer) fn new(
        catalog: &'a mut Catalog,
        log: Arc<dyn RecordLog>,
        store: StoreRecord,
        tombstones_max: usize,
        group_tokens_max: u64,
        now_ms: u64,
    ) -> Self {
        let head_before = catalog.head();
        Edit {
            catalog,
            outcome: CommitOutcome::default(),
            log,
            store,
            tombstones_max,
            group_tokens_max,
            now_ms,
            batch: Batch::default(),
            states: BTreeSet::new(),
            marks: Marks::default(),
            static_code: 0,
            waited_ms: 0,
            is_received: false,
            head_before,
        }
    }

    /// Whether nothing is to be written.
    pub(in crate::writer) fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.states.is_empty() && self.marks.chunks.is_empty()
    }

    /// The writes, the store's record after them, the documents with several feed entries, and the outcome.
    pub(in crate::writer) fn finish(
        mut self,
    ) -> Result<(Batch, StoreRecord, Vec<DocumentKey>, CommitOutcome), LogError> {
        let mut split = Vec::new();
        for key in std::mem::take(&mut self.states) {
            let Some(document) = self.catalog.document_mut(key) else {
                continue;
            };
            document.used_ms_stored = document.state.used_ms;
            if document.is_split() {
                split.push(key);
            }
            if let Some(slot) = document.slot {
                let used_s = mark_of(document.state.used_ms);
                self.mark_sealed(slot, used_s)?;
                continue;
            }
            self.batch
                .put_record(document_key(RecordKind::State, key), &document.state);
        }
        self.forget_emptied();
        self.write_marks();
        Ok((self.batch, self.store, split, self.outcome))
    }

    /// Stores the names of a namespace unless they are known.
    pub(in crate::writer) fn introduce(&mut self, namespace: NamespaceId, names: &Namespace) {
        if self.catalog.introduce(namespace, names) {
            let key = namespace_key(RecordKind::Namespace, namespace);
            self.batch.put_record(key, &NamespaceRecord(names.clone()));
        }
    }

    /// Writes the state of a document with this commit.
    pub(in crate::writer) fn write_state(&mut self, key: DocumentKey) {
        self.states.insert(key);
    }

    fn next_sequence(&mut self) -> u64 {
        let sequence = self.catalog.advance();
        if sequence >= self.store.sequence_reserved {
            self.store.sequence_reserved = sequence + SEQUENCES_RESERVED;
            self.batch.put_record(store_key(), &self.store);
        }
        sequence
    }
}
