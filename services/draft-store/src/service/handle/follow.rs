//! Reads of the feed, and the count of calls that wait for changes.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use refrain_protocol::document::{FeedCursor, FollowReply, FollowRequest};
use refrain_protocol::{ApiError, NamespaceId};
use tokio::sync::OwnedSemaphorePermit;

use crate::metrics::Limit;
use crate::reading::feed::{FeedRead, read_feed};
use crate::record::DocumentKey;
use crate::service::handle::checks::overloaded;
use crate::service::handle::{DraftStoreHandle, Inner, REPLY_TOKENS_MAX};
use crate::writer::messages::WriterMessage;

/// Longest wait of `follow`, whatever the caller asks for.
const FOLLOW_WAIT_MS_MAX: u32 = 30_000;

/// Counts a waiting call while it exists.
pub(super) struct Waiter<'a> {
    inner: &'a Inner,
}

impl<'a> Waiter<'a> {
    pub(super) fn enter(inner: &'a Inner) -> Option<Self> {
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

impl DraftStoreHandle {
    /// Reads the changes of a namespace, and waits for one if there is none.
    pub(super) async fn follow_namespace(
        &self,
        request: FollowRequest,
    ) -> Result<FollowReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let namespace = inner.mesh.verify(&request.namespace)?;
        let wait_ms = request.wait_ms.min(FOLLOW_WAIT_MS_MAX);
        let deadline = Instant::now() + Duration::from_millis(u64::from(wait_ms));
        let read = || self.read(namespace, request.after, request.max_tokens);
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

    pub(super) async fn read_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let reads = self.inner.reads.clone();
        let permit = reads.acquire_owned().await;
        permit.map_err(|_| ApiError::internal("the read semaphore is closed"))
    }

    /// Reads the feed on a blocking thread. Only a few reads run at once, since they share one disk.
    pub(super) async fn read(
        &self,
        namespace: NamespaceId,
        after: FeedCursor,
        tokens_max: u32,
    ) -> Result<FollowReply, ApiError> {
        let permit = self.read_permit().await?;
        let shared = self.inner.shared.clone();
        let tokens_max = tokens_max.min(REPLY_TOKENS_MAX) as usize;
        let read = tokio::task::spawn_blocking(move || {
            let read = read_feed(&shared, namespace, after, tokens_max);
            drop(permit);
            read
        });
        let FeedRead { reply, damaged } = read.await.map_err(ApiError::internal)??;
        self.report(damaged);
        Ok(reply)
    }

    /// Asks the writer to remove documents that a reader found damaged.
    pub(super) fn report(&self, damaged: HashSet<DocumentKey>) {
        if !damaged.is_empty() {
            // If the mailbox is full, the next reader finds the damage again.
            let _ = self
                .inner
                .writer
                .try_send(WriterMessage::Forget(damaged.into_iter().collect()));
        }
    }
}
