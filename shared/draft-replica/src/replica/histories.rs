//! Earlier outputs to the prompts of running requests, which those draft from: a prompt that returns in another epoch
//! of a training run finds what was said to it before.
//!
//! The namespace has these outputs as well, but between those to all other prompts. There they are found by the last
//! tokens of the prompt, which many prompts share, and their counts are lost among the others. A replica that does
//! not hold the whole namespace lacks them altogether.
//!
//! The newest outputs count, whichever weights sampled them. Their acceptance is learnt apart from that of other
//! drafts, so that outputs of weights that no longer guide lose by what is measured, and by nothing else.
//!
//! A history lives as long as requests of its prompt run here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, RwLockReadGuard};
use refrain_protocol::history::{PromptHash, PromptOutputsRequest};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_suffix_index::IndexConfig;
use tokio::sync::Semaphore;

use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use crate::config::ReplicaConfig;
use crate::metrics::{FAILED, FOUND, NOTHING, REFUSED, ReplicaMetrics};
use crate::update::DocumentUpdateRef;

/// Most calls for histories at once. Further ones wait, and their requests draft without a history meanwhile.
const FETCHES_MAX: usize = 8;

/// Attempts to read a history from which outputs are removed meanwhile.
const ATTEMPTS_MAX: u32 = 3;

/// The earlier outputs to one prompt. It is empty until the draft store has answered.
pub struct PromptHistory {
    index: LockedIndex,
    /// Tokens of all histories together.
    all_tokens: Arc<AtomicU64>,
    tokens: AtomicU64,
}

