//! The core [`Dispatch`] with what surrounds it: the time, the calls that wait for its answers, and the recovery from
//! its panics.
//!
//! It is shared by the actor and by the callers in this process, behind a lock that is held for one event. A caller
//! applies the events of its own request on its own thread: a message to the actor's thread and an answer back would
//! cost two wake-ups of sleeping threads, which is more than the event itself. The actor sets the timer, and applies
//! everything that no request waits for.
//!
//! A panic in the core loses the queue, the leases and the worker table. Waiting calls get an error on which the
//! gateway tries again. The next heartbeats refill the worker table, including the running chunks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, Lease, LeaseRequest};
use refrain_protocol::{ApiError, RequestId};
use refrain_service_kit::clock;
use refrain_service_kit::guard::{Guarded, Panicked};
use tokio::sync::oneshot;

use crate::config::SchedulerConfig;
use crate::dispatch::{
    Dispatch, DispatchEffect, DispatchEvent, LeaseCallId, LeaseEnd, scheduler_unavailable,
};
use crate::event_log;
use crate::metrics::SchedulerMetrics;

/// The error for calls that were lost in a panic of the core.
pub(crate) const QUEUE_LOST: &str = "the scheduler lost its queue; try again";

/// Sends the answer to a call for a lease.
pub(crate) type LeaseReply = oneshot::Sender<Result<Lease, ApiError>>;

/// A clock of milliseconds since 1970 that never steps back. It reads the system's clock once and adds elapsed time.
#[derive(Clone, Copy)]
struct Clock {
    start_unix_ms: u64,
    start: Instant,
}

impl Clock {
    fn new() -> Self {
        Clock {
            start_unix_ms: clock::unix_ms(),
            start: Instant::now(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.start_unix_ms
            .saturating_add(clock::millis(self.start.elapsed()))
    }
}

/// The dispatcher of this process. Cheap to clone.
#[derive(Clone)]
pub(crate) struct SharedDispatcher(Arc<Mutex<Dispatcher>>);

impl SharedDispatcher {
    pub(crate) fn new(config: SchedulerConfig, metrics: SchedulerMetrics) -> Self {
        SharedDispatcher(Arc::new(Mutex::new(Dispatcher::new(config, metrics))))
    }

    /// Takes the lock. It is held for one event and never across an `await`.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Dispatcher> {
        self.0.lock()
    }
}

/// The core and the calls that wait for its answers.
pub(crate) struct Dispatcher {
    core: Guarded<Dispatch>,
    clock: Clock,
    /// Calls that wait for a lease.
    waiting: HashMap<LeaseCallId, (RequestId, LeaseReply)>,
    /// The answer to the heartbeat that is applied now.
    heartbeat_answer: Option<Result<HeartbeatReply, ApiError>>,
    /// The newest epoch granted, for the core that follows a panic.
    epoch_last: Arc<AtomicU64>,
    draining: bool,
    metrics: SchedulerMetrics,
    /// When the next tick is due, if one is set or was asked for.
    tick_due_ms: Option<u64>,
}

impl Dispatcher {
    fn new(config: SchedulerConfig, metrics: SchedulerMetrics) -> Self {
        let clock = Clock::new();
        let epoch_last = Arc::new(AtomicU64::new(0));
        let rebuild = {
            let epoch_last = epoch_last.clone();
            move || {
                Dispatch::new(
                    config.clone(),
                    clock.now_ms(),
                    epoch_last.load(Ordering::Relaxed),
                )
            }
        };
        Dispatcher {
            core: Guarded::new("dispatch", rebuild, metrics.actor_restarts.clone()),
            clock,
            waiting: HashMap::new(),
            heartbeat_answer: None,
            epoch_last,
            draining: false,
            metrics,
            tick_due_ms: None,
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    /// Takes a call for a lease. The answer comes by `reply`, at once or later.
    pub(crate) fn submit(&mut self, call: LeaseCallId, request: LeaseRequest, reply: LeaseReply) {
        self.waiting.insert(call, (request.request, reply));
        event_log::asked(&request);
        self.apply(DispatchEvent::Submit { call, request });
    }

    /// Forgets a call whose caller is gone.
    pub(crate) fn withdraw(&mut self, call: LeaseCallId) {
        if let Some((request, _)) = self.waiting.remove(&call) {
            event_log::withdrawn(request);
        }
        self.apply(DispatchEvent::Withdraw { call });
    }

    /// Applies a heartbeat. `None` if the core panicked over it.
    pub(crate) fn heartbeat(
        &mut self,
        heartbeat: Heartbeat,
    ) -> Option<Result<HeartbeatReply, ApiError>> {
        self.apply(DispatchEvent::Heartbeat(heartbeat));
        self.heartbeat_answer.take()
    }

    /// Refuses all waiting calls, and all later ones.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
        self.apply(DispatchEvent::Drain);
    }

    /// Applies the tick whose timer has fired.
    pub(crate) fn tick(&mut self) {
        self.tick_due_ms = None;
        self.apply(DispatchEvent::Tick);
    }

    /// Applies an event and all events that follow from it.
    pub(crate) fn apply(&mut self, event: DispatchEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            if let DispatchEvent::Finish(finish) = &event {
                event_log::ended(finish);
            }
            let now_ms = self.clock.now_ms();
            let Ok(effects) = self.core.run(|core| core.apply(event, now_ms)) else {
                self.after_rebuild();
                break;
            };
            for effect in effects {
                self.carry_out(effect, &mut events);
            }
        }
        self.metrics.observe(self.core.core());
    }

