//! The scheduler for callers in this process, and what the HTTP routes call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use actix::Recipient;
use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_rpc::Scheduler;
use refrain_service_kit::mesh::MeshAuth;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::dispatch::actor::{Call, QUEUE_LOST};
use crate::dispatch::refusal::try_soon;
use crate::dispatch::{DispatchState, Ticket};
use crate::metrics::SchedulerMetrics;

/// The running scheduler. Cheap to clone.
#[derive(Clone)]
pub struct SchedulerHandle {
    inner: Arc<Inner>,
}

struct Inner {
    dispatch: Recipient<Call>,
    mesh: MeshAuth,
    metrics: SchedulerMetrics,
    tickets: AtomicU64,
    draining: AtomicBool,
}

impl SchedulerHandle {
    pub(crate) fn new(
        dispatch: Recipient<Call>,
        mesh: MeshAuth,
        metrics: SchedulerMetrics,
    ) -> Self {
        SchedulerHandle {
            inner: Arc::new(Inner {
                dispatch,
                mesh,
                metrics,
                tickets: AtomicU64::new(0),
                draining: AtomicBool::new(false),
            }),
        }
    }

    /// The dispatcher's state, for people.
    ///
    /// # Errors
    /// `Unavailable` when the dispatcher is overrun or stopped.
    pub async fn observe(&self) -> Result<DispatchState, ApiError> {
        self.ask(|reply| Call::Observe { reply }).await
    }

    /// Why no lease can be had at all, if so.
    pub(crate) fn readiness(&self) -> Result<(), String> {
        if self.inner.draining.load(Ordering::Relaxed) {
            Err("draining".to_owned())
        } else if !self.inner.dispatch.connected() {
            Err("the dispatcher has stopped".to_owned())
        } else {
            self.inner.mesh.clocks().readiness()
        }
    }

    /// Refuses those who wait, and those who come from now on.
    pub(crate) async fn drain(&self) {
        self.inner.draining.store(true, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        // Going away is not refused for a full mailbox.
        self.inner.dispatch.do_send(Call::Drain { reply });
        // An error means that the dispatcher has stopped already.
        let _ = answer.await;
    }

    #[cfg(test)]
    pub(crate) fn panic(&self) {
        self.inner.dispatch.do_send(Call::Panic);
    }

    /// Puts a call into the mailbox, if it has room.
    fn send(&self, call: Call) -> Result<(), ApiError> {
        self.inner.dispatch.try_send(call).map_err(|error| {
            self.inner.metrics.rejected("mailbox_max");
            try_soon("the scheduler is too busy; try again").with_detail(error)
        })
    }

    async fn ask<A>(&self, call: impl FnOnce(oneshot::Sender<A>) -> Call) -> Result<A, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.send(call(reply))?;
        answer.await.map_err(|_| try_soon(QUEUE_LOST))
    }
}

/// A call that waits for its lease; dropped early, it leaves nothing behind.
struct WaitingCall {
    dispatch: Recipient<Call>,
    ticket: Ticket,
    answer: Option<oneshot::Receiver<Result<Lease, ApiError>>>,
}

impl WaitingCall {
    async fn answer(mut self) -> Result<Lease, ApiError> {
        let Some(answer) = self.answer.as_mut() else {
            return Err(try_soon(QUEUE_LOST));
        };
        let answered = answer.await;
        self.answer = None;
        answered.unwrap_or_else(|_| Err(try_soon(QUEUE_LOST)))
    }
}

impl Drop for WaitingCall {
    fn drop(&mut self) {
        let Some(mut answer) = self.answer.take() else {
            return;
        };
        // From here on the dispatcher finds the channel closed and takes a grant back by itself; one that
        // has come already is given back from here.
        answer.close();
        self.dispatch.do_send(match answer.try_recv() {
            Ok(Ok(lease)) => Call::Undelivered { lease },
            _ => Call::Withdraw {
                ticket: self.ticket,
            },
        });
    }
}

#[async_trait]
impl Scheduler for SchedulerHandle {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        self.inner
            .mesh
            .verify(&request.namespace)
            .inspect_err(|_| {
                self.inner.metrics.rejected("signature");
            })?;
        let ticket = Ticket(self.inner.tickets.fetch_add(1, Ordering::Relaxed));
        let (reply, answer) = oneshot::channel();
        self.send(Call::Submit {
            ticket,
            request: Box::new(request),
            reply,
        })?;
        let call = WaitingCall {
            dispatch: self.inner.dispatch.clone(),
            ticket,
            answer: Some(answer),
        };
        // How long a request waited is a line of its trace, over HTTP and without.
        call.answer().instrument(tracing::info_span!("lease")).await
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        // Giving back is never refused for a full mailbox: it is what empties the queue.
        self.inner.dispatch.do_send(Call::Finish(finish));
        Ok(())
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        self.ask(|reply| Call::Heartbeat {
            heartbeat: Box::new(heartbeat),
            reply,
        })
        .await?
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.ask(|reply| Call::Models { reply }).await
    }
}
