//! Applying what the store sends to a namespace and its groups, without keeping requests waiting.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::DocumentId;
use refrain_protocol::document::{DocumentUpdate, FeedDelta, FeedEvent};
use tokio::time::Instant;

use super::namespace::NamespaceReplica;
use super::registry::SharedState;
use crate::config::ReplicaConfig;
use crate::update::DocumentUpdateRef;

/// The side of a namespace that the store writes to. Segments are taken over (`take_over.rs`), and the feed is
/// applied (`namespace_feed.rs`).
#[derive(Clone)]
pub(super) struct Ingest {
    pub(super) namespace: Arc<NamespaceReplica>,
    pub(super) shared: Arc<SharedState>,
}

/// Documents removed under one hold of the lock.
const REMOVED_AT_ONCE: usize = 1024;
/// Longest wait for received documents to be sealed. After that the feed goes on: too much live memory for a while is
/// better than missing documents.
const SEAL_WAIT_MAX: Duration = Duration::from_secs(60);

impl Ingest {
    /// Applies changes of the feed.
    pub(super) async fn apply(&self, delta: FeedDelta) {
        if delta.reset {
            self.reset();
        }
        let mut removed = Vec::new();
        for event in delta.events {
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

    /// Merges an update in parts. Other tasks of this thread, and requests, get the lock in between.
    pub(super) async fn merge(&self, update: &DocumentUpdate) {
        for part in DocumentUpdateRef::from(update).parts() {
            drop(self.namespace.index.building.lock().await);
            self.namespace.merge_received(part);
            tokio::task::yield_now().await;
        }
    }

    /// Removes documents from the namespace and its groups.
    pub(super) fn remove(&self, documents: &[DocumentId]) {
        for documents in documents.chunks(REMOVED_AT_ONCE) {
            self.namespace.write().remove(documents);
            self.shared.groups.remove(self.namespace.id, documents);
        }
    }

    /// As [`remove`](Self::remove), except for documents that a request here emits. A request that begins meanwhile
    /// keeps its text: whether one has begun is looked up under the lock under which the text goes.
    pub(super) fn remove_unless_pinned(&self, documents: &[DocumentId]) {
        for documents in documents.chunks(REMOVED_AT_ONCE) {
            let removed = self.namespace.write().remove_unless_pinned(documents);
            let id = self.namespace.id;
            self.shared.groups.remove_unless_pinned(id, &removed);
        }
    }

    /// Removes all documents but those of requests that run here.
    pub(super) fn reset(&self) {
        self.namespace.is_behind.store(true, Ordering::Relaxed);
        self.namespace.is_mixed.store(false, Ordering::Relaxed);
        self.namespace.write().reset();
        self.shared.groups.reset(self.namespace.id);
    }

    /// Waits until sealing has caught up. A worker that starts receives documents faster than they are sealed, and
    /// the live part takes several times the memory of a segment with the same text.
    pub(super) async fn wait_for_seals(&self) {
        let pause = Duration::from_millis(self.shared.config.upkeep_ms);
        let deadline = Instant::now() + SEAL_WAIT_MAX;
        loop {
            let now = Instant::now();
            if now >= deadline || !self.is_sealing_behind(now.into_std()) {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    }

    fn is_sealing_behind(&self, now: std::time::Instant) -> bool {
        let ReplicaConfig {
            seal_tokens,
            live_tokens_max,
            seal_after_ms,
            ..
        } = self.shared.config;
        let quiet = Duration::from_millis(seal_after_ms);
        let is_crowded = self.shared.live_tokens.load(Ordering::Relaxed) / 2 >= live_tokens_max;
        let index = self.namespace.read();
        let is_full = index.index.live_tokens() / 2 >= seal_tokens;
        let enough = if is_crowded { 1 } else { seal_tokens };
        (is_crowded || is_full) && index.sealable_tokens(now, quiet) >= enough
    }
}
