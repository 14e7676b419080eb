//! The scheduler's handle. Callers in this process use it directly, all others through the HTTP routes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use actix::Recipient;
use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel, WorkerReport,
};
use refrain_rpc::Scheduler;
use refrain_service_kit::mesh::MeshAuth;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::actor::DispatchMessage;
use crate::dispatch::{DispatchEvent, DispatchState, LeaseCallId, scheduler_unavailable};
use crate::dispatcher::{Dispatcher, QUEUE_LOST, SharedDispatcher};
use crate::metrics::SchedulerMetrics;

/// A handle on the running scheduler. It is cheap to clone.
#[derive(Clone)]
pub struct SchedulerHandle {
    dispatcher: DirectDispatcher,
    mesh: MeshAuth,
    metrics: SchedulerMetrics,
    /// The id of the next call for a lease.
    next_call: Arc<AtomicU64>,
    draining: Arc<AtomicBool>,
}

impl SchedulerHandle {
    pub(crate) fn new(
        shared: SharedDispatcher,
        actor: Recipient<DispatchMessage>,
        mesh: MeshAuth,
        metrics: SchedulerMetrics,
    ) -> Self {
        SchedulerHandle {
            dispatcher: DirectDispatcher { shared, actor },
            mesh,
            metrics,
            next_call: Arc::default(),
            draining: Arc::default(),
        }
    }

    /// The dispatcher's state, for `/debug/state`.
    pub(crate) async fn observe(&self) -> Result<DispatchState, ApiError> {
        self.ask(|reply| DispatchMessage::Observe { reply }).await
    }

    /// Fails with the reason if the scheduler cannot grant any lease.
    pub(crate) fn readiness(&self) -> Result<(), String> {
        if self.draining.load(Ordering::Relaxed) {
            Err("draining".to_owned())
        } else if !self.dispatcher.is_running() {
            Err("the dispatcher has stopped".to_owned())
        } else {
            self.mesh.clocks().readiness()
        }
    }

    /// Refuses all waiting and all later calls for a lease.
    pub(crate) async fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        // `do_send` ignores the mailbox's limit: a drain must not fail because the mailbox is full.
        self.dispatcher
            .actor
            .do_send(DispatchMessage::Drain { reply });
        // An error means that the dispatcher has already stopped.
        let _ = answer.await;
    }

    #[cfg(test)]
    pub(crate) fn panic(&self) {
        self.dispatcher.actor.do_send(DispatchMessage::Panic);
    }

    /// Puts a message into the mailbox, if there is room.
    fn send(&self, message: DispatchMessage) -> Result<(), ApiError> {
        self.dispatcher.actor.try_send(message).map_err(|error| {
            self.metrics.rejected("mailbox_max");
            scheduler_unavailable("the scheduler is too busy; try again").with_detail(error)
        })
    }

    async fn ask<A>(
        &self,
        message: impl FnOnce(oneshot::Sender<A>) -> DispatchMessage,
    ) -> Result<A, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.send(message(reply))?;
        answer.await.map_err(|_| scheduler_unavailable(QUEUE_LOST))
    }
}

/// The dispatcher as its callers reach it: events of requests are applied on the caller's thread, and the actor sets
/// the timer.
#[derive(Clone)]
struct DirectDispatcher {
    shared: SharedDispatcher,
    actor: Recipient<DispatchMessage>,
}

impl DirectDispatcher {
    fn is_running(&self) -> bool {
        self.actor.connected()
    }

    fn apply(&self, change: impl FnOnce(&mut Dispatcher)) {
        let wanted_ms = {
            let mut dispatcher = self.shared.lock();
            change(&mut dispatcher);
            dispatcher.wanted_tick_ms()
        };
        if let Some(due_ms) = wanted_ms {
            // `do_send` ignores the mailbox's limit: without its timer the dispatcher would miss deadlines. There is
            // at most one such message per deadline that comes before all others.
            self.actor.do_send(DispatchMessage::TickAt { due_ms });
        }
    }
}

/// A call that waits for its lease. If it is dropped early, its request is withdrawn.
struct PendingLease {
    dispatcher: DirectDispatcher,
    call: LeaseCallId,
    answer: Option<oneshot::Receiver<Result<Lease, ApiError>>>,
}

impl PendingLease {
    async fn answer(mut self) -> Result<Lease, ApiError> {
        let Some(answer) = self.answer.as_mut() else {
            return Err(scheduler_unavailable(QUEUE_LOST));
        };
        let answered = answer.await;
        self.answer = None;
        answered.unwrap_or_else(|_| Err(scheduler_unavailable(QUEUE_LOST)))
    }
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        let Some(mut answer) = self.answer.take() else {
            return;
        };
        // Once the channel is closed, the dispatcher takes back any grant by itself. A grant that has already arrived
        // is returned here.
        answer.close();
        self.dispatcher.apply(|dispatcher| match answer.try_recv() {
            Ok(Ok(Lease { lease, .. })) => {
                dispatcher.apply(DispatchEvent::Undelivered { lease });
            }
            _ => dispatcher.withdraw(self.call),
        });
    }
}

#[async_trait]
impl Scheduler for SchedulerHandle {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        self.mesh.verify(&request.namespace).inspect_err(|_| {
            self.metrics.rejected("signature");
        })?;
        let call = LeaseCallId(self.next_call.fetch_add(1, Ordering::Relaxed));
        if !self.dispatcher.is_running() {
            return Err(scheduler_unavailable("the scheduler has stopped"));
        }
        let (reply, answer) = oneshot::channel();
        self.dispatcher
            .apply(|dispatcher| dispatcher.submit(call, request, reply));
        let pending = PendingLease {
            dispatcher: self.dispatcher.clone(),
            call,
            answer: Some(answer),
        };
        // The span shows the wait in the request's trace, with and without HTTP.
        pending
            .answer()
            .instrument(tracing::info_span!("lease"))
            .await
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        self.finish_now(&finish);
        Ok(())
    }

    fn finish_now(&self, finish: &LeaseFinish) -> bool {
        let event = DispatchEvent::Finish(finish.clone());
        self.dispatcher.apply(|dispatcher| dispatcher.apply(event));
        true
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        self.ask(|reply| DispatchMessage::Heartbeat {
            heartbeat: Box::new(heartbeat),
            reply,
        })
        .await?
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.ask(|reply| DispatchMessage::Models { reply }).await
    }

    async fn workers(&self) -> Result<Vec<WorkerReport>, ApiError> {
        self.ask(|reply| DispatchMessage::Workers { reply }).await
    }
}
