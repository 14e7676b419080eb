//! The core [`Dispatch`] with what surrounds it: the time, the calls that wait for its answers, and the recovery from
//! its panics.
//!
//! All callers share it behind a lock that is held for one event, and apply their events themselves: a message to
//! another thread and an answer back would cost two wake-ups of sleeping threads, which is more than the event.
//! Heartbeats and questions may name thousands of leases. They take turns, so that requests wait for one at most, and
//! a limited number of them waits for its turn. An actor keeps the timer.
//!
//! A panic in the core loses the queue, the leases and the worker table. Waiting calls get an error on which the
//! gateway tries again. The next heartbeats refill the worker table, including the running chunks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, Lease, LeaseRequest};
use refrain_protocol::{ApiError, RequestId};
use refrain_service_kit::clock;
use refrain_service_kit::guard::{Guarded, Panicked};
use tokio::sync::{Notify, Semaphore, oneshot};

use crate::config::SchedulerConfig;
use crate::dispatch::{
    Dispatch, DispatchEffect, DispatchEvent, LeaseCallId, LeaseEnd, scheduler_unavailable,
};
use crate::event_log;
use crate::leadership::Leadership;
use crate::metrics::SchedulerMetrics;

/// The error for calls that were lost in a panic of the core.
pub(crate) const QUEUE_LOST: &str = "the scheduler lost its queue; try again";

/// Callers that wait for their turn. Further ones get 503.
const WAITING_MAX: usize = 4_096;

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
pub(crate) struct SharedDispatcher(Arc<Shared>);

struct Shared {
    /// It is held for one event and never across an `await`.
    dispatcher: Mutex<Dispatcher>,
    /// Places of the callers that wait for their turn.
    places: Semaphore,
    turn: tokio::sync::Mutex<()>,
    /// A tick is needed earlier than the timer is set.
    earlier: Notify,
}

impl SharedDispatcher {
    pub(crate) fn new(
        config: SchedulerConfig,
        metrics: SchedulerMetrics,
        leadership: Leadership,
    ) -> Self {
        SharedDispatcher(Arc::new(Shared {
            dispatcher: Mutex::new(Dispatcher::new(config, metrics, leadership)),
            places: Semaphore::new(WAITING_MAX),
            turn: tokio::sync::Mutex::default(),
            earlier: Notify::new(),
        }))
    }

    /// Applies a change at once, for a request that waits.
    pub(crate) fn apply<A>(&self, change: impl FnOnce(&mut Dispatcher) -> A) -> A {
        let (answer, is_earlier) = {
            let mut dispatcher = self.0.dispatcher.lock();
            let answer = change(&mut dispatcher);
            (answer, dispatcher.wants_earlier_tick())
        };
        if is_earlier {
            self.0.earlier.notify_one();
        }
        answer
    }

    /// Applies a change in its turn, for a caller that is in no hurry. `None`: too many wait for theirs.
    pub(crate) async fn apply_in_turn<A>(
        &self,
        change: impl FnOnce(&mut Dispatcher) -> A,
    ) -> Option<A> {
        let _place = self.0.places.try_acquire().ok()?;
        let _turn = self.0.turn.lock().await;
        Some(self.apply(change))
    }

    /// Keeps the timer: applies a tick whenever one is due.
    pub(crate) async fn keep_time(self) {
        loop {
            let due = self.0.dispatcher.lock().set_timer();
            let timer = OptionFuture::from(due.map(tokio::time::sleep));
            tokio::select! {
                () = self.0.earlier.notified() => {}
                Some(()) = timer => self.apply(Dispatcher::tick),
            }
        }
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
    leadership: Leadership,
    /// When the next tick is due, if one is set or was asked for.
    tick_due_ms: Option<u64>,
}

impl Dispatcher {
    fn new(config: SchedulerConfig, metrics: SchedulerMetrics, leadership: Leadership) -> Self {
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
            leadership,
            tick_due_ms: None,
        }
    }

