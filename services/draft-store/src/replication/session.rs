//! Sessions with the broker, one after the other for as long as the store runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::stream::Stream;
use refrain_protocol::{ApiError, NamespaceId};
use refrain_service_kit::backoff::Backoff;
use tokio::sync::watch;

use crate::config::FeedConfig;
use crate::message::{StreamChange, StreamMessage};
use crate::metrics::StoreMetrics;
use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::replication::erasures::carry_out;
use crate::replication::follow::follow;
use crate::replication::join::join;
use crate::replication::publish::{publish, start_stream};
use crate::replication::status::FeedStatus;
use crate::replication::stream::{Connection, SessionError, check_position, created};
use crate::service::DraftStoreHandle;
use crate::shared_store::SharedStore;
use crate::writer::handle::WriterHandle;
use crate::writer::replication::{ReceivedMessage, SentEntry};

/// Pauses between sessions.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);

/// What a session works with.
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

/// Runs sessions until `stop` says so.
pub(crate) async fn run(session: Arc<Session>, mut stop: watch::Receiver<bool>) {
    let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST);
    loop {
        let began = tokio::time::Instant::now();
        let ended = tokio::select! {
            ended = one(&session) => ended,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        session.metrics.feed_connected.set(0);
        session.metrics.feed_sessions.inc();
        match &ended {
            SessionError::Operator(error) | SessionError::Missed(error) => {
                tracing::error!(%error, "draft store cannot follow its stream");
            }
            error => tracing::warn!(%error, "draft store lost its stream"),
        }
        session.status.disconnected(ended.to_string());
        if began.elapsed() > PAUSE_LONGEST {
            backoff.reset();
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// One session. It ends by an error.
async fn one(session: &Arc<Session>) -> SessionError {
    let mut connection = match Connection::open(&session.feed).await {
        Ok(connection) => connection,
        Err(error) => return error,
    };
    let ended = within(session, &mut connection).await;
    connection.close().await;
    match ended {
        Ok(()) => SessionError::Broker("the session ended".into()),
        Err(error) => error,
    }
}

async fn within(session: &Arc<Session>, connection: &mut Connection) -> Result<(), SessionError> {
    if !session.shared.is_open() {
        return Err(SessionError::Store("it is opening its log".into()));
    }
    let stream = connection.stream(&session.feed).await?;
    let info = stream
        .get_info()
        .await
        .map_err(|error| SessionError::broker("the stream cannot be opened", error))?;
    if info.state.last_sequence == 0 {
        start_stream(session, &connection.context).await?;
    }
    let mut position = session.position();
    let mut checked = check_position(position, &info);
    let last = info.state.last_sequence;
    let is_missed = matches!(checked, Err(SessionError::Missed(_)));
    // One that has nothing yet takes over sooner than the stream would give it everything.
    let is_new = position.sequence == 0 && session.is_empty() && last > session.feed.lag_max;
    if !session.feed.peers.is_empty() && (is_missed || is_new) {
        let first = info.state.first_sequence;
        match join(session, created(&info), first).await {
            Ok(joined) => {
                position = joined;
                checked = check_position(position, &info);
            }
            // The stream has everything, it only takes longer.
            Err(error) if is_new && !is_missed => {
                tracing::warn!(%error, "draft store reads the stream from its beginning");
            }
            Err(error) => return Err(error),
        }
    }
    let until = checked?;
    session.status.connected(position.sequence, until);
    session.metrics.feed_connected.set(1);
    tracing::info!(
        stream = info.config.name,
        from = position.sequence,
        until,
        "draft store follows its stream"
    );
    let (tell, mut caught_up) = watch::channel(false);
    let context = connection.context.clone();
    let send = async {
        // Before that it might send what others have erased.
        let _ = caught_up.wait_for(|caught_up| *caught_up).await;
        publish(session, &context).await
    };
    tokio::select! {
        ended = follow(session, &stream, created(&info), until, tell) => ended,
        ended = send => ended,
        () = retry_erasures(session, &stream) => Ok(()),
        lost = connection.lost() => Err(lost),
    }
}

/// Begins erasures again that could not be completed. It never ends by itself.
async fn retry_erasures(session: &Arc<Session>, stream: &Stream) {
    loop {
        tokio::time::sleep(PAUSE_LONGEST).await;
        session.carry_out_erasures(stream);
    }
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
    fn is_empty(&self) -> bool {
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

    /// Begins to carry out the erasures of the stream that are open, unless that is going on.
    pub(super) fn carry_out_erasures(self: &Arc<Self>, stream: &Stream) {
        let open = self.open_erasures();
        if open.is_empty() || self.is_erasing.swap(true, Ordering::Relaxed) {
            return;
        }
        let (session, stream) = (self.clone(), stream.clone());
        tokio::spawn(async move {
            for erasure in open {
                if let Err(error) = carry_out(&session, &stream, erasure).await {
                    tracing::warn!(%error, "draft store erasure of the stream is not complete; it is tried again");
                }
            }
            session.is_erasing.store(false, Ordering::Relaxed);
        });
    }
}