impl PromptHistory {
    /// The index, shared with other readers. Hold it for microseconds, and not twice in one thread.
    pub fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.drafts.read()
    }

    /// Counts tokens that come, unless they are too many with those of all histories.
    fn takes(&self, tokens: u64, all_tokens_max: u64) -> bool {
        let grown = self
            .all_tokens
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |all| {
                Some(all + tokens).filter(|all| *all <= all_tokens_max)
            });
        if grown.is_ok() {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        grown.is_ok()
    }

    fn clear(&self) {
        self.index.drafts.write().reset();
        let tokens = self.tokens.swap(0, Ordering::Relaxed);
        self.all_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for PromptHistory {
    fn drop(&mut self) {
        let tokens = self.tokens.load(Ordering::Relaxed);
        self.all_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }
}

type HistoryKey = (NamespaceId, PromptHash);

/// The histories of all prompts whose requests run here.
pub(super) struct Histories {
    index: IndexConfig,
    config: ReplicaConfig,
    store: Arc<dyn DraftStore>,
    metrics: ReplicaMetrics,
    /// Those that nobody holds any more are dropped as others come.
    known: Mutex<HashMap<HistoryKey, Weak<PromptHistory>>>,
    fetches: Semaphore,
    all_tokens: Arc<AtomicU64>,
    /// Counts removals, so that a history that was read before one is not kept.
    removals: AtomicU64,
}

impl Histories {
    pub(super) fn new(
        config: ReplicaConfig,
        index: IndexConfig,
        store: Arc<dyn DraftStore>,
        metrics: ReplicaMetrics,
    ) -> Self {
        Histories {
            index,
            config,
            store,
            metrics,
            known: Mutex::default(),
            fetches: Semaphore::new(FETCHES_MAX),
            all_tokens: Arc::default(),
            removals: AtomicU64::new(0),
        }
    }

    /// The history of a prompt, and whether it has just begun, so that it has to be fetched.
    pub(super) fn of(
        &self,
        namespace: NamespaceId,
        prompt: PromptHash,
    ) -> (Arc<PromptHistory>, bool) {
        let mut known = self.known.lock();
        if let Some(history) = known.get(&(namespace, prompt)).and_then(Weak::upgrade) {
            return (history, false);
        }
        known.retain(|_, history| history.strong_count() > 0);
        let history = Arc::new(PromptHistory {
            index: LockedIndex::new(self.index.clone()),
            all_tokens: self.all_tokens.clone(),
            tokens: AtomicU64::new(0),
        });
        known.insert((namespace, prompt), Arc::downgrade(&history));
        (history, true)
    }

    /// Reads a history from the draft store. Nobody waits for it, and a failure costs drafts only.
    pub(super) async fn fetch(
        &self,
        signed: SignedNamespace,
        prompt: PromptHash,
        history: Weak<PromptHistory>,
    ) {
        let fetched = self.fetch_outcome(signed, prompt, &history).await;
        let outcome = fetched.unwrap_or_else(|error| {
            tracing::debug!(%error, "earlier outputs to a prompt cannot be read");
            FAILED
        });
        let fetches = &self.metrics.history_fetches;
        fetches.with_label_values(&[outcome]).inc();
    }

    async fn fetch_outcome(
        &self,
        signed: SignedNamespace,
        prompt: PromptHash,
        history: &Weak<PromptHistory>,
    ) -> Result<&'static str, ApiError> {
        let fetch = self.fetches.acquire().await;
        let _fetch = fetch.map_err(ApiError::internal)?;
        for _ in 0..ATTEMPTS_MAX {
            let removals = self.removals.load(Ordering::SeqCst);
            // Its requests may have ended meanwhile.
            if history.strong_count() == 0 {
                return Ok(NOTHING);
            }
            let request = PromptOutputsRequest {
                namespace: signed.clone(),
                prompt,
                max_outputs: self.config.history_outputs_max,
                max_tokens: self.config.history_tokens_max,
            };
            let outputs = self.store.prompt_outputs(request).await?.updates;
            let Some(history) = history.upgrade() else {
                return Ok(NOTHING);
            };
            if outputs.is_empty() {
                return Ok(NOTHING);
            }
            let tokens = outputs.iter().map(|output| output.tokens.len() as u64);
            if !history.takes(tokens.sum(), self.config.histories_tokens_max) {
                return Ok(REFUSED);
            }
            // The oldest first: the order in which an index offers what it saw equally often.
            for output in outputs.iter().rev() {
                for part in DocumentUpdateRef::from(output).parts() {
                    let merged = history
                        .index
                        .drafts
                        .write()
                        .merge(part, true, Instant::now());
                    merged.map_err(ApiError::internal)?;
                }
                tokio::task::yield_now().await;
            }
            if self.removals.load(Ordering::SeqCst) == removals {
                return Ok(FOUND);
            }
            history.clear();
        }
        Ok(NOTHING)
    }

    /// Removes documents from the histories of a namespace.
    pub(super) fn remove(&self, namespace: NamespaceId, documents: &[DocumentId]) {
        self.removals.fetch_add(1, Ordering::SeqCst);
        for history in self.held(namespace) {
            history.index.drafts.write().remove(documents);
        }
    }

    /// Empties the histories of a namespace.
    pub(super) fn reset(&self, namespace: NamespaceId) {
        self.removals.fetch_add(1, Ordering::SeqCst);
        for history in self.held(namespace) {
            history.clear();
        }
    }

    /// Brings the gauges up to date.
    pub(super) fn observe(&self) {
        let histories = self.known.lock();
        let held = histories
            .values()
            .filter(|history| history.strong_count() > 0);
        self.metrics.histories.set(held.count() as i64);
        let tokens = self.all_tokens.load(Ordering::Relaxed);
        self.metrics.history_tokens.set(tokens as i64);
    }

    fn held(&self, namespace: NamespaceId) -> Vec<Arc<PromptHistory>> {
        let known = self.known.lock();
        let of_namespace = known.iter().filter(|((of, _), _)| *of == namespace);
        of_namespace
            .filter_map(|(_, history)| history.upgrade())
            .collect()
    }
}

#[cfg(test)]
mod tests;