    /// Reads from the core. `None` if it panicked.
    pub(crate) fn read<A>(&mut self, read: impl FnOnce(&Dispatch) -> A) -> Option<A> {
        match self.core.run(|core| read(core)) {
            Ok(answer) => Some(answer),
            Err(Panicked) => {
                self.after_rebuild();
                None
            }
        }
    }

    /// When the core needs its next tick, if a timer has to be set for it. An event that postpones a deadline does
    /// not move the timer: the tick then comes early, and sets the timer again.
    pub(crate) fn wanted_tick_ms(&mut self) -> Option<u64> {
        let core = self.core.core();
        let is_set_for = |due_ms: u64| self.tick_due_ms.is_some_and(|set_ms| set_ms <= due_ms);
        if is_set_for(core.due_ms_min()) {
            return None;
        }
        let due_ms = core.due_ms().filter(|due_ms| !is_set_for(*due_ms))?;
        self.tick_due_ms = Some(due_ms);
        Some(due_ms)
    }

    fn carry_out(&mut self, effect: DispatchEffect, events: &mut VecDeque<DispatchEvent>) {
        match effect {
            DispatchEffect::Grant {
                call,
                lease,
                waited_ms,
                placed,
            } => {
                self.epoch_last.store(lease.epoch, Ordering::Relaxed);
                self.metrics.granted(waited_ms, &lease.worker, &placed);
                event_log::granted(&lease, waited_ms, &placed);
                let id = lease.lease;
                let delivered = self
                    .waiting
                    .remove(&call)
                    .is_some_and(|(_, reply)| reply.send(Ok(lease)).is_ok());
                if !delivered {
                    events.push_back(DispatchEvent::Undelivered { lease: id });
                }
            }
            DispatchEffect::Reject {
                call,
                error,
                refusal,
            } => {
                self.metrics.rejected(refusal.as_str());
                if let Some((_, reply)) = self.waiting.remove(&call) {
                    // Sending fails only if the caller is gone.
                    let _ = reply.send(Err(error));
                }
            }
            DispatchEffect::HeartbeatAnswer(answer) => {
                if let Err(error) = &answer {
                    tracing::warn!(%error, "heartbeat refused");
                }
                self.heartbeat_answer = Some(answer);
            }
            DispatchEffect::LeaseEnded { lease, worker, end } => {
                self.metrics.ended(end);
                if !matches!(end, LeaseEnd::Finished(_) | LeaseEnd::Undelivered) {
                    tracing::info!(%lease, %worker, end = end.as_str(), "lease ended without a finish");
                }
            }
            DispatchEffect::WorkerJoined(worker) => tracing::info!(%worker, "worker joined"),
            DispatchEffect::WorkerRestarted(worker) => tracing::warn!(%worker, "worker restarted"),
            DispatchEffect::WorkerLost(worker) => {
                self.metrics.worker_lost(&worker);
                tracing::warn!(%worker, "worker lost");
            }
            DispatchEffect::LengthLearned {
                estimated_tokens,
                tokens,
            } => self.metrics.length_learned(estimated_tokens, tokens),
        }
    }

    /// Cleans up after a panic, when the core is a fresh one: fails the calls that waited in the old core.
    fn after_rebuild(&mut self) {
        self.heartbeat_answer = None;
        for (_, (_, reply)) in self.waiting.drain() {
            self.metrics.rejected("restarted");
            let _ = reply.send(Err(scheduler_unavailable(QUEUE_LOST)));
        }
        if self.draining {
            let now_ms = self.clock.now_ms();
            // If the core panics here as well, the scheduler merely grants leases while it shuts down.
            let _ = self
                .core
                .run(|core| core.apply(DispatchEvent::Drain, now_ms));
        }
    }
}
