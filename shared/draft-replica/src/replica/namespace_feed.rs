//! The feed of one namespace: how far it was read, and what its news do.

use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::DocumentId;
use refrain_protocol::document::{FeedCursor, FeedDelta};
use refrain_service_kit::backoff::Backoff;
use tokio::time::Instant;

use super::ingest::Ingest;
use super::moved::has_moved;
use super::take_over::{TakeOverRetry, store_backoff};

/// A namespace that is followed from a position on.
pub(super) struct NamespaceFeed {
    ingest: Ingest,
    pub(super) cursor: FeedCursor,
    /// Documents that were removed during a take-over are drafted from until the feed says so: that comes first.
    is_taken_over: bool,
    retry: TakeOverRetry,
    backoff: Backoff,
}

impl NamespaceFeed {
    /// Takes the namespace over, so that its feed goes on from there.
    pub(super) async fn begin(ingest: Ingest) -> Self {
        let pause = Duration::from_millis(ingest.shared.config.take_over_again_ms);
        let mut feed = NamespaceFeed {
            cursor: FeedCursor::default(),
            is_taken_over: false,
            retry: TakeOverRetry::new(pause, now()),
            backoff: store_backoff(),
            ingest,
        };
        feed.take_over().await;
        feed.retry = TakeOverRetry::new(pause, now());
        feed
    }

    /// The documents that the feed may leave out: requests here write them, and write all of their text.
    pub(super) fn own(&self) -> Vec<DocumentId> {
        self.ingest.namespace.read().begun_here()
    }

    /// Whether an answer is wanted at once, even without news.
    pub(super) fn is_urgent(&self) -> bool {
        self.is_taken_over || self.ingest.namespace.is_behind.load(Ordering::Relaxed)
    }

    /// Whether there is something to do at the end of the feed, even without news.
    pub(super) fn needs_visit(&self) -> bool {
        let lacks_capacity = &self.ingest.namespace.lacks_capacity;
        self.is_urgent() || lacks_capacity.load(Ordering::Relaxed)
    }

    /// Applies changes. Afterwards the feed goes on from its cursor.
    pub(super) async fn apply(&mut self, delta: FeedDelta) {
        let before = self.cursor;
        if delta.reset && before != FeedCursor::default() {
            // The feed from its beginning would bring it all as well, but document by document.
            self.ingest.reset();
            tokio::time::sleep(self.backoff.pause()).await;
            return self.take_over().await;
        }
        self.backoff.reset();
        let has_moved = has_moved(before, &delta);
        let namespace = &self.ingest.namespace;
        namespace.is_mixed.fetch_or(has_moved, Ordering::Relaxed);
        self.cursor = delta.cursor;
        let is_caught_up = delta.caught_up;
        self.ingest.apply(delta).await;
        if has_moved && !self.ingest.drop_unknown().await {
            self.cursor = FeedCursor::default();
        } else if is_caught_up {
            return self.reach_end().await;
        }
        self.wait_for_seals().await;
    }

    /// Does what is due at the end of the feed, where nothing of the namespace is missing.
    pub(super) async fn reach_end(&mut self) {
        self.is_taken_over = false;
        let namespace = &self.ingest.namespace;
        namespace.is_behind.store(false, Ordering::Relaxed);
        if self.ingest.would_fit(&mut self.retry).await {
            self.cursor = self.ingest.take_over_again(self.cursor).await;
            self.retry.record_take_over(now());
            self.is_taken_over = self.cursor != FeedCursor::default();
        }
        self.wait_for_seals().await;
    }

    async fn take_over(&mut self) {
        self.cursor = self.ingest.take_over().await;
        self.is_taken_over = self.cursor != FeedCursor::default();
        self.wait_for_seals().await;
    }

    async fn wait_for_seals(&self) {
        if !self.is_taken_over {
            self.ingest.wait_for_seals().await;
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
