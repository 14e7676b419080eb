//! The scheduler's handle. Callers in this process use it directly, all others through the HTTP routes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel, WorkerReport,
};
use refrain_rpc::Scheduler;
use refrain_service_kit::mesh::MeshAuth;
use tokio::sync::oneshot;
use tracing::Instrument as _;

use crate::dispatch::{Dispatch, DispatchEvent, DispatchState, LeaseCallId, scheduler_unavailable};
use crate::dispatcher::{Dispatcher, QUEUE_LOST, SharedDispatcher};
use crate::leadership::Leadership;
use crate::metrics::SchedulerMetrics;

/// A handle on the running scheduler. It is cheap to clone.
#[derive(Clone)]
pub struct SchedulerHandle {
    dispatcher: SharedDispatcher,
    mesh: MeshAuth,
    metrics: SchedulerMetrics,
    /// The id of the next call for a lease.
    next_call: Arc<AtomicU64>,
    draining: Arc<AtomicBool>,
    leadership: Leadership,
}

impl SchedulerHandle {
    pub(crate) fn new(
        dispatcher: SharedDispatcher,
        mesh: MeshAuth,
        metrics: SchedulerMetrics,
        leadership: Leadership,
    ) -> Self {
        SchedulerHandle {
            dispatcher,
            mesh,
            metrics,
            next_call: Arc::default(),
            draining: Arc::default(),
            leadership,
        }
    }

    /// The dispatcher's state, for `/debug/state`.
    pub(crate) async fn observe(&self) -> Result<DispatchState, ApiError> {
        self.ask(|dispatcher| dispatcher.read(Dispatch::observe))
            .await
    }

    /// Fails with the reason if the scheduler cannot grant any lease.
    pub(crate) fn readiness(&self) -> Result<(), String> {
        if self.draining.load(Ordering::Relaxed) {
            Err("draining".to_owned())
        } else {
            self.mesh.clocks().readiness()
        }
    }

    /// Refuses all waiting and all later calls for a lease.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.dispatcher.apply(Dispatcher::drain);
    }

    /// Takes note that this process leads, or leads no more.
    pub(crate) fn follow_leadership(&self) {
        self.dispatcher.apply(Dispatcher::follow_leadership);
    }

    #[cfg(test)]
    pub(crate) fn panic(&self) {
        let panics = |_: &Dispatch, _| panic!("a test asked for it");
        self.dispatcher
            .apply(|dispatcher| dispatcher.read::<()>(panics));
    }

    /// Asks in turn. `change` returns nothing if the core panicked.
    async fn ask<A>(
        &self,
        change: impl FnOnce(&mut Dispatcher) -> Option<A>,
    ) -> Result<A, ApiError> {
        let Some(answer) = self.dispatcher.apply_in_turn(change).await else {
            self.metrics.rejected("mailbox_max");
            return Err(scheduler_unavailable(
                "the scheduler is too busy; try again",
            ));
        };
        answer.ok_or_else(|| scheduler_unavailable(QUEUE_LOST))
    }
}

/// A call that waits for its lease. If it is dropped early, its request is withdrawn.
struct PendingLease {
    dispatcher: SharedDispatcher,
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
        self.leadership.check()?;
        self.finish_now(&finish);
        Ok(())
    }

    fn finish_now(&self, finish: &LeaseFinish) -> bool {
        let event = DispatchEvent::Finish(finish.clone());
        self.dispatcher.apply(|dispatcher| dispatcher.apply(event));
        true
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        let reply = self
            .ask(|dispatcher| dispatcher.heartbeat(heartbeat))
            .await?;
        // One that stands by learns of the worker, and the leader alone says what it should do.
        self.leadership.check()?;
        reply
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.leadership.check()?;
        self.ask(|dispatcher| dispatcher.read(|core, _| core.models()))
            .await
    }

    async fn workers(&self) -> Result<Vec<WorkerReport>, ApiError> {
        self.leadership.check()?;
        self.ask(|dispatcher| dispatcher.read(Dispatch::worker_reports))
            .await
    }
}
