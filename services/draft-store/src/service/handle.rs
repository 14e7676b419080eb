//! The store for callers: in this process directly, for all others through the HTTP routes.

mod acceptance_statistics;
mod admin;
mod append;
mod checks;
mod erase;
mod follow;
mod groups;
mod lookup;
mod segments;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::Recipient;
use actix::prelude::SendError;
use async_trait::async_trait;
use refrain_protocol::chances::{ChancesReply, ChancesRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, FetchGroupsReply, FetchGroupsRequest, FollowReply, FollowRequest,
    RegisterGroupRequest, StoreStats, TouchRequest,
};
use refrain_protocol::lookup::{LookupReply, LookupRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::DraftStore;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::mesh::MeshAuth;
use serde::Serialize;
use tokio::sync::{Semaphore, oneshot};

use crate::config::DraftStoreConfig;
use crate::directory::Loss;
use crate::metrics::{Limit, StoreMetrics};
use crate::reading::feed::FeedName;
use crate::reading::lookup::LookupViews;
use crate::record::DocumentKey;
use crate::service::handle::checks::overloaded;
use crate::service::handle::follow::Waiter;
use crate::shared_store::{SharedStore, unavailable};
use crate::writer::messages::WriterMessage;
use crate::writer::requests::{Append, UpdateAuthor};

/// Reads from disk that run at once. Others queue, since all share one disk.
const READS_MAX: usize = 4;

/// Longest wait of `follow`, whatever the caller asks for.
const FOLLOW_WAIT_MS_MAX: u32 = 30_000;

/// Most tokens of one answer, whatever the caller asks for.
pub(super) const REPLY_TOKENS_MAX: u32 = 1 << 20;

/// A handle of the draft store. It is cheap to clone.
#[derive(Clone)]
pub struct DraftStoreHandle {
    inner: Arc<Inner>,
}

struct Inner {
    writer: Recipient<WriterMessage>,
    shared: Arc<SharedStore>,
    lookup_views: Arc<LookupViews>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    mesh: MeshAuth,
    drain: Drain,
    pending_tokens: Arc<AtomicU64>,
    waiters: AtomicI64,
    reads: Arc<Semaphore>,
    /// Look-ups that may still start.
    lookup_permits: Arc<Semaphore>,
    /// Only one erasure runs at a time.
    erasing: tokio::sync::Mutex<()>,
}

/// The state of the store, for debugging.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StoreState {
    /// Whether the log is open.
    pub open: bool,
    /// Whether the store accepts no new calls.
    pub draining: bool,
    /// The statistics of the store.
    pub stats: StoreStats,
    /// Tokens that wait for a commit.
    pub pending_tokens: u64,
    /// Calls of `follow` that wait for a change.
    pub waiters: i64,
    /// Namespaces that these calls wait for.
    pub namespaces_awaited: usize,
}

impl DraftStoreHandle {
    pub(crate) fn new(
        writer: Recipient<WriterMessage>,
        shared: Arc<SharedStore>,
        lookup_views: Arc<LookupViews>,
        config: DraftStoreConfig,
        metrics: StoreMetrics,
        mesh: MeshAuth,
        pending_tokens: Arc<AtomicU64>,
    ) -> Self {
        let reads = Arc::new(Semaphore::new(READS_MAX));
        let lookup_permits = Arc::new(Semaphore::new(config.lookups_max));
        DraftStoreHandle {
            inner: Arc::new(Inner {
                writer,
                shared,
                lookup_views,
                config,
                metrics,
                mesh,
                drain: Drain::new(),
                pending_tokens,
                waiters: AtomicI64::new(0),
                reads,
                lookup_permits,
                erasing: tokio::sync::Mutex::new(()),
            }),
        }
    }

    /// The state of the store.
    pub fn observe(&self) -> StoreState {
        let inner = &*self.inner;
        StoreState {
            open: inner.shared.is_open(),
            draining: inner.drain.is_draining(),
            stats: inner.shared.stats(),
            pending_tokens: inner.pending_tokens.load(Ordering::Relaxed),
            waiters: inner.waiters.load(Ordering::Relaxed),
            namespaces_awaited: inner.shared.namespaces_awaited(),
        }
    }

