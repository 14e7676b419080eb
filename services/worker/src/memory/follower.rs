//! Follows the draft store's feed of one namespace, and keeps the namespace within its limits.

use std::sync::Arc;
use std::time::Duration;

use refrain_clients::DraftStore;
use refrain_protocol::ErrorKind;
use refrain_protocol::document::{
    DocumentUpdate, FeedCursor, FeedEvent, FollowReply, FollowRequest,
};

use super::NamespaceMemory;
use crate::config::MemoryConfig;
use crate::metrics::WorkerMetrics;

pub(super) struct Follower {
    pub(super) memory: Arc<NamespaceMemory>,
    pub(super) store: Arc<dyn DraftStore>,
    pub(super) config: MemoryConfig,
    pub(super) metrics: WorkerMetrics,
}

/// Tokens merged under one hold of the lock: well under a millisecond.
const MERGE_TOKENS: usize = 512;

impl Follower {
    pub(super) async fn run(self) {
        let mut cursor = FeedCursor::default();
        let mut failures = 0u32;
        loop {
            let request = FollowRequest {
                namespace: self.memory.grant(),
                after: cursor,
                max_tokens: self.config.follow_tokens,
                wait_ms: self.config.follow_wait_ms,
            };
            match self.store.follow(request).await {
                Ok(reply) => {
                    failures = 0;
                    cursor = reply.cursor;
                    self.apply(reply).await;
                    self.maintain().await;
                }
                Err(error) if error.kind == ErrorKind::Unauthorized => {
                    self.metrics.follow_failures.inc();
                    tracing::info!(%error, "namespace is followed again when a request renews it");
                    self.maintain().await;
                    self.memory.renewed.notified().await;
                }
                Err(error) => {
                    self.metrics.follow_failures.inc();
                    tracing::warn!(%error, "the draft store cannot be followed; trying again");
                    // Requests that run here go on filling the index meanwhile.
                    self.maintain().await;
                    failures = (failures + 1).min(6);
                    tokio::time::sleep(Duration::from_millis(50 << failures)).await;
                }
            }
        }
    }

    async fn apply(&self, reply: FollowReply) {
        if reply.reset {
            self.memory.lock().reset();
        }
        let mut gone = Vec::new();
        for event in reply.events {
            match event {
                FeedEvent::Remove(document) => gone.push(document),
                FeedEvent::Update(update) => {
                    if !gone.is_empty() {
                        self.memory.lock().remove(&std::mem::take(&mut gone));
                    }
                    for piece in pieces(update) {
                        self.memory.merge(&piece);
                        // Others on this thread, and the decode loop, come in between.
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
        if !gone.is_empty() {
            self.memory.lock().remove(&gone);
        }
    }

    /// Keeps the limit, and gives dead memory back.
    async fn maintain(&self) {
        let rebuild = {
            let mut drafts = self.memory.lock();
            self.metrics.index_evictions.inc_by(drafts.evict() as u64);
            if !drafts.index.needs_rebuild() {
                return;
            }
            drafts.index.begin_rebuild()
        };
        let rebuilt = match tokio::task::spawn_blocking(move || rebuild.run()).await {
            Ok(rebuilt) => rebuilt,
            Err(error) => {
                tracing::error!(%error, "index rebuild broke off");
                return;
            }
        };
        let retired = rebuilt.and_then(|rebuilt| self.memory.lock().index.finish_rebuild(rebuilt));
        match retired {
            Ok(retired) => drop(tokio::task::spawn_blocking(move || drop(retired))),
            Err(error) => tracing::warn!(%error, "index was not rebuilt"),
        }
    }
}

/// An update in pieces. One without tokens stays whole: it may still shorten.
fn pieces(update: DocumentUpdate) -> Vec<DocumentUpdate> {
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
            finish: update.finish,
        });
        prev_len += tokens.len() as u32;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::DocumentId;
    use refrain_protocol::document::DocumentHead;

    #[test]
    fn long_updates_are_cut_without_loss() {
        let tokens: Vec<u32> = (0..2 * MERGE_TOKENS as u32 + 5).collect();
        let update = DocumentUpdate {
            document: DocumentId(1),
            epoch: 1,
            prev_len: 3,
            tokens: tokens.clone(),
            head: DocumentHead::default(),
            finish: None,
        };
        let pieces = pieces(update);
        let mut joined = Vec::new();
        for piece in &pieces {
            assert!(piece.tokens.len() <= MERGE_TOKENS);
            assert_eq!(piece.prev_len as usize, 3 + joined.len());
            joined.extend_from_slice(&piece.tokens);
        }
        assert_eq!((pieces.len(), joined), (3, tokens));
    }
}
