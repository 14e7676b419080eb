//! The upload of outputs to the draft store.
//!
//! Outputs are gathered as they grow (`uploader/pending_outputs.rs`), sent in batches at intervals
//! (`uploader/schedule.rs`), and sent again until the store has acknowledged them. The decode loop never waits for
//! any of it.

mod pending_outputs;
mod schedule;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::document::{AppendRequest, DocumentUpdate, ERASED_LEN};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::actors;
use refrain_service_kit::clock::millis;
use refrain_service_kit::trace;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::Instrument as _;

use self::pending_outputs::{GivenUp, PendingOutputs, UploadBatch};
use self::schedule::{FlushOutcome, UploadSchedule};
use crate::config::UploaderConfig;
use crate::metrics::UploaderMetrics;
use crate::update::DocumentUpdateRef;

/// Most tokens of one message.
const BATCH_TOKENS: usize = 65_536;

/// The handle of the upload. Requests push updates, and an actor sends them. A clone is the same uploader.
#[derive(Clone)]
pub struct Uploader {
    inner: Arc<Inner>,
}

/// Forgets documents of a namespace.
type Forget = Box<dyn Fn(NamespaceId, &[DocumentId]) + Send + Sync>;

struct Inner {
    pending: Mutex<PendingOutputs>,
    /// The actor found nothing to send, and sleeps until there is something. Changed under the lock of `pending`.
    is_idle: AtomicBool,
    /// Callers of [`Uploader::drain`] that wait.
    drains: AtomicUsize,
    /// Wakes the idle actor.
    work: Arc<Notify>,
    config: UploaderConfig,
    metrics: UploaderMetrics,
    /// Signals the end of each upload.
    flushed: Notify,
    /// Forgets documents that were erased.
    forget: OnceLock<Forget>,
    began: std::time::Instant,
}

impl Uploader {
    /// Starts the actor that sends, on the runtime of the caller.
    pub fn start(
        config: UploaderConfig,
        store: Arc<dyn DraftStore>,
        metrics: UploaderMetrics,
    ) -> Self {
        let uploader = Uploader {
            inner: Arc::new(Inner::new(config, metrics)),
        };
        // The actor holds a weak reference, so that it ends with the last handle.
        let weak = Arc::downgrade(&uploader.inner);
        actors::start("uploads", move || send_all(weak.clone(), store.clone())).detached();
        uploader
    }

    /// Takes an update of an output.
    pub fn push(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdateRef<'_>,
    ) {
        self.inner
            .change(|pending| pending.push(namespace_id, namespace, update));
    }

    /// Sets what is done with outputs of which the store says that they were erased. The first call counts.
    pub(crate) fn on_erased(&self, forget: Forget) {
        let _ = self.inner.forget.set(forget);
    }

    /// Takes over an output that another worker began, before the first update that comes from here. `output` holds
    /// all of it so far.
    pub fn adopt(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        output: DocumentUpdateRef<'_>,
    ) {
        self.inner
            .change(|pending| pending.adopt(namespace_id, namespace, output));
    }

    /// Notes that draft tokens from a document were accepted, so that the store keeps it longer.
    pub fn touch(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        document: DocumentId,
    ) {
        let mut pending = self.inner.pending.lock();
        pending.touch(namespace_id, namespace, document);
        self.inner.wake(&pending);
    }

    /// Notes that no more updates of a document come from here.
    pub fn release(&self, namespace_id: NamespaceId, document: DocumentId) {
        self.inner.pending.lock().release(namespace_id, document);
    }

    /// Waits until the store has everything, at most for `grace`. Returns whether it has.
    pub async fn drain(&self, grace: Duration) -> bool {
        let _waiting = Drain::begin(&self.inner.drains);
        let is_acknowledged = async {
            loop {
                let flushed = self.inner.flushed.notified();
                if self.inner.pending.lock().is_acknowledged() {
                    return;
                }
                flushed.await;
            }
        };
        tokio::time::timeout(grace, is_acknowledged).await.is_ok()
    }
}

