//! The store for callers: in this process directly, for all others through the HTTP routes.
//!
//! [`DraftStoreHandle`] implements `refrain_rpc::DraftStore` and `refrain_rpc::StoreAdmin`, with a file for each
//! group of calls.

mod admin;
mod append;
mod calls;
mod checks;
mod counted_call;
mod erase;
mod erased_replicas;
mod join;
mod tenants;
mod usage;
mod usage_gateways;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::document::StoreStats;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::mesh::MeshAuth;
use serde::Serialize;
use tokio::sync::{Semaphore, oneshot};

use crate::config::DraftStoreConfig;
use crate::directory::Loss;
use crate::handle::usage_gateways::UsageGateways;
use crate::metrics::StoreMetrics;
use crate::replicas::status::{FeedState, FeedStatus};
use crate::shared_store::SharedStore;
use crate::writer::actor::handle::WriterHandle;

/// Reads from disk that run at once. Others queue, since all share one disk.
const READS_MAX: usize = 4;

/// Most tokens of one answer, whatever the caller asks for.
const REPLY_TOKENS_MAX: u32 = 1 << 20;

/// A handle of the draft store. It is cheap to clone.
#[derive(Clone)]
pub struct DraftStoreHandle {
    inner: Arc<Inner>,
}

struct Inner {
    writer: WriterHandle,
    shared: Arc<SharedStore>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    mesh: MeshAuth,
    /// The state of the feed, if the store is a replica.
    feed: Option<Arc<FeedStatus>>,
    drain: Drain,
    reads: Arc<Semaphore>,
    /// Pulls that may still wait.
    wait_permits: Arc<Semaphore>,
    /// The gateways that send usage.
    usage_gateways: UsageGateways,
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
    /// Pulls that wait for a change.
    pub waiters: i64,
    /// Namespaces that these calls wait for.
    pub namespaces_awaited: usize,
    /// How far the feed is; `None` without a feed.
    pub feed: Option<FeedState>,
}

impl DraftStoreHandle {
    pub(crate) fn new(
        writer: WriterHandle,
        shared: Arc<SharedStore>,
        config: DraftStoreConfig,
        metrics: StoreMetrics,
        mesh: MeshAuth,
        feed: Option<Arc<FeedStatus>>,
    ) -> Self {
        let permits = |most: usize| Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        DraftStoreHandle {
            inner: Arc::new(Inner {
                reads: permits(READS_MAX),
                wait_permits: permits(config.waiters_max),
                writer,
                shared,
                config,
                metrics,
                mesh,
                feed,
                drain: Drain::new(),
                usage_gateways: UsageGateways::default(),
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
            pending_tokens: inner.shared.pending_tokens.load(Ordering::Relaxed),
            waiters: inner.metrics.feed_waiters.get(),
            namespaces_awaited: inner.shared.namespaces_awaited(),
            feed: inner.feed.as_ref().map(|feed| feed.state()),
        }
    }

    /// Whether the store can work. `Err` says why not.
    pub fn readiness(&self) -> Result<(), String> {
        if self.inner.drain.is_draining() {
            return Err("draining".to_owned());
        }
        if !self.inner.writer.is_running() {
            return Err("the writer has stopped; restart the draft store".to_owned());
        }
        if !self.inner.shared.is_open() {
            return Err("the draft store is opening its log".to_owned());
        }
        if let Some(Loss { expected, found }) = self.inner.shared.loss() {
            return Err(format!(
                "the draft store found only {found} of {expected} documents at its start: restore a copy of \
                 data_dir, look into its quarantine-* directories, or confirm the loss (refrain store confirm --loss)"
            ));
        }
        if let (Some(feed), Some(config)) = (&self.inner.feed, &self.inner.config.feed) {
            feed.readiness(config.lag_max)?;
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
        self.inner
            .writer
            .send(move |writer, _| writer.close_soon(reply));
        let _ = closed.await;
    }

    pub(super) fn enter(&self) -> Result<refrain_service_kit::drain::InFlight, ApiError> {
        self.inner.drain.enter().ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unavailable,
                "the draft store is shutting down; retry after its restart",
            )
            .with_retry_after_ms(1_000)
        })
    }
}
