//! The guard of a lease, which gives it back exactly once, whatever happens to the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::scheduling::{Lease, LeaseFinish, LeaseOutcome, RequestClass};
use refrain_rpc::{ChunkStream, Scheduler, Worker};
use refrain_service_kit::clock::millis;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

use crate::relay::request_time::RequestTime;

/// How long the call that cuts an output may take. It is only advice: a worker that misses it keeps a document that
/// is some tokens too long.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before a lost `finish` is sent once more. After that the heartbeats of the worker end the lease.
const FINISH_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Why the leases of a request are dropped that are not given back otherwise.
pub(crate) struct DropReason {
    time: Arc<RequestTime>,
    class: RequestClass,
    received: Instant,
    /// Whether a choice of the request has failed, with which all others end.
    has_failed: AtomicBool,
}

impl DropReason {
    /// Begins with a request whose choices have not failed.
    pub(crate) fn new(time: Arc<RequestTime>, class: RequestClass, received: Instant) -> Self {
        DropReason {
            time,
            class,
            received,
            has_failed: AtomicBool::new(false),
        }
    }

    /// Notes that a choice has failed.
    pub(crate) fn choice_failed(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// The client has left, unless the gateway ended the request.
    fn outcome(&self) -> LeaseOutcome {
        let ended = || self.time.ended_by(self.class, self.received).is_some();
        match self.has_failed.load(Ordering::Relaxed) || ended() {
            true => LeaseOutcome::GivenUp,
            false => LeaseOutcome::Aborted,
        }
    }
}

/// Holds a lease and gives it back. A guard that is dropped gives it back as [`DropReason`] says.
///
/// The calls run as separate tasks on the gateway's runtime instead of the HTTP thread's, because the future of the
/// request may be gone long before they end.
pub(crate) struct LeaseGuard {
    scheduler: Arc<dyn Scheduler>,
    tasks: Handle,
    span: Span,
    dropped: Arc<DropReason>,
    /// When the worker finished the chunk, if it did.
    worker_ended: Option<Instant>,
    /// The message, until it is sent.
    finish: Option<LeaseFinish>,
}

impl LeaseGuard {
    /// Creates the guard of a lease that was just granted.
    pub(crate) fn new(
        scheduler: Arc<dyn Scheduler>,
        tasks: Handle,
        dropped: Arc<DropReason>,
        lease: &Lease,
    ) -> Self {
        let finish = LeaseFinish {
            lease: lease.lease,
            outcome: LeaseOutcome::Aborted,
            emitted_tokens: 0,
            worker_ended_ms_ago: None,
            cached_tokens: None,
            rejected_tokens: 0,
            accepted_tokens: 0,
        };
        LeaseGuard {
            scheduler,
            tasks,
            span: Span::current(),
            dropped,
            worker_ended: None,
            finish: Some(finish),
        }
    }

    /// Sets the number of output tokens of the chunk so far.
    pub(crate) fn set_emitted(&mut self, tokens: u32) {
        if let Some(finish) = &mut self.finish {
            finish.emitted_tokens = tokens;
        }
    }

    /// Counts draft tokens that the engine accepted and rejected.
    pub(crate) fn add_verified(&mut self, accepted: u32, rejected: u32) {
        if let Some(finish) = &mut self.finish {
            finish.accepted_tokens = finish.accepted_tokens.saturating_add(accepted);
            finish.rejected_tokens = finish.rejected_tokens.saturating_add(rejected);
        }
    }

    /// Sets the number of tokens of the context that the engine had in its KV cache.
    pub(crate) fn set_cached(&mut self, tokens: u32) {
        if let Some(finish) = &mut self.finish {
            finish.cached_tokens = Some(tokens);
        }
    }

    /// Notes that the worker has finished the chunk by itself.
    pub(crate) fn worker_ended(&mut self) {
        self.worker_ended = Some(Instant::now());
    }

    /// The message for a call that asks for the next lease as well. Once the scheduler has answered such a call,
    /// [`LeaseGuard::given_back`] has to be called, or [`LeaseGuard::end`] if the call failed: it may be lost.
    pub(crate) fn continues(&self) -> Option<LeaseFinish> {
        let finish = self.finish.clone()?;
        Some(with_outcome(
            finish,
            LeaseOutcome::Continues,
            self.worker_ended,
        ))
    }

    /// Notes that the scheduler has the lease back.
    pub(crate) fn given_back(mut self) {
        self.finish = None;
    }

    /// Gives the lease back, at once where the scheduler is in this process. Otherwise a task does so: a request that
    /// continues awaits it before it asks for its next lease, so that the slot is free. If the handle is dropped, the
    /// task runs on.
    pub(crate) fn end(mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        self.send(outcome)
    }

    fn send(&mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        let finish = self.finish.take()?;
        let now = with_outcome(finish.clone(), outcome, self.worker_ended);
        if self.scheduler.finish_now(&now) {
            return None;
        }
        let task = send_finish(self.scheduler.clone(), finish, outcome, self.worker_ended);
        Some(self.tasks.spawn(task.instrument(self.span.clone())))
    }

    /// Tells the worker where the output of a request ends, then drops the stream, then gives the lease back with
    /// this outcome.
    pub(crate) fn end_with_cut(
        mut self,
        worker: Arc<dyn Worker>,
        stream: ChunkStream,
        output_len: u32,
        outcome: LeaseOutcome,
    ) {
        let Some(finish) = self.finish.take() else {
            return;
        };
        let scheduler = self.scheduler.clone();
        let task = async move {
            let cut = ChunkCut {
                lease: finish.lease,
                output_len,
                aborted: outcome == LeaseOutcome::Aborted,
            };
            let cut = tokio::time::timeout(CUT_TIMEOUT, worker.cut(cut)).await;
            let worker_ended = matches!(cut, Ok(Ok(()))).then(Instant::now);
            if worker_ended.is_none() {
                tracing::debug!(?cut, "the worker was not told where the output ends");
            }
            drop(stream);
            send_finish(scheduler, finish, outcome, worker_ended).await;
        };
        self.tasks.spawn(task.instrument(self.span.clone()));
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.finish.is_some() {
            drop(self.send(self.dropped.outcome()));
        }
    }
}

/// The message as it is sent now.
fn with_outcome(
    finish: LeaseFinish,
    outcome: LeaseOutcome,
    worker_ended: Option<Instant>,
) -> LeaseFinish {
    LeaseFinish {
        outcome,
        worker_ended_ms_ago: worker_ended.map(|at| millis(at.elapsed())),
        ..finish
    }
}

async fn send_finish(
    scheduler: Arc<dyn Scheduler>,
    finish: LeaseFinish,
    outcome: LeaseOutcome,
    worker_ended: Option<Instant>,
) {
    let finish = || with_outcome(finish.clone(), outcome, worker_ended);
    if scheduler.finish(finish()).await.is_err() {
        tokio::time::sleep(FINISH_RETRY_PAUSE).await;
        if let Err(error) = scheduler.finish(finish()).await {
            tracing::warn!(%error, "cannot give a lease back");
        }
    }
}
