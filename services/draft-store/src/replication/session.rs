//! The store as sessions with the broker see it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use refrain_protocol::{ApiError, NamespaceId};

use crate::config::FeedConfig;
use crate::message::{StreamChange, StreamMessage};
use crate::metrics::StoreMetrics;
use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::replication::status::FeedStatus;
use crate::replication::stream::SessionError;
use crate::service::DraftStoreHandle;
use crate::shared_store::SharedStore;
use crate::writer::handle::WriterHandle;
use crate::writer::replication::{ReceivedMessage, SentEntry};

/// All that a session works with.
pub(crate) struct Session {
    pub(crate) feed: FeedConfig,
    pub(crate) handle: DraftStoreHandle,
    pub(crate) writer: WriterHandle,
    pub(crate) shared: Arc<SharedStore>,
    pub(crate) status: Arc<FeedStatus>,
    pub(crate) metrics: StoreMetrics,
    /// The mesh secret, for calls to other replicas.
    pub(crate) secret: String,
    /// Whether erasures of the stream are being carried out.
    pub(crate) is_erasing: Arc<AtomicBool>,
}

fn store_error(error: ApiError) -> SessionError {
    SessionError::Store(error.to_string())
}

pub(super) fn stopped() -> SessionError {
    SessionError::Store("the writer has stopped".into())
}

impl Session {
    /// How far the stream is applied.
    pub(super) fn position(&self) -> PositionRecord {
        let open = self.shared.read();
        open.ok()
            .and_then(|open| open.catalog.replication.position)
            .unwrap_or_default()
    }

    /// A number that no other store has.
    pub(super) fn generation(&self) -> u64 {
        let open = self.shared.read();
        open.map_or(0, |open| open.catalog.generation())
    }

    /// Whether the store has no documents.
    pub(super) fn is_empty(&self) -> bool {
        let open = self.shared.read();
        open.is_ok_and(|open| open.catalog.totals().documents == 0)
    }

    /// Entries of the outbox that may be sent.
    pub(super) fn ready_entries(&self) -> usize {
        let open = self.shared.read();
        open.map_or(0, |open| open.catalog.replication.outbox.ready())
    }

    /// A message of this replica.
    pub(super) fn message(&self, change: StreamChange) -> StreamMessage {
        let open = self.shared.read();
        let known = open.map(|open| {
            let catalog = &open.catalog;
            (catalog.generation(), catalog.replication.seen())
        });
        let (origin, seen) = known.unwrap_or_default();
        StreamMessage {
            origin,
            seen,
            change,
        }
    }

    /// Applies messages durably. Returns how many had been applied before.
    pub(super) async fn apply(
        &self,
        stream: u64,
        messages: Vec<ReceivedMessage>,
    ) -> Result<u64, SessionError> {
        let applied = self
            .writer
            .ask(move |writer| writer.apply_messages(stream, &messages));
        applied.await.map_err(|_| stopped())?.map_err(store_error)
    }

    /// Drops entries that the broker has taken, and answers those who wait for them.
    pub(super) async fn settle(&self, sent: Vec<SentEntry>) -> Result<(), SessionError> {
        let settled = self.writer.ask(move |writer| writer.settle_outbox(&sent));
        settled.await.map_err(|_| stopped())
    }

    /// Takes the uses that other replicas have not been told.
    pub(super) async fn take_uses(
        &self,
    ) -> Result<BTreeMap<NamespaceId, Vec<(u128, u64)>>, SessionError> {
        let uses = self.writer.ask(|writer| writer.take_uses());
        uses.await.map_err(|_| stopped())
    }

    /// Has documents removed that cannot be read.
    pub(super) fn report_damaged(&self, damaged: Vec<DocumentKey>) {
        if !damaged.is_empty() {
            // If the mailbox is full, the next look finds them again.
            let _ = self
                .writer
                .try_send(move |writer, _| writer.remove_unreadable(damaged));
        }
    }

    /// Updates the gauges.
    pub(super) fn observe(&self) {
        let state = self.status.state();
        self.metrics.feed_sequence.set(state.sequence as i64);
        self.metrics.feed_lag_messages.set(state.lag() as i64);
    }

    /// The erasures of the stream that are not carried out here.
    pub(super) fn open_erasures(&self) -> Vec<StreamErasureRecord> {
        let open = self.shared.read();
        open.map_or_else(
            |_| Vec::new(),
            |open| open.catalog.replication.open_erasures(),
        )
    }
}
