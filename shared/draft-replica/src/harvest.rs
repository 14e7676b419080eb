//! Outputs on their way to the draft store: gathered as they grow, sent in batches, sent again until they
//! are acknowledged. The decode loop never waits for any of it.

mod gathered;
#[cfg(test)]
mod tests;
mod turns;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use refrain_protocol::document::{AppendRequest, DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId, SignedNamespace, TokenId};
use refrain_rpc::DraftStore;
use tokio::sync::Notify;

use crate::config::HarvestConfig;
use crate::harvest::gathered::{Batch, Gathered};
use crate::harvest::turns::{Flushed, Turns};
use crate::metrics::HarvestMetrics;

/// A piece of an output, or its end, as its request has it: what a [`DocumentUpdate`] says, borrowed. One comes with every
/// token.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Whose.
    pub document: DocumentId,
    /// Fencing epoch of the attempt that said it.
    pub epoch: u64,
    /// Output tokens before it.
    pub prev_len: u32,
    /// It.
    pub tokens: &'a [TokenId],
    /// What is known of the document.
    pub head: &'a DocumentHead,
    /// How the output ended, if it has.
    pub finish: Option<FinishReason>,
}

impl<'a> From<&'a DocumentUpdate> for Piece<'a> {
    fn from(update: &'a DocumentUpdate) -> Self {
        Piece {
            document: update.document,
            epoch: update.epoch,
            prev_len: update.prev_len,
            tokens: &update.tokens,
            head: &update.head,
            finish: update.finish,
        }
    }
}

impl From<Piece<'_>> for DocumentUpdate {
    fn from(piece: Piece<'_>) -> Self {
        DocumentUpdate {
            document: piece.document,
            epoch: piece.epoch,
            prev_len: piece.prev_len,
            tokens: piece.tokens.to_vec(),
            head: piece.head.clone(),
            finish: piece.finish,
        }
    }
}

/// The handle: the decode loop pushes, a task sends.
#[derive(Clone)]
pub struct Harvest {
    inner: Arc<HarvestInner>,
}

struct HarvestInner {
    gathered: Mutex<Gathered>,
    /// The task found nothing to send and waits until there is something. Changed under the lock of `gathered`.
    rests: AtomicBool,
    /// How many wait until the store has everything.
    in_a_hurry: AtomicUsize,
    /// Ends the rest.
    work: Arc<Notify>,
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
                rests: AtomicBool::new(false),
                in_a_hurry: AtomicUsize::new(0),
                work: Arc::default(),
                config,
                metrics,
                flushed: Notify::new(),
            }),
        };
        // The task holds a weak reference: it ends with the worker.
        let weak = Arc::downgrade(&harvest.inner);
        let work = harvest.inner.work.clone();
        let mut turns = Turns::new(&harvest.inner.config, Instant::now());
        tokio::spawn(async move {
            while let Some(inner) = weak.upgrade() {
                let began = Instant::now();
                if inner.rests() {
                    // Also where what was left to send has been dropped.
                    inner.flushed.notify_waiters();
                    drop(inner);
                    work.notified().await;
                    turns.rested(Instant::now());
                    continue;
                }
                let growing =
                    turns.takes_growing(began) || inner.in_a_hurry.load(Ordering::Relaxed) > 0;
                let flushed = inner.flush(&*store, growing).await;
                turns.over(began, growing, flushed);
                drop(inner);
                tokio::time::sleep(turns.pause()).await;
            }
        });
        harvest
    }

    /// Takes a piece of an output, or its end.
    pub fn push(&self, namespace_id: NamespaceId, namespace: &SignedNamespace, piece: Piece<'_>) {
        self.inner
            .gather(|gathered| gathered.push(namespace_id, namespace, piece));
    }

    /// Takes over an output that somebody else began, before the first piece that comes from here: `said` holds
    /// all of it so far.
    pub fn adopt(&self, namespace_id: NamespaceId, namespace: &SignedNamespace, said: Piece<'_>) {
        self.inner
            .gather(|gathered| gathered.adopt(namespace_id, namespace, said));
    }

    /// Notes that a document's draft was accepted.
    pub fn touch(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        document: DocumentId,
    ) {
        let mut gathered = self.inner.lock();
        gathered.touch(namespace_id, namespace, document);
        self.inner.wake(&gathered);
    }

    /// Nothing more comes of a document here.
    pub fn release(&self, namespace_id: NamespaceId, document: DocumentId) {
        self.inner.lock().release(namespace_id, document);
    }

    /// Waits until the store has everything, at most `grace`. Returns whether it has.
    pub async fn drain(&self, grace: Duration) -> bool {
        let _in_a_hurry = InAHurry::new(&self.inner.in_a_hurry);
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

/// Counts one who waits, for as long as they do.
struct InAHurry<'a>(&'a AtomicUsize);

impl<'a> InAHurry<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        InAHurry(count)
    }
}

impl Drop for InAHurry<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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
        self.wake(&gathered);
        let lost = gathered.shed(self.config.pending_tokens_max);
        self.observe(gathered, lost);
    }

    /// There is something to send.
    fn wake(&self, _gathered: &Gathered) {
        if self.rests.load(Ordering::Relaxed) {
            self.rests.store(false, Ordering::Relaxed);
            self.work.notify_one();
        }
    }

    /// Whether there is nothing to send. The task then waits until there is.
    fn rests(&self) -> bool {
        let gathered = self.lock();
        let rests = gathered.is_settled() && !gathered.has_touched();
        self.rests.store(rests, Ordering::Relaxed);
        rests
    }

    fn observe(&self, gathered: MutexGuard<'_, Gathered>, lost: usize) {
        self.metrics.pending_tokens.set(gathered.tokens() as i64);
        drop(gathered);
        self.metrics.dropped_tokens.inc_by(lost as u64);
    }

    /// Sends what there is, of outputs that merely grow if `growing`.
    async fn flush(&self, store: &dyn DraftStore, growing: bool) -> Flushed {
        let (batch, touched) = {
            let mut gathered = self.lock();
            (
                gathered.batch(self.config.batch_tokens, growing),
                gathered.take_touched(),
            )
        };
        let Batch {
            requests,
            is_complete,
        } = batch;
        let is_empty = requests.is_empty();
        let mut is_taken = true;
        for (namespace_id, request) in requests {
            is_taken &= self.send(store, namespace_id, request).await;
        }
        for request in touched {
            // Losing one costs a document its place in the order of eviction, no more.
            if let Err(error) = store.touch(request).await {
                tracing::debug!(%error, "the draft store did not take touches");
            }
        }
        self.flushed.notify_waiters();
        match (is_empty, is_taken) {
            (true, _) => Flushed::Nothing,
            (false, true) => Flushed::Taken { is_complete },
            (false, false) => Flushed::Refused,
        }
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

impl Drop for HarvestInner {
    fn drop(&mut self) {
        // The task finds that its worker is gone.
        self.work.notify_one();
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