    /// Whether the store can work. `Err` says why not.
    pub fn readiness(&self) -> Result<(), String> {
        if self.inner.drain.is_draining() {
            return Err("draining".to_owned());
        }
        if !self.inner.writer.connected() {
            return Err("the writer has stopped; restart the draft store".to_owned());
        }
        if !self.inner.shared.is_open() {
            return Err("the draft store is opening its log".to_owned());
        }
        if let Some(Loss { expected, found }) = self.inner.shared.loss() {
            return Err(format!(
                "the store came up with {found} of {expected} documents: put back a copy of data_dir, look at what is \
                 in its quarantine-* folders, or confirm the loss (refrain store confirm --loss)"
            ));
        }
        self.inner.mesh.clocks().readiness()
    }

    /// Accepts no new calls, releases waiting ones, and lets running ones finish.
    pub(crate) async fn drain(&self, grace: Duration) {
        self.inner.drain.begin();
        let left = self.inner.drain.finished(grace).await;
        if left > 0 {
            tracing::warn!(
                left,
                "draft store calls were cut off at the end of the grace period"
            );
        }
    }

    /// Commits what waits, and closes the log.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        // The last message must arrive: the mailbox takes it even when it is full.
        self.inner.writer.do_send(WriterMessage::Close(reply));
        let _ = closed.await;
    }

    fn enter(&self) -> Result<refrain_service_kit::drain::Running, ApiError> {
        self.inner.drain.enter().ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unavailable,
                "the draft store is shutting down; retry after its restart",
            )
            .with_retry_after_ms(1_000)
        })
    }

    fn send(&self, call: WriterMessage) -> Result<(), ApiError> {
        self.inner
            .writer
            .try_send(call)
            .map_err(|error| match error {
                SendError::Full(_) => self.reject(
                    Limit::Mailbox,
                    overloaded("the writer's mailbox is full; retry", Limit::Mailbox),
                ),
                SendError::Closed(_) => unavailable().with_detail("the writer has stopped"),
            })
    }
}

#[async_trait]
impl DraftStore for DraftStoreHandle {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        self.check(&request.namespace.namespace, &request.updates)?;
        self.store(Append {
            namespace,
            names: request.namespace.namespace,
            updates: request.updates,
            author: UpdateAuthor::Worker,
        })
        .await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let namespace = inner.mesh.verify(&request.namespace)?;
        let wait_ms = request.wait_ms.min(FOLLOW_WAIT_MS_MAX);
        let deadline = Instant::now() + Duration::from_millis(u64::from(wait_ms));
        let feed = FeedName::Namespace(namespace);
        let read = || self.read(feed.clone(), request.after, request.max_tokens);
        if wait_ms == 0 {
            return read().await;
        }
        // Subscribe before the first read, so that no change falls between the read and the wait.
        let mut changes = inner.shared.subscribe(namespace);
        let mut waiter = None;
        loop {
            let reply = read().await?;
            let left = deadline.saturating_duration_since(Instant::now());
            let news = reply.reset || !reply.events.is_empty() || !reply.caught_up;
            if news || left.is_zero() || inner.drain.is_draining() {
                return Ok(reply);
            }
            if waiter.is_none() {
                waiter = Waiter::enter(inner);
                if waiter.is_none() {
                    let error = overloaded("too many calls of follow wait", Limit::Waiters);
                    return Err(self.reject(Limit::Waiters, error));
                }
            }
            // Whatever ends the wait, the next read finds out.
            tokio::select! {
                () = changes.changed() => {}
                () = inner.drain.begun() => {}
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        if request.documents.len() > self.inner.config.tuning.updates_max {
            let message = format!(
                "more than {} documents in one call",
                self.inner.config.tuning.updates_max
            );
            return Err(self.reject(Limit::Updates, ApiError::new(ErrorKind::TooLarge, message)));
        }
        let unique: HashSet<DocumentKey> = request
            .documents
            .iter()
            .map(|document| DocumentKey {
                namespace,
                document: *document,
            })
            .collect();
        self.send(WriterMessage::Touch(unique.into_iter().collect()))
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.register(request).await
    }

    async fn fetch_cst(&self, request: FetchGroupsRequest) -> Result<FetchGroupsReply, ApiError> {
        self.fetch(request).await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(self.inner.shared.stats())
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.list_segments(request).await
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.read_piece(request).await
    }

    async fn lookup(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        self.look_up(request).await
    }

    async fn chances(&self, request: ChancesRequest) -> Result<ChancesReply, ApiError> {
        self.exchange_statistics(request).await
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.read_documents(request).await
    }
}
