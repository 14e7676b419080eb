//! The store for callers: in this process directly, for all others behind the HTTP routes.

mod admin;
mod chances;
mod erase;
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
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentUpdate, FeedCursor, FetchGroupsReply, FetchGroupsRequest,
    FollowReply, FollowRequest, RegisterGroupRequest, StoreStats, TouchRequest,
};
use refrain_protocol::lookup::{LookupReply, LookupRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::{ApiError, ErrorKind, Namespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::mesh::MeshAuth;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::config::DraftStoreConfig;
use crate::directory::Loss;
use crate::metrics::{Limit, StoreMetrics};
use crate::record::DocumentKey;
use crate::shared::{FeedName, FeedRead, Shared, unavailable};
use crate::writer::call::{Call, PendingTokens};
use crate::writer::{Append, By};

/// Longest session or group name, and part of a namespace's name: they are stored in one small record.
const NAME_BYTES_MAX: usize = 512;

/// The draft store. Cheap to clone.
#[derive(Clone)]
pub struct DraftStoreHandle {
    inner: Arc<Inner>,
}

struct Inner {
    writer: Recipient<Call>,
    shared: Arc<Shared>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    mesh: MeshAuth,
    drain: Drain,
    pending_tokens: Arc<AtomicU64>,
    waiters: AtomicI64,
    reads: Arc<Semaphore>,
    /// Calls for drafts that may still begin.
    lookup_permits: Arc<Semaphore>,
    /// One erasure at a time.
    erasing: tokio::sync::Mutex<()>,
}

/// What the store is doing, for people.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StoreState {
    /// Whether the log is open.
    pub open: bool,
    /// Whether it takes no new work.
    pub draining: bool,
    /// The store in numbers.
    pub stats: StoreStats,
    /// Tokens that wait for a commit.
    pub pending_tokens: u64,
    /// Calls of `follow` that wait for a change.
    pub waiters: i64,
    /// Namespaces that they wait for.
    pub namespaces_awaited: usize,
}

fn overloaded(what: &str, limit: Limit) -> ApiError {
    ApiError::new(
        ErrorKind::Overloaded,
        format!("{what} ({})", limit.as_str()),
    )
    .with_retry_after_ms(100)
}

impl DraftStoreHandle {
    pub(crate) fn new(
        writer: Recipient<Call>,
        shared: Arc<Shared>,
        config: DraftStoreConfig,
        metrics: StoreMetrics,
        mesh: MeshAuth,
        pending_tokens: Arc<AtomicU64>,
    ) -> Self {
        let reads = Arc::new(Semaphore::new(config.reads_max));
        let lookup_permits = Arc::new(Semaphore::new(config.lookups_max));
        DraftStoreHandle {
            inner: Arc::new(Inner {
                writer,
                shared,
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

    /// What the store is doing.
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

    /// Whether it can take work; `Err` says why not.
    pub fn readiness(&self) -> Result<(), String> {
        if self.inner.drain.is_draining() {
            return Err("draining".to_owned());
        }
        if !self.inner.writer.connected() {
            return Err("the writer is gone".to_owned());
        }
        if !self.inner.shared.is_open() {
            return Err("the log is being opened".to_owned());
        }
        if let Some(Loss { expected, found }) = self.inner.shared.loss() {
            return Err(format!(
                "the store came up with {found} of {expected} documents: put back a copy of data_dir, look at what is \
                 in its quarantine-* folders, or confirm the loss (refrain store confirm --loss)"
            ));
        }
        self.inner.mesh.clocks().readiness()
    }

    /// Takes nothing new, releases who waits, and lets what runs finish.
    pub(crate) async fn drain(&self, grace: Duration) {
        self.inner.drain.begin();
        let left = self.inner.drain.finished(grace).await;
        if left > 0 {
            tracing::warn!(
                left,
                "draft store calls cut off by the end of the grace period"
            );
        }
    }

    /// Commits what waits and closes the log.
    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        // Nothing is refusable about the end: the mailbox takes it even when it is full.
        self.inner.writer.do_send(Call::Close(reply));
        let _ = closed.await;
    }

    fn enter(&self) -> Result<refrain_service_kit::drain::InFlight, ApiError> {
        self.inner.drain.enter().ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unavailable,
                "the draft store is draining; try another",
            )
            .with_retry_after_ms(1_000)
        })
    }

    fn reject(&self, limit: Limit, error: ApiError) -> ApiError {
        self.inner.metrics.reject(limit);
        error
    }

    fn send(&self, call: Call) -> Result<(), ApiError> {
        self.inner
            .writer
            .try_send(call)
            .map_err(|error| match error {
                SendError::Full(_) => self.reject(
                    Limit::Mailbox,
                    overloaded("the writer is busy", Limit::Mailbox),
                ),
                SendError::Closed(_) => unavailable().with_detail("the writer is gone"),
            })
    }

    /// Checks what no retry can make right.
    fn check(&self, names: &Namespace, updates: &[DocumentUpdate]) -> Result<(), ApiError> {
        let config = &self.inner.config;
        if updates.len() > config.updates_max {
            let message = format!("more than {} updates in one call", config.updates_max);
            return Err(self.reject(Limit::Updates, ApiError::new(ErrorKind::TooLarge, message)));
        }
        for part in [&names.tenant, &names.model, &names.tokenizer] {
            self.check_name("namespace", part)?;
        }
        for update in updates {
            self.check_update(update)?;
        }
        Ok(())
    }

    fn check_update(&self, update: &DocumentUpdate) -> Result<(), ApiError> {
        let end = u64::from(update.prev_len) + update.tokens.len() as u64;
        let most = self.inner.config.document_tokens_max;
        if end > u64::from(most) {
            let message = format!("document {} has more than {most} tokens", update.document);
            return Err(self.reject(
                Limit::DocumentTokens,
                ApiError::new(ErrorKind::TooLarge, message),
            ));
        }
        for name in [&update.head.session, &update.head.group]
            .into_iter()
            .flatten()
        {
            self.check_name("head", name)?;
        }
        Ok(())
    }

    fn check_name(&self, param: &str, name: &str) -> Result<(), ApiError> {
        if name.len() <= NAME_BYTES_MAX {
            return Ok(());
        }
        let message = format!("a name in {param} is longer than {NAME_BYTES_MAX} bytes");
        Err(self.reject(Limit::Head, ApiError::invalid(param, message)))
    }

    async fn read_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let reads = self.inner.reads.clone();
        let permit = reads.acquire_owned().await;
        permit.map_err(|_| ApiError::internal("the semaphore of reads is closed"))
    }

    /// Has checked updates stored, and waits until they are durable.
    async fn store(&self, append: Append) -> Result<AppendReply, ApiError> {
        let count = append
            .updates
            .iter()
            .map(|update| update.tokens.len() as u64)
            .sum();
        let most = self.inner.config.pending_tokens_max;
        let Some(tokens) = PendingTokens::claim(&self.inner.pending_tokens, count, most) else {
            let error = overloaded("too many tokens wait for the disk", Limit::PendingTokens);
            return Err(self.reject(Limit::PendingTokens, error));
        };
        let (reply, answer) = oneshot::channel();
        self.send(Call::Append {
            append,
            tokens,
            reply,
        })?;
        let wait = Duration::from_millis(self.inner.config.commit_wait_ms_max);
        match tokio::time::timeout(wait, answer).await {
            Ok(Ok(lengths)) => Ok(AppendReply { lengths: lengths? }),
            Ok(Err(_)) => Err(unavailable().with_detail("the writer dropped the call")),
            Err(_) => Err(ApiError::new(
                ErrorKind::Timeout,
                "the disk is slow; the updates may be stored, repeats are harmless",
            )
            .with_retry_after_ms(1_000)),
        }
    }

    /// Reads the feed off the async threads; a few at a time, since they share one disk.
    async fn read(
        &self,
        feed: FeedName,
        after: FeedCursor,
        tokens_max: u32,
    ) -> Result<FollowReply, ApiError> {
        let permit = self.read_permit().await?;
        let shared = self.inner.shared.clone();
        let tokens_max = tokens_max.min(self.inner.config.follow_tokens_max) as usize;
        let read = tokio::task::spawn_blocking(move || {
            let read = shared.read_feed(&feed, after, tokens_max);
            drop(permit);
            read
        });
        let FeedRead { reply, damaged } = read.await.map_err(ApiError::internal)??;
        self.report(damaged);
        Ok(reply)
    }

    /// Has documents removed that a reader found damaged.
    fn report(&self, damaged: HashSet<DocumentKey>) {
        if !damaged.is_empty() {
            // Refused by a full mailbox, it is found again by the next reader.
            let _ = self
                .inner
                .writer
                .try_send(Call::Forget(damaged.into_iter().collect()));
        }
    }
}

