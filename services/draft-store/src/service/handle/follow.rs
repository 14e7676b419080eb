//! Reads of the feed, and the count of calls that wait for changes.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use refrain_protocol::ApiError;
use refrain_protocol::document::{FeedCursor, FollowReply};
use tokio::sync::OwnedSemaphorePermit;

use crate::reading::feed::{FeedName, FeedRead, read_feed};
use crate::record::DocumentKey;
use crate::service::handle::{DraftStoreHandle, Inner, REPLY_TOKENS_MAX};
use crate::writer::messages::WriterMessage;

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
    pub(super) async fn read_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let reads = self.inner.reads.clone();
        let permit = reads.acquire_owned().await;
        permit.map_err(|_| ApiError::internal("the read semaphore is closed"))
    }

    /// Reads the feed on a blocking thread. Only a few reads run at once, since they share one disk.
    pub(super) async fn read(
        &self,
        feed: FeedName,
        after: FeedCursor,
        tokens_max: u32,
    ) -> Result<FollowReply, ApiError> {
        let permit = self.read_permit().await?;
        let shared = self.inner.shared.clone();
        let tokens_max = tokens_max.min(REPLY_TOKENS_MAX) as usize;
        let read = tokio::task::spawn_blocking(move || {
            let read = read_feed(&shared, &feed, after, tokens_max);
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
