//! A lease held: given back exactly once, whatever happens to the request.

use std::sync::Arc;
use std::time::Duration;

use refrain_clients::{ChunkStream, Scheduler, Worker};
use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::scheduling::{Lease, LeaseFinish, LeaseOutcome};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

/// How long a worker may take to hear of a cut. It is advice: a worker that misses it keeps a document that
/// is some tokens too long.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before a lost `finish` is sent again, once. After that the workers' heartbeats heal it.
const FINISH_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Gives the lease back when dropped: as done, since what drops it unasked is a client that went away.
///
/// The calls run as tasks of their own, on the gateway's runtime rather than on the HTTP thread's: the
/// request's future may be gone long before they have ended.
pub(crate) struct LeaseHold {
    scheduler: Arc<dyn Scheduler>,
    tasks: Handle,
    span: Span,
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
        };
        LeaseHold {
            scheduler,
            tasks,
            span: Span::current(),
            finish: Some(finish),
        }
    }

    /// Notes how many output tokens the chunk has brought.
    pub(crate) fn emitted(&mut self, tokens: u32) {
        if let Some(finish) = &mut self.finish {
            finish.emitted_tokens = tokens;
        }
    }

    /// Gives the lease back. Who asks for another lease awaits the task first, so that the slot is free;
    /// dropping the handle leaves the task running.
    pub(crate) fn end(mut self, outcome: LeaseOutcome) -> Option<JoinHandle<()>> {
        let mut finish = self.finish.take()?;
        finish.outcome = outcome;
        let scheduler = self.scheduler.clone();
        Some(
            self.tasks
                .spawn(send_finish(scheduler, finish).instrument(self.span.clone())),
        )
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
            match tokio::time::timeout(CUT_TIMEOUT, worker.cut(cut)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "cut was refused"),
                Err(_) => tracing::debug!("cut took too long"),
            }
            drop(stream);
            send_finish(scheduler, finish).await;
        };
        self.tasks.spawn(task.instrument(self.span.clone()));
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        if let Some(finish) = self.finish.take() {
            let task = send_finish(self.scheduler.clone(), finish);
            self.tasks.spawn(task.instrument(self.span.clone()));
        }
    }
}

async fn send_finish(scheduler: Arc<dyn Scheduler>, finish: LeaseFinish) {
    if scheduler.finish(finish.clone()).await.is_err() {
        tokio::time::sleep(FINISH_RETRY_PAUSE).await;
        if let Err(error) = scheduler.finish(finish).await {
            tracing::warn!(%error, "lease could not be given back");
        }
    }
}