/// Counts a waiting call while it lives.
struct Waiter<'a> {
    inner: &'a Inner,
}

impl<'a> Waiter<'a> {
    fn enter(inner: &'a Inner) -> Option<Self> {
        let waiter = Waiter { inner };
        let before = inner.waiters.fetch_add(1, Ordering::Relaxed);
        inner.metrics.feed_waiters.inc();
        let most = i64::try_from(inner.config.waiters_max).unwrap_or(i64::MAX);
        (before < most).then_some(waiter)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.inner.waiters.fetch_sub(1, Ordering::Relaxed);
        self.inner.metrics.feed_waiters.dec();
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
            by: By::Worker,
        })
        .await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let namespace = inner.mesh.verify(&request.namespace)?;
        let wait_ms = request.wait_ms.min(inner.config.follow_wait_ms_max);
        let deadline = Instant::now() + Duration::from_millis(u64::from(wait_ms));
        let feed = FeedName::Namespace(namespace);
        let read = || self.read(feed.clone(), request.after, request.max_tokens);
        if wait_ms == 0 {
            return read().await;
        }
        // Before the first look, so that no change falls between the look and the wait.
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
                    let error = overloaded("too many followers wait", Limit::Waiters);
                    return Err(self.reject(Limit::Waiters, error));
                }
            }
            // Whichever it is, the next look tells.
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
        if request.documents.len() > self.inner.config.updates_max {
            let message = format!(
                "more than {} documents in one call",
                self.inner.config.updates_max
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
        self.send(Call::Touch(unique.into_iter().collect()))
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.register(request).await
    }

    async fn fetch_groups(
        &self,
        request: FetchGroupsRequest,
    ) -> Result<FetchGroupsReply, ApiError> {
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

    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        self.exchange(request).await
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.read_documents(request).await
    }
}
