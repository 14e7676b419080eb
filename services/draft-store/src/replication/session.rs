//! The store as sessions with the broker see it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use refrain_protocol::{ApiError, NamespaceId};
use refrain_service_kit::mesh::MeshCredentials;

use crate::config::FeedConfig;
use crate::handle::DraftStoreHandle;
use crate::message::{StreamChange, StreamMessage};
use crate::metrics::StoreMetrics;
use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::replicas::status::FeedStatus;
use crate::replication::adopted_files::AdoptedFiles;
use crate::replication::stream::SessionError;
use crate::shared_store::{OpenStore, SharedStore};
use crate::writer::actor::handle::WriterHandle;
use crate::writer::replication::{AppliedMessages, ReceivedMessage, SentEntry};

/// All that a session works with.
pub(crate) struct Session {
    pub(crate) feed: FeedConfig,
    pub(crate) handle: DraftStoreHandle,
    pub(crate) writer: WriterHandle,
    pub(crate) shared: Arc<SharedStore>,
    pub(crate) status: Arc<FeedStatus>,
    pub(crate) metrics: StoreMetrics,
    /// The secret and the certificate of calls to other replicas.
    pub(crate) credentials: MeshCredentials,
    /// Where received files go, and how much of the disk must stay free.
    pub(crate) data_dir: PathBuf,
    pub(crate) disk_reserve_bytes: u64,
    /// The files that a join which was broken off has taken over.
    pub(crate) adopted: Mutex<AdoptedFiles>,
    /// Whether erasures of the stream are being carried out.
    pub(crate) is_erasing: Arc<AtomicBool>,
}

pub(super) fn store_error(error: ApiError) -> SessionError {
    SessionError::Store(error.to_string())
}

pub(super) fn stopped() -> SessionError {
    SessionError::Store("the writer has stopped".into())
}

impl Session {
    /// Looks at the store, on a thread that may wait for a commit.
    pub(super) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&OpenStore) -> T + Send + 'static,
    ) -> Result<T, SessionError> {
        let shared = self.shared.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let open = shared.read()?;
            Ok(look(&open))
        });
        let looked = looked.await;
        looked
            .map_err(|error| SessionError::Store(error.to_string()))?
            .map_err(store_error)
    }

    /// How far the stream is applied.
    pub(super) async fn position(&self) -> Result<PositionRecord, SessionError> {
        let position = self.look(|open| open.catalog.replication.position);
        Ok(position.await?.unwrap_or_default())
    }

    /// A message of this replica.
    pub(super) async fn message(
        &self,
        change: StreamChange,
    ) -> Result<StreamMessage, SessionError> {
        self.look(|open| StreamMessage {
            origin: open.catalog.generation(),
            seen: open.catalog.replication.seen(),
            change,
        })
        .await
    }

    /// The erasures of the stream that are not carried out here.
    pub(super) async fn open_erasures(&self) -> Result<Vec<StreamErasureRecord>, SessionError> {
        self.look(|open| open.catalog.replication.open_erasures())
            .await
    }

    /// Follows the stream once more from a position, and sends all documents again.
    pub(super) async fn begin_anew(&self, from: PositionRecord) -> Result<(), SessionError> {
        self.status.begins_anew();
        self.metrics.feed_restarts.inc();
        let begun = self.writer.ask(move |writer| writer.begin_anew(from));
        begun.await.map_err(|_| stopped())?.map_err(store_error)
    }

    /// Applies messages durably. The last one has the checksum `checksum`.
    pub(super) async fn apply(
        &self,
        stream: u64,
        checksum: u64,
        messages: Vec<ReceivedMessage>,
    ) -> Result<AppliedMessages, SessionError> {
        let applied = self
            .writer
            .ask(move |writer| writer.apply_messages(stream, checksum, &messages));
        applied.await.map_err(|_| stopped())?.map_err(store_error)
    }

    /// Notes that everything is applied that was in the stream when the session began.
    pub(super) async fn note_end_of_stream(&self) -> Result<(), SessionError> {
        let noted = self.writer.ask(|writer| writer.note_end_of_stream());
        noted.await.map_err(|_| stopped())?.map_err(store_error)
    }

    /// Notes that the broker has taken entries, and answers those who wait for them.
    pub(super) async fn note_taken(&self, sent: Vec<SentEntry>) -> Result<(), SessionError> {
        let noted = self.writer.ask(move |writer| writer.note_taken(&sent));
        noted.await.map_err(|_| stopped())
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
}
