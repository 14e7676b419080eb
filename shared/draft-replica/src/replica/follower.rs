//! Following the draft store's feed of one namespace.

use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::document::{FeedCursor, FeedEvent, FollowReply, FollowRequest};
use refrain_protocol::error::code;
use refrain_protocol::{DocumentId, ErrorKind};
use tokio::time::Instant;

use super::ingest::Ingest;
use super::moved::has_moved;
use super::registry::SharedState;
use super::take_over::{TakeOverRetry, store_backoff};

/// Most documents that a call names as the reader's own. Further ones come back with the feed.
const OWN_DOCUMENTS_MAX: usize = 1_024;

impl Ingest {
    /// Keeps the namespace up to date until it is aborted.
    pub(super) async fn follow(self) {
        let Ingest { namespace, shared } = &self;
        let SharedState {
            config,
            store,
            metrics,
            ..
        } = &**shared;
        let mut cursor = self.take_over().await;
        // Documents that were removed during the take-over are drafted from until the feed says so: that comes first.
        let mut is_taken_over = cursor != FeedCursor::default();
        let pause = Duration::from_millis(config.take_over_again_ms);
        let mut retry = TakeOverRetry::new(pause, now());
        let mut backoff = store_backoff();
        let mut outage = Outage::default();
        loop {
            if !is_taken_over {
                self.wait_for_seals().await;
            }
            let request = FollowRequest {
                namespace: namespace.signed(),
                after: cursor,
                own: self.own_documents(),
                max_tokens: config.follow_tokens,
                wait_ms: match is_taken_over {
                    true => 0,
                    false => config.follow_wait_ms,
                },
            };
            match store.follow(request).await {
                Ok(reply) if reply.reset && cursor != FeedCursor::default() => {
                    // The feed from its beginning would bring it all as well, but document by document.
                    self.reset();
                    tokio::time::sleep(backoff.pause()).await;
                    cursor = self.take_over().await;
                    is_taken_over = cursor != FeedCursor::default();
                }
                Ok(reply) => {
                    backoff.reset();
                    if outage.end() {
                        tracing::info!("the draft store is followed again");
                    }
                    let has_moved = has_moved(cursor, &reply);
                    namespace.is_mixed.fetch_or(has_moved, Ordering::Relaxed);
                    cursor = reply.cursor;
                    let is_caught_up = reply.caught_up;
                    self.apply(reply).await;
                    if has_moved && !self.drop_unknown().await {
                        cursor = FeedCursor::default();
                        continue;
                    }
                    if is_caught_up {
                        is_taken_over = false;
                        namespace.is_behind.store(false, Ordering::Relaxed);
                        if self.would_fit(&mut retry).await {
                            cursor = self.take_over_again(cursor).await;
                            retry.record_take_over(now());
                            is_taken_over = cursor != FeedCursor::default();
                        }
                    }
                }
                Err(error)
                    if error.kind == ErrorKind::Unauthorized
                        && !error.has_code(code::CREDENTIAL_REFUSED) =>
                {
                    metrics.follow_failures.inc();
                    tracing::info!(
                        %error,
                        "the namespace is followed again when a request brings a newer signature"
                    );
                    namespace.renewed.notified().await;
                }
                Err(error) => {
                    metrics.follow_failures.inc();
                    if outage.is_news(error.kind) {
                        tracing::warn!(
                            %error,
                            "the draft store cannot be followed; it is asked again, with growing pauses"
                        );
                    }
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    /// The documents that the feed may leave out: requests here write them, and write all of their text.
    fn own_documents(&self) -> Vec<DocumentId> {
        let mut own = self.namespace.read().begun_here();
        own.truncate(OWN_DOCUMENTS_MAX);
        own
    }

    /// Applies a reply of the feed.
    async fn apply(&self, reply: FollowReply) {
        if reply.reset {
            self.reset();
        }
        let mut removed = Vec::new();
        for event in reply.events {
            match event {
                FeedEvent::Remove(document) => removed.push(document),
                FeedEvent::Update(update) => {
                    self.remove(&std::mem::take(&mut removed));
                    self.merge(&update).await;
                }
            }
        }
        self.remove(&removed);
    }
}

/// Which failures of calls have been logged: each outage once, not every retry.
#[derive(Default)]
struct Outage {
    is_logged: bool,
    is_refusal_logged: bool,
}

impl Outage {
    /// Notes a failed call. Returns whether it is to be logged.
    ///
    /// A store that is full of waiting followers refuses this one whenever there is no news, and answers it where
    /// there is. Refusals are then the normal case, so only the first one of a follower is logged.
    fn is_news(&mut self, kind: ErrorKind) -> bool {
        let was_logged = match kind {
            ErrorKind::Overloaded => &mut self.is_refusal_logged,
            _ => &mut self.is_logged,
        };
        !std::mem::replace(was_logged, true)
    }

    /// Notes a call that succeeded. Returns whether an outage has ended with it.
    fn end(&mut self) -> bool {
        std::mem::take(&mut self.is_logged)
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests;