/// Sends what is pending until the last handle is gone. Outputs stay pending until the store has them.
async fn send_all(weak: Weak<Inner>, store: Arc<dyn DraftStore>) {
    let Some(inner) = weak.upgrade() else { return };
    let work = inner.work.clone();
    let mut schedule = UploadSchedule::new(&inner.config, now());
    drop(inner);
    while let Some(inner) = weak.upgrade() {
        let began = now();
        if inner.note_idle() {
            // Callers that drain are told, also where the rest was dropped instead of sent.
            inner.flushed.notify_waiters();
            drop(inner);
            work.notified().await;
            schedule.resume(now());
            continue;
        }
        let growing = schedule.includes_growing(began) || inner.drains.load(Ordering::Relaxed) > 0;
        let outcome = inner.flush(&*store, growing).await;
        schedule.record(began, growing, outcome);
        let has_groups = inner.pending.lock().has_groups();
        let pause = schedule.pause(has_groups);
        drop(inner);
        tokio::time::sleep(pause).await;
    }
}

/// Counts one waiting drain while it lives.
struct Drain<'a>(&'a AtomicUsize);

impl<'a> Drain<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Drain(count)
    }
}

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    fn new(config: UploaderConfig, metrics: UploaderMetrics) -> Self {
        Inner {
            pending: Mutex::default(),
            is_idle: AtomicBool::new(false),
            drains: AtomicUsize::new(0),
            work: Arc::default(),
            config,
            metrics,
            flushed: Notify::new(),
            forget: OnceLock::new(),
            began: now(),
        }
    }

    /// Milliseconds since the uploader began.
    fn now_ms(&self) -> u64 {
        millis(now().saturating_duration_since(self.began))
    }

    fn change(&self, change: impl FnOnce(&mut PendingOutputs)) {
        let mut pending = self.pending.lock();
        pending.set_time(self.now_ms());
        change(&mut pending);
        self.wake(&pending);
        let lost = pending.shed(self.config.pending_tokens_max);
        self.observe(pending, lost);
    }

    /// Wakes the actor if it is idle. The caller holds the lock of the outputs.
    fn wake(&self, _pending: &PendingOutputs) {
        if self.is_idle.load(Ordering::Relaxed) {
            self.is_idle.store(false, Ordering::Relaxed);
            self.work.notify_one();
        }
    }

    /// Notes and returns whether there is nothing to send. The actor then sleeps until there is.
    fn note_idle(&self) -> bool {
        let pending = self.pending.lock();
        let is_idle = pending.is_acknowledged() && !pending.has_touched();
        self.is_idle.store(is_idle, Ordering::Relaxed);
        is_idle
    }

    fn observe(&self, pending: MutexGuard<'_, PendingOutputs>, lost: usize) {
        self.metrics.pending_tokens.set(pending.tokens() as i64);
        drop(pending);
        self.metrics.dropped_tokens.inc_by(lost as u64);
    }

    /// Sends one batch, with outputs that merely grow if `growing`.
    async fn flush(&self, store: &dyn DraftStore, growing: bool) -> FlushOutcome {
        let (batch, touched) = {
            let mut pending = self.pending.lock();
            pending.set_time(self.now_ms());
            (pending.batch(BATCH_TOKENS, growing), pending.take_touched())
        };
        let UploadBatch {
            requests,
            is_complete,
        } = batch;
        let is_empty = requests.is_empty();
        let mut is_accepted = true;
        for (namespace_id, request) in requests {
            is_accepted &= self.send(store, namespace_id, request).await;
        }
        for request in touched {
            // A lost touch costs a document its position in the order of eviction, and no more.
            if let Err(error) = store.touch(request).await {
                tracing::debug!(%error, "the draft store did not accept touches");
            }
        }
        self.flushed.notify_waiters();
        match (is_empty, is_accepted) {
            (true, _) => FlushOutcome::Nothing,
            (false, true) => FlushOutcome::Accepted { is_complete },
            (false, false) => FlushOutcome::Refused,
        }
    }

    /// Sends one message. Returns whether it is done with: accepted, or given up.
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
                tracing::warn!(%error, "the draft store did not accept outputs; they are sent again");
                false
            }
            // One bad output, or too many good ones: only sending each by itself tells which.
            Refusal::AsItStands if request.updates.len() > 1 => {
                tracing::warn!(
                    %error,
                    updates = request.updates.len(),
                    "the draft store refuses a message; its updates are sent one by one"
                );
                for update in request.updates {
                    let single = AppendRequest {
                        namespace: request.namespace.clone(),
                        updates: vec![update],
                        waited_ms: request.waited_ms,
                        acknowledgement: None,
                    };
                    if !Box::pin(self.send(store, namespace_id, single)).await {
                        // The updates that were not sent are still pending.
                        return false;
                    }
                }
                true
            }
            Refusal::AsItStands | Refusal::ForGood => {
                self.give_up(namespace_id, &request, &error);
                true
            }
        }
    }

    async fn append(
        &self,
        store: &dyn DraftStore,
        namespace_id: NamespaceId,
        request: &AppendRequest,
    ) -> Result<(), ApiError> {
        let sent_ms = self.now_ms();
        // A message has the outputs of many requests, so it is in the trace of the first one.
        let span = tracing::info_span!("append", documents = request.updates.len());
        trace::join(&span, self.pending.lock().traces(namespace_id, request));
        let reply = store
            .append(request.clone())
            .instrument(span)
            .await
            .inspect_err(|_| self.metrics.failures.inc())?;
        let mut pending = self.pending.lock();
        let GivenUp { lost, fenced } = pending.acknowledge(namespace_id, request, &reply, sent_ms);
        self.observe(pending, lost);
        self.metrics.fenced_tokens.inc_by(fenced as u64);
        self.forget_erased(namespace_id, &request.updates, &reply.lengths);
        if fenced > 0 {
            tracing::warn!(
                fenced,
                "the draft store dropped tokens of outputs of which it has newer attempts"
            );
        }
        if lost > 0 {
            tracing::warn!(
                lost,
                "the draft store lacks the beginning of an output, which is not here either; the rest is dropped"
            );
        }
        Ok(())
    }

    /// Forgets the outputs that were erased. Those that the store had are in its feed, but not these.
    fn forget_erased(
        &self,
        namespace_id: NamespaceId,
        updates: &[DocumentUpdate],
        lengths: &[u32],
    ) {
        let answered = updates.iter().zip(lengths);
        let erased = answered.filter(|(_, length)| **length == ERASED_LEN);
        let erased: Vec<DocumentId> = erased.map(|(update, _)| update.document).collect();
        if let Some(forget) = self.forget.get().filter(|_| !erased.is_empty()) {
            forget(namespace_id, &erased);
        }
    }

    fn give_up(&self, namespace_id: NamespaceId, request: &AppendRequest, error: &ApiError) {
        let mut pending = self.pending.lock();
        let lost = pending.give_up(namespace_id, request);
        self.observe(pending, lost);
        tracing::error!(%error, lost, "the draft store refuses outputs for good; they are dropped");
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Lets an idle actor find that the last handle is gone.
        self.work.notify_one();
    }
}

/// Whether a message that the store refused may be accepted later.
enum Refusal {
    /// It may be accepted later.
    ForNow,
    /// It will never be accepted; its updates may be, each by itself.
    AsItStands,
    /// Neither it nor its updates will ever be accepted.
    ForGood,
}

impl Refusal {
    fn of(error: &ApiError) -> Self {
        match error.kind {
            ErrorKind::TooLarge | ErrorKind::InvalidRequest => Refusal::AsItStands,
            // A credential can be replaced, unlike the signature that an output came with.
            ErrorKind::Unauthorized if !error.has_code(code::CREDENTIAL_REFUSED) => {
                Refusal::ForGood
            }
            _ => Refusal::ForNow,
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests;
