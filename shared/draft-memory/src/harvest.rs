//! Outputs on their way to the draft store: gathered as they grow, sent in batches, sent again until they
//! are acknowledged. The decode loop never waits for any of it.

mod gathered;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use refrain_clients::DraftStore;
use refrain_protocol::document::{AppendRequest, DocumentUpdate};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId, SignedNamespace};
use tokio::sync::Notify;

use crate::config::HarvestConfig;
use crate::harvest::gathered::Gathered;
use crate::metrics::HarvestMetrics;

/// The handle: the decode loop pushes, a task sends.
#[derive(Clone)]
pub struct Harvest {
    inner: Arc<HarvestInner>,
}

struct HarvestInner {
    gathered: Mutex<Gathered>,
    config: HarvestConfig,
    metrics: HarvestMetrics,
    flushed: Notify,
}

impl Harvest {
    /// Starts the task that sends.
    pub fn start(
        config: HarvestConfig,
        store: Arc<dyn DraftStore>,
        metrics: HarvestMetrics,
    ) -> Self {
        let harvest = Harvest {
            inner: Arc::new(HarvestInner {
                gathered: Mutex::default(),
                config,
                metrics,
                flushed: Notify::new(),
            }),
        };
        // The task holds a weak reference: it ends with the worker.
        let weak = Arc::downgrade(&harvest.inner);
        tokio::spawn(async move {
            let mut failures = 0u32;
            while let Some(inner) = weak.upgrade() {
                failures = if inner.flush(&*store).await {
                    0
                } else {
                    failures + 1
                };
                let wait_ms = (inner.config.interval_ms << failures.min(6))
                    .min(5_000.max(inner.config.interval_ms));
                drop(inner);
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            }
        });
        harvest
    }

    /// Takes a piece of an output, or its end.
    pub fn push(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdate,
    ) {
        self.inner
            .gather(|gathered| gathered.push(namespace_id, namespace, update));
    }

    /// Takes over an output that somebody else began, before the first piece that comes from here: `update` holds
    /// all of it so far.
    pub fn adopt(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdate,
    ) {
        self.inner
            .gather(|gathered| gathered.adopt(namespace_id, namespace, update));
    }

    /// Notes that a document's draft was accepted.
    pub fn touch(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        document: DocumentId,
    ) {
        self.inner.lock().touch(namespace_id, namespace, document);
    }

    /// Nothing more comes of a document here.
    pub fn release(&self, namespace_id: NamespaceId, document: DocumentId) {
        self.inner.lock().release(namespace_id, document);
    }

    /// Waits until the store has everything, at most `grace`. Returns whether it has.
    pub async fn drain(&self, grace: Duration) -> bool {
        let settled = async {
            loop {
                let flushed = self.inner.flushed.notified();
                if self.inner.lock().is_settled() {
                    return;
                }
                flushed.await;
            }
        };
        tokio::time::timeout(grace, settled).await.is_ok()
    }
}

impl HarvestInner {
    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn gather(&self, change: impl FnOnce(&mut Gathered)) {
        let mut gathered = self.lock();
        change(&mut gathered);
        let lost = gathered.shed(self.config.pending_tokens_max);
        self.observe(gathered, lost);
    }

    fn observe(&self, gathered: MutexGuard<'_, Gathered>, lost: usize) {
        self.metrics.pending_tokens.set(gathered.tokens() as i64);
        drop(gathered);
        self.metrics.dropped_tokens.inc_by(lost as u64);
    }

    /// Sends what there is. Returns whether the store took it.
    async fn flush(&self, store: &dyn DraftStore) -> bool {
        let (batch, touched) = {
            let mut gathered = self.lock();
            (
                gathered.batch(self.config.batch_tokens),
                gathered.take_touched(),
            )
        };
        let mut is_taken = true;
        for (namespace_id, request) in batch {
            is_taken &= self.send(store, namespace_id, request).await;
        }
        for request in touched {
            // Losing one costs a document its place in the order of eviction, no more.
            if let Err(error) = store.touch(request).await {
                tracing::debug!(%error, "the draft store did not take touches");
            }
        }
        self.flushed.notify_waiters();
        is_taken
    }

    /// Sends one message, until nothing of it is worth sending as it stands. Returns whether that is so.
    async fn send(
        &self,
        store: &dyn DraftStore,
        namespace_id: NamespaceId,
        request: AppendRequest,
    ) -> bool {
        let Err(error) = self.append(store, namespace_id, &request).await else {
            return true;
        };
        match Refusal::of(&error) {
            Refusal::ForNow => {
                tracing::warn!(%error, "the draft store did not take outputs; trying again");
                false
            }
            // One bad output, or too many good ones: only by itself can it be told which.
            Refusal::AsItStands if request.updates.len() > 1 => {
                tracing::warn!(%error, updates = request.updates.len(), "the draft store refuses a message; sending its parts");
                self.send_singly(store, namespace_id, request).await
            }
            Refusal::AsItStands | Refusal::ForGood => {
                self.give_up(namespace_id, &request, &error);
                true
            }
        }
    }

    async fn send_singly(
        &self,
        store: &dyn DraftStore,
        namespace_id: NamespaceId,
        request: AppendRequest,
    ) -> bool {
        let AppendRequest { namespace, updates } = request;
        for update in updates {
            let single = AppendRequest {
                namespace: namespace.clone(),
                updates: vec![update],
            };
            let Err(error) = self.append(store, namespace_id, &single).await else {
                continue;
            };
            if matches!(Refusal::of(&error), Refusal::ForNow) {
                // What was not sent is still gathered.
                tracing::warn!(%error, "the draft store did not take outputs; trying again");
                return false;
            }
            self.give_up(namespace_id, &single, &error);
        }
        true
    }

    async fn append(
        &self,
        store: &dyn DraftStore,
        namespace_id: NamespaceId,
        request: &AppendRequest,
    ) -> Result<(), ApiError> {
        let reply = store
            .append(request.clone())
            .await
            .inspect_err(|_| self.metrics.failures.inc())?;
        let mut gathered = self.lock();
        let lost = gathered.acknowledge(namespace_id, request, &reply);
        self.observe(gathered, lost);
        if lost > 0 {
            tracing::warn!(
                lost,
                "the draft store lacks the beginning of an output; the rest is dropped"
            );
        }
        Ok(())
    }

    fn give_up(&self, namespace_id: NamespaceId, request: &AppendRequest, error: &ApiError) {
        let mut gathered = self.lock();
        let lost = gathered.give_up(namespace_id, request);
        self.observe(gathered, lost);
        tracing::error!(%error, lost, "the draft store refuses outputs for good; dropped");
    }
}

/// What an error says about sending the same again.
enum Refusal {
    /// Later it may be taken.
    ForNow,
    /// Never in this message; its updates may be, each by itself.
    AsItStands,
    /// Never.
    ForGood,
}

impl Refusal {
    fn of(error: &ApiError) -> Self {
        match error.kind {
            ErrorKind::TooLarge | ErrorKind::InvalidRequest => Refusal::AsItStands,
            ErrorKind::Unauthorized => Refusal::ForGood,
            _ => Refusal::ForNow,
        }
    }
}