    /// Takes a call for a lease. The answer comes by `reply`, at once or later.
    pub(crate) fn submit(&mut self, call: LeaseCallId, request: LeaseRequest, reply: LeaseReply) {
        if let Err(error) = self.leadership.check() {
            let _ = reply.send(Err(error));
            return;
        }
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

    /// Takes note that this process leads, or leads no more. Then it refuses all waiting calls, whose callers ask the
    /// scheduler that leads.
    pub(crate) fn follow_leadership(&mut self) {
        self.metrics.led(self.leadership.leads());
        let Err(error) = self.leadership.check() else {
            return;
        };
        let waiting: Vec<_> = self.waiting.drain().collect();
        for (call, (_, reply)) in waiting {
            let _ = reply.send(Err(error.clone()));
            self.apply(DispatchEvent::Withdraw { call });
        }
    }

    /// Applies the tick whose timer has fired.
    fn tick(&mut self) {
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
        // The gauges of all schedulers add up to those of the leader.
        if self.leadership.leads() {
            self.metrics.observe(self.core.core());
        }
    }

    /// Reads from the core, with the present time. `None` if it panicked.
    pub(crate) fn read<A>(&mut self, read: impl FnOnce(&Dispatch, u64) -> A) -> Option<A> {
        let now_ms = self.clock.now_ms();
        match self.core.run(|core| read(core, now_ms)) {
            Ok(answer) => Some(answer),
            Err(Panicked) => {
                self.after_rebuild();
                None
            }
        }
    }

    /// Whether the core needs a tick before the timer fires. An event that postpones a deadline does not move the
    /// timer: the tick then comes early, and sets the timer again.
    fn wants_earlier_tick(&mut self) -> bool {
        let core = self.core.core();
        let is_set_for = |due_ms: u64| self.tick_due_ms.is_some_and(|set_ms| set_ms <= due_ms);
        if is_set_for(core.due_ms_min()) {
            return false;
        }
        let due_ms = core.due_ms().filter(|due_ms| !is_set_for(*due_ms));
        self.tick_due_ms = due_ms.or(self.tick_due_ms);
        due_ms.is_some()
    }

    /// Sets the timer for the next tick. Returns the time until then, if a tick is needed at all.
    fn set_timer(&mut self) -> Option<Duration> {
        self.tick_due_ms = self.core.core().due_ms();
        let wait_ms = self.tick_due_ms?.saturating_sub(self.clock.now_ms());
        Some(Duration::from_millis(wait_ms.max(1)))
    }

    fn carry_out(&mut self, effect: DispatchEffect, events: &mut VecDeque<DispatchEvent>) {
        match effect {
            DispatchEffect::Grant {
                call,
                lease,
                waited_ms,
                placed,
            } => {
                // Another scheduler may have taken over while the call waited.
                if let Err(error) = self.leadership.check() {
                    if let Some((_, reply)) = self.waiting.remove(&call) {
                        let _ = reply.send(Err(error));
                    }
                    events.push_back(DispatchEvent::Undelivered { lease: lease.lease });
                    return;
                }
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
                // One that stands by learns of ends by heartbeats alone.
                if !self.leadership.leads() {
                    return;
                }
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use futures_util::stream::{FuturesUnordered, StreamExt as _};
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    #[tokio::test]
    async fn events_that_are_in_no_hurry_take_turns_and_too_many_are_refused() {
        let metrics = Metrics::new().unwrap();
        let metrics = SchedulerMetrics::register(metrics.registry()).unwrap();
        let alone = Leadership::alone();
        let shared = SharedDispatcher::new(SchedulerConfig::default(), metrics, alone);
        let turn = shared.0.turn.lock().await;
        let calls = (0..WAITING_MAX).map(|_| shared.apply_in_turn(|_| ()));
        let mut calls: FuturesUnordered<_> = calls.collect();
        assert!(calls.next().now_or_never().is_none(), "all wait");
        assert!(shared.apply_in_turn(|_| ()).await.is_none());
        // Those of requests do not wait.
        shared.apply(|_| ());
        drop(turn);
        let applied: Vec<Option<()>> = calls.collect().await;
        assert_eq!(applied, vec![Some(()); WAITING_MAX]);
    }
}
