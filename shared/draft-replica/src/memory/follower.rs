//! Follows the draft store's feed of one namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use refrain_protocol::document::{
    DocumentUpdate, FeedCursor, FeedEvent, FollowReply, FollowRequest,
};
use refrain_protocol::{DocumentId, ErrorKind};
use refrain_rpc::DraftStore;

use super::NamespaceMemory;
use super::groups::Groups;
use super::room::{Retry, Room};
use crate::config::MemoryConfig;
use crate::metrics::MemoryMetrics;

pub(super) struct Follower {
    pub(super) memory: Arc<NamespaceMemory>,
    pub(super) groups: Arc<Groups>,
    /// Tokens of the live parts of all namespaces.
    pub(super) live_tokens: Arc<AtomicU64>,
    pub(super) room: Arc<Room>,
    pub(super) store: Arc<dyn DraftStore>,
    pub(super) config: MemoryConfig,
    pub(super) metrics: MemoryMetrics,
}

/// Tokens merged under one hold of the lock: well under a millisecond.
const MERGE_TOKENS: usize = 512;
/// Documents removed under one hold of the lock.
const REMOVED_AT_ONCE: usize = 1024;
/// How long the feed waits for what it brought to be sealed. Then it goes on: too much live memory for a while is
/// better than documents that are missing.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(60);

impl Follower {
    pub(super) async fn run(self) {
        let mut cursor = self.take_over().await;
        // What was removed while it was taken over is drafted from until the feed says so: that comes first.
        let mut is_taken_over = cursor != FeedCursor::default();
        let mut retry = Retry::new(Instant::now());
        let mut failures = 0u32;
        loop {
            if !is_taken_over {
                self.wait_for_seals().await;
            }
            let request = FollowRequest {
                namespace: self.memory.grant(),
                after: cursor,
                max_tokens: self.config.follow_tokens,
                wait_ms: match is_taken_over {
                    true => 0,
                    false => self.config.follow_wait_ms,
                },
            };
            match self.store.follow(request).await {
                Ok(reply) if reply.reset && cursor != FeedCursor::default() => {
                    // The beginning of the feed would bring it all as well, document by document.
                    self.forget();
                    failures = (failures + 1).min(6);
                    tokio::time::sleep(backoff(failures)).await;
                    cursor = self.take_over().await;
                    is_taken_over = cursor != FeedCursor::default();
                }
                Ok(reply) => {
                    failures = 0;
                    cursor = reply.cursor;
                    let caught_up = reply.caught_up;
                    self.apply(reply).await;
                    if caught_up {
                        is_taken_over = false;
                        self.memory.is_behind.store(false, Ordering::Relaxed);
                        if self.would_fit(&mut retry).await {
                            // Meanwhile the store drafts, as it did for what was left out.
                            cursor = self.take_over_again(cursor).await;
                            retry.taken(Instant::now());
                            is_taken_over = cursor != FeedCursor::default();
                        }
                    }
                }
                Err(error) if error.kind == ErrorKind::Unauthorized => {
                    self.metrics.follow_failures.inc();
                    tracing::info!(%error, "namespace is followed again when a request renews it");
                    self.memory.renewed.notified().await;
                }
                Err(error) => {
                    self.metrics.follow_failures.inc();
                    tracing::warn!(%error, "the draft store cannot be followed; trying again");
                    failures = (failures + 1).min(6);
                    tokio::time::sleep(backoff(failures)).await;
                }
            }
        }
    }

    async fn apply(&self, reply: FollowReply) {
        if reply.reset {
            self.forget();
        }
        let mut gone = Vec::new();
        for event in reply.events {
            match event {
                FeedEvent::Remove(document) => gone.push(document),
                FeedEvent::Update(update) => {
                    self.remove(&std::mem::take(&mut gone));
                    for piece in pieces(update) {
                        self.merge(&piece).await;
                    }
                }
            }
        }
        self.remove(&gone);
    }

    pub(super) async fn merge(&self, piece: &DocumentUpdate) {
        drop(self.memory.drafts.building.lock().await);
        self.memory.merge(piece);
        // Others on this thread, and the decode loop, come in between.
        tokio::task::yield_now().await;
    }

    /// Forgets all but what runs here.
    fn forget(&self) {
        self.memory.is_behind.store(true, Ordering::Relaxed);
        self.memory.lock().reset();
        self.groups.reset(self.memory.id);
    }

    fn remove(&self, documents: &[DocumentId]) {
        for documents in documents.chunks(REMOVED_AT_ONCE) {
            self.memory.lock().remove(documents);
            self.groups.remove(self.memory.id, documents);
        }
    }

    /// A worker that starts hears everything at once, faster than it is sealed: the live part, several times as
    /// large as a segment of the same text, is not to grow with that.
    pub(super) async fn wait_for_seals(&self) {
        let quiet = Duration::from_millis(self.config.seal_after_ms);
        let pause = Duration::from_millis(self.config.upkeep_ms);
        let deadline = Instant::now() + SEAL_WAIT_MAX;
        let is_behind = |now| {
            let MemoryConfig {
                seal_tokens,
                live_tokens_max,
                ..
            } = self.config;
            let is_crowded = self.live_tokens.load(Ordering::Relaxed) / 2 >= live_tokens_max;
            let drafts = self.memory.read();
            let is_full = drafts.index.live_tokens() / 2 >= seal_tokens;
            let enough = if is_crowded { 1 } else { seal_tokens };
            (is_crowded || is_full) && drafts.sealable_tokens(now, quiet) >= enough
        };
        loop {
            let now = Instant::now();
            if now >= deadline || !is_behind(now) {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// How long nothing is asked after so many failures in a row.
pub(super) fn backoff(failures: u32) -> Duration {
    Duration::from_millis(50 << failures.min(6))
}

/// An update in pieces, of which the last one ends the document, if any does. One without tokens stays whole: it may
/// still shorten.
pub(super) fn pieces(update: DocumentUpdate) -> Vec<DocumentUpdate> {
    if update.tokens.len() <= MERGE_TOKENS {
        return vec![update];
    }
    let mut prev_len = update.prev_len;
    let mut pieces = Vec::new();
    for tokens in update.tokens.chunks(MERGE_TOKENS) {
        pieces.push(DocumentUpdate {
            document: update.document,
            epoch: update.epoch,
            prev_len,
            tokens: tokens.to_vec(),
            head: update.head.clone(),
            finish: None,
        });
        prev_len += tokens.len() as u32;
    }
    if let Some(last) = pieces.last_mut() {
        last.finish = update.finish;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::document::{DocumentHead, FinishReason};

    #[test]
    fn long_updates_are_cut_without_loss() {
        let tokens: Vec<u32> = (0..2 * MERGE_TOKENS as u32 + 5).collect();
        let update = DocumentUpdate {
            document: DocumentId(1),
            epoch: 1,
            prev_len: 3,
            tokens: tokens.clone(),
            head: DocumentHead::default(),
            finish: Some(FinishReason::Stop),
        };
        let pieces = pieces(update);
        let mut joined = Vec::new();
        for piece in &pieces {
            assert!(piece.tokens.len() <= MERGE_TOKENS);
            assert_eq!(piece.prev_len as usize, 3 + joined.len());
            joined.extend_from_slice(&piece.tokens);
        }
        assert_eq!((pieces.len(), joined), (3, tokens));
        let ends: Vec<bool> = pieces.iter().map(|piece| piece.finish.is_some()).collect();
        assert_eq!(ends, [false, false, true]);
    }
}
