//! The guard of a lease, which gives it back exactly once, whatever happens to the request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::scheduling::{Lease, LeaseFinish, LeaseOutcome};
use refrain_rpc::{ChunkStream, Scheduler, Worker};
use refrain_service_kit::clock::millis;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

/// How long the call that cuts an output may take. It is only advice: a worker that misses it keeps a document that
/// is some tokens too long.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before a lost `finish` is sent once more. After that the heartbeats of the worker end the lease.
const FINISH_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Holds a lease and gives it back. A guard that is dropped gives it back as done: the request was given up, which
/// says nothing about the worker.
///
/// The calls run as separate tasks on the gateway's runtime instead of the HTTP thread's, because the future of the
/// request may be gone long before they end.
pub(crate) struct LeaseGuard {
    scheduler: Arc<dyn Scheduler>,
    tasks: Handle,
    span: Span,
    /// When the worker finished the chunk, if it did.
    worker_ended: Option<Instant>,
    /// The message, until it is sent.
    finish: Option<LeaseFinish>,
}

impl LeaseGuard {
    /// Creates the guard of a lease that was just granted.
    pub(crate) fn new(scheduler: Arc<dyn Scheduler>, tasks: Handle, lease: &Lease) -> Self {
        let finish = LeaseFinish {
            lease: lease.lease,
            outcome: LeaseOutcome::Done,
            emitted_tokens: 0,
            worker_ended_ms_ago: None,
        };
        LeaseGuard {
            scheduler,
            tasks,
            span: Span::current(),
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

    /// Notes that the worker has finished the chunk by itself.
    pub(crate) fn worker_ended(&mut self) {
        self.worker_ended = Some(Instant::now());
    }

    /// Gives the lease back, at once where the scheduler is in this process. Otherwise a task does so: a request that
    /// continues awaits it before it asks for its next lease, so that the slot is free. If the handle is dropped, the
    /// task runs on.
    pub(crate) fn end(mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        self.send(outcome)
    }

    fn send(&mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        let finish = LeaseFinish {
            outcome,
            worker_ended_ms_ago: self.worker_ended.map(|at| millis(at.elapsed())),
            ..self.finish.take()?
        };
        if self.scheduler.finish_now(&finish) {
            return None;
        }
        let task = send_finish(self.scheduler.clone(), finish, self.worker_ended);
        Some(self.tasks.spawn(task.instrument(self.span.clone())))
    }

    /// Tells the worker where the output ends, then drops the stream, then gives the lease back.
    pub(crate) fn end_with_cut(
        mut self,
        worker: Arc<dyn Worker>,
        stream: ChunkStream,
        output_len: u32,
    ) {
        let Some(finish) = self.finish.take() else {
            return;
        };
        let scheduler = self.scheduler.clone();
        let task = async move {
            let cut = ChunkCut {
                lease: finish.lease,
                output_len,
            };
            let cut = tokio::time::timeout(CUT_TIMEOUT, worker.cut(cut)).await;
            let worker_ended = matches!(cut, Ok(Ok(()))).then(Instant::now);
            if worker_ended.is_none() {
                tracing::debug!(?cut, "the worker was not told where the output ends");
            }
            drop(stream);
            send_finish(scheduler, finish, worker_ended).await;
        };
        self.tasks.spawn(task.instrument(self.span.clone()));
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        drop(self.send(LeaseOutcome::Done));
    }
}

async fn send_finish(
    scheduler: Arc<dyn Scheduler>,
    finish: LeaseFinish,
    worker_ended: Option<Instant>,
) {
    let finish = || LeaseFinish {
        worker_ended_ms_ago: worker_ended.map(|at| millis(at.elapsed())),
        ..finish.clone()
    };
    if scheduler.finish(finish()).await.is_err() {
        tokio::time::sleep(FINISH_RETRY_PAUSE).await;
        if let Err(error) = scheduler.finish(finish()).await {
            tracing::warn!(%error, "cannot give a lease back");
        }
    }
}
