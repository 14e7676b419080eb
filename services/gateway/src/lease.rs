//! A lease held: given back exactly once, whatever happens to the request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::scheduling::{Lease, LeaseFinish, LeaseOutcome};
use refrain_rpc::{ChunkStream, Scheduler, Worker};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

/// How long a worker may take to hear of a cut. It is advice: a worker that misses it keeps a document that
/// is some tokens too long.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before a lost `finish` is sent again, once. After that the workers' heartbeats heal it.
const FINISH_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Gives the lease back when dropped: as done, since what drops it unasked is a request that is given up, and no word on
/// the worker.
///
/// The calls run as tasks of their own, on the gateway's runtime rather than on the HTTP thread's: the
/// request's future may be gone long before they have ended.
pub(crate) struct LeaseHold {
    scheduler: Arc<dyn Scheduler>,
    tasks: Handle,
    span: Span,
    /// When the worker brought the chunk to its end, if it did.
    worker_ended: Option<Instant>,
    /// Taken when it is sent.
    finish: Option<LeaseFinish>,
}

impl LeaseHold {
    /// Holds a lease that was just granted.
    pub(crate) fn new(scheduler: Arc<dyn Scheduler>, tasks: Handle, lease: &Lease) -> Self {
        let finish = LeaseFinish {
            lease: lease.lease,
            outcome: LeaseOutcome::Done,
            emitted_tokens: 0,
            worker_ended_ms_ago: None,
        };
        LeaseHold {
            scheduler,
            tasks,
            span: Span::current(),
            worker_ended: None,
            finish: Some(finish),
        }
    }

    /// Notes how many output tokens the chunk has brought.
    pub(crate) fn emitted(&mut self, tokens: u32) {
        if let Some(finish) = &mut self.finish {
            finish.emitted_tokens = tokens;
        }
    }

    /// Notes that the worker has said of itself that the chunk is decoded to its end.
    pub(crate) fn worker_ended(&mut self) {
        self.worker_ended = Some(Instant::now());
    }

    /// Gives the lease back. Who asks for another lease awaits the task first, so that the slot is free;
    /// dropping the handle leaves the task running.
    pub(crate) fn end(mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        let mut finish = self.finish.take()?;
        finish.outcome = outcome;
        let task = send_finish(self.scheduler.clone(), finish, self.worker_ended);
        Some(self.tasks.spawn(task.instrument(self.span.clone())))
    }

    /// Tells the worker where the output ends, then lets go of the stream, then gives the lease back.
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
            let worker_ended = match tokio::time::timeout(CUT_TIMEOUT, worker.cut(cut)).await {
                Ok(Ok(())) => Some(Instant::now()),
                Ok(Err(error)) => {
                    tracing::debug!(%error, "cut was refused");
                    None
                }
                Err(_) => {
                    tracing::debug!("cut took too long");
                    None
                }
            };
            drop(stream);
            send_finish(scheduler, finish, worker_ended).await;
        };
        self.tasks.spawn(task.instrument(self.span.clone()));
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        if let Some(finish) = self.finish.take() {
            let task = send_finish(self.scheduler.clone(), finish, self.worker_ended);
            self.tasks.spawn(task.instrument(self.span.clone()));
        }
    }
}

async fn send_finish(
    scheduler: Arc<dyn Scheduler>,
    finish: LeaseFinish,
    worker_ended: Option<Instant>,
) {
    let finish = || LeaseFinish {
        worker_ended_ms_ago: worker_ended
            .map(|at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
        ..finish.clone()
    };
    if scheduler.finish(finish()).await.is_err() {
        tokio::time::sleep(FINISH_RETRY_PAUSE).await;
        if let Err(error) = scheduler.finish(finish()).await {
            tracing::warn!(%error, "lease could not be given back");
        }
    }
}
