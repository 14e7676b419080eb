//! One commit in the making. It changes the catalog, and gathers the log writes that make the change durable.
//!
//! This file has the state of an edit, and its end. `updates.rs` applies an update to a document, `removal.rs`
//! removes and erases, `sealed_documents.rs` handles documents in segments, `received.rs` applies what other replicas
//! sent, and `adopted_segment.rs` takes over a file of one.
//!
//! Its parts see less of it. `pending_writes.rs` has the writes that it gathers, `text_pieces.rs` stores text there,
//! and `outgoing.rs` notes what other replicas must learn. `acceptance_statistics.rs`, `tenants.rs` and `usage.rs`
//! have nothing to do with documents.

pub(super) mod acceptance_statistics;
mod adopted_segment;
mod outgoing;
pub(super) mod pending_writes;
mod received;
mod removal;
mod sealed_documents;
pub(super) mod tenants;
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
use crate::writer::edit::outgoing::{OutboxState, Outgoing};
use crate::writer::edit::pending_writes::PendingWrites;
use crate::writer::edit::usage::UsageRows;
use crate::writer::outcome::CommitOutcome;

/// Sequences reserved on disk at a time. A restart skips the unused ones.
const SEQUENCES_RESERVED: u64 = 1 << 16;

/// A commit in the making.
pub(super) struct Edit<'a> {
    pub(super) catalog: &'a mut Catalog,
    pub(super) outcome: CommitOutcome,
    pub(super) writes: PendingWrites,
    store: StoreRecord,
    tombstones_max: usize,
    group_tokens_max: u64,
    now_ms: u64,
    /// Documents whose state is to be written, once each.
    states: BTreeSet<DocumentKey>,
    /// Marks of sealed documents after this commit.
    marks: Marks,
    /// A bit that the current append adds to the finish code: `STATIC` or nothing.
    static_code: u8,
    /// Milliseconds that the current append had waited for its call.
    waited_ms: u32,
    outbox: OutboxState,
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
            writes: PendingWrites::new(log),
            store,
            tombstones_max,
            group_tokens_max,
            now_ms,
            states: BTreeSet::new(),
            marks: Marks::default(),
            static_code: 0,
            waited_ms: 0,
            outbox: OutboxState {
                head_before,
                is_received: false,
                sends: false,
            },
        }
    }

    /// Whether nothing is to be written.
    pub(in crate::writer) fn is_empty(&self) -> bool {
        self.writes.batch.is_empty() && self.states.is_empty() && self.marks.chunks.is_empty()
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
            self.writes
                .put(document_key(RecordKind::State, key), &document.state);
        }
        self.forget_emptied();
        self.write_marks();
        self.outcome.sends |= self.outbox.sends;
        Ok((self.writes.batch, self.store, split, self.outcome))
    }

    /// The view for entries of the outbox.
    fn outgoing(&mut self) -> Outgoing<'_> {
        Outgoing {
            state: &mut self.outbox,
            replication: &mut self.catalog.replication,
            writes: &mut self.writes,
        }
    }

    /// The rows of usage.
    pub(in crate::writer) fn usage(&mut self) -> UsageRows<'_> {
        UsageRows {
            usage: &mut self.catalog.usage,
            writes: &mut self.writes,
        }
    }

    /// Stores the names of a namespace unless they are known.
    pub(in crate::writer) fn introduce(&mut self, namespace: NamespaceId, names: &Namespace) {
        if self.catalog.introduce(namespace, names) {
            let key = namespace_key(RecordKind::Namespace, namespace);
            self.writes.put(key, &NamespaceRecord(names.clone()));
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
            self.writes.put(store_key(), &self.store);
        }
        sequence
    }
}
