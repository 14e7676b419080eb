//! The actix shell of [`Dispatch`]: gives it the time, carries out its effects, and outlives its panics.
//!
//! A panic in the core loses the queue, the leases and the worker table. Waiting calls are told to try again,
//! which the gateway does; the next heartbeats fill the table again, running chunks included.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_service_kit::clock;
use refrain_service_kit::guard::Guarded;
use tokio::sync::oneshot;

use super::refusal::try_soon;
use super::{Dispatch, DispatchState, Effect, Event, LeaseEnd, Ticket};
use crate::config::SchedulerConfig;
use crate::metrics::SchedulerMetrics;

/// What those are told whose call went down with a core.
pub(crate) const QUEUE_LOST: &str = "the scheduler lost its queue; try again";

/// What the dispatcher is asked, with the way back for the answer. A way back that is dropped unused means
/// that the core panicked over it.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum Call {
    Submit {
        ticket: Ticket,
        request: Box<LeaseRequest>,
        reply: oneshot::Sender<Result<Lease, ApiError>>,
    },
    Withdraw {
        ticket: Ticket,
    },
    Undelivered {
        lease: Lease,
    },
    Finish(LeaseFinish),
    Heartbeat {
        heartbeat: Box<Heartbeat>,
        reply: oneshot::Sender<Result<HeartbeatReply, ApiError>>,
    },
    Models {
        reply: oneshot::Sender<Vec<ServedModel>>,
    },
    Observe {
        reply: oneshot::Sender<DispatchState>,
    },
    Drain {
        reply: oneshot::Sender<()>,
    },
    #[cfg(test)]
    Panic,
}

/// Milliseconds since 1970 that never step back: the system's clock is read once, the rest is elapsed time.
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
            .saturating_add(millis(self.start.elapsed()))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) struct DispatchActor {
    core: Guarded<Dispatch>,
    clock: Clock,
    /// Calls that wait for a lease.
    waiting: HashMap<Ticket, oneshot::Sender<Result<Lease, ApiError>>>,
    /// The newest epoch granted, for the core that follows a panic.
    epoch_last: Arc<AtomicU64>,
    draining: bool,
    metrics: SchedulerMetrics,
    mailbox_max: usize,
    /// The tick that is on its way.
    tick: Option<Tick>,
}

/// A timer that is set.
struct Tick {
    due_ms: u64,
    timer: SpawnHandle,
}

impl DispatchActor {
    pub(crate) fn new(config: SchedulerConfig, metrics: SchedulerMetrics) -> Self {
        let clock = Clock::new();
        let epoch_last = Arc::new(AtomicU64::new(0));
        let mailbox_max = config.mailbox_max;
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
        DispatchActor {
            core: Guarded::new("dispatch", rebuild, metrics.actor_restarts.clone()),
            clock,
            waiting: HashMap::new(),
            epoch_last,
            draining: false,
            metrics,
            mailbox_max,
            tick: None,
        }
    }

    /// Runs an event and whatever follows from it. Returns the answer to a heartbeat, if it was one.
    fn apply(&mut self, event: Event) -> Option<Result<HeartbeatReply, ApiError>> {
        let mut beat = None;
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now_ms = self.clock.now_ms();
            let Ok(effects) = self.core.run(|core| core.apply(event, now_ms)) else {
                self.rebuilt();
                break;
            };
            for effect in effects {
                self.carry_out(effect, &mut events, &mut beat);
            }
        }
        self.metrics.observe(self.core.core());
        beat
    }

    fn carry_out(
        &mut self,
        effect: Effect,
        events: &mut VecDeque<Event>,
        beat: &mut Option<Result<HeartbeatReply, ApiError>>,
    ) {
        match effect {
            Effect::Grant {
                ticket,
                lease,
                waited_ms,
            } => {
                self.epoch_last.store(lease.epoch, Ordering::Relaxed);
                self.metrics.granted(waited_ms);
                let id = lease.lease;
                let delivered = self
                    .waiting
                    .remove(&ticket)
                    .is_some_and(|reply| reply.send(Ok(lease)).is_ok());
                if !delivered {
                    events.push_back(Event::Undelivered { lease: id });
                }
            }
            Effect::Reject {
                ticket,
                error,
                refusal,
            } => {
                self.metrics.rejected(refusal.as_str());
                if let Some(reply) = self.waiting.remove(&ticket) {
                    // A caller that is gone needs no answer.
                    let _ = reply.send(Err(error));
                }
            }
            Effect::Beat(answer) => {
                if let Err(error) = &answer {
                    tracing::warn!(%error, "heartbeat refused");
                }
                *beat = Some(answer);
            }
            Effect::LeaseEnded { lease, worker, end } => {
                self.metrics.ended(end);
                if !matches!(end, LeaseEnd::Finished(_) | LeaseEnd::Undelivered) {
                    tracing::info!(%lease, %worker, end = end.as_str(), "lease ended without a finish");
                }
            }
            Effect::WorkerJoined(worker) => tracing::info!(%worker, "worker joined"),
            Effect::WorkerRestarted(worker) => tracing::warn!(%worker, "worker restarted"),
            Effect::WorkerLost(worker) => tracing::warn!(%worker, "worker lost"),
        }
    }

    /// Sees to it that the core gets its next tick in time. What puts a deadline off moves no timer: the tick comes too early
    /// then, and the next one is set by it.
    fn set_tick(&mut self, ctx: &mut Context<Self>) {
        let core = self.core.core();
        let pending_ms = self.tick.as_ref().map(|tick| tick.due_ms);
        if pending_ms.is_some_and(|pending_ms| pending_ms <= core.due_ms_min()) {
            return;
        }
        let Some(due_ms) = core.due_ms() else {
            return;
        };
        if let Some(tick) = &self.tick {
            if tick.due_ms <= due_ms {
                return;
            }
            ctx.cancel_future(tick.timer);
        }
        let wait_ms = due_ms.saturating_sub(self.clock.now_ms()).max(1);
        let timer = ctx.run_later(Duration::from_millis(wait_ms), |actor, ctx| {
            actor.tick = None;
            actor.apply(Event::Tick);
            actor.set_tick(ctx);
        });
        self.tick = Some(Tick { due_ms, timer });
    }

    /// The core panicked and is a fresh one: tells those who waited in the old one.
    fn rebuilt(&mut self) {
        for (_, reply) in self.waiting.drain() {
            self.metrics.rejected("restarted");
            let _ = reply.send(Err(try_soon(QUEUE_LOST)));
        }
        if self.draining {
            let now_ms = self.clock.now_ms();
            // A second panic here leaves a scheduler that grants leases while it goes away, no more.
            let _ = self.core.run(|core| core.apply(Event::Drain, now_ms));
        }
    }
}

impl Actor for DispatchActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.mailbox_max);
    }
}

impl Handler<Call> for DispatchActor {
    type Result = ();

    fn handle(&mut self, call: Call, ctx: &mut Self::Context) {
        self.answer(call);
        self.set_tick(ctx);
    }
}

impl DispatchActor {
    fn answer(&mut self, call: Call) {
        // Answers to callers that are gone go nowhere, on purpose.
        match call {
            Call::Submit {
                ticket,
                request,
                reply,
            } => {
                self.waiting.insert(ticket, reply);
                self.apply(Event::Submit {
                    ticket,
                    request: *request,
                });
            }
            Call::Withdraw { ticket } => {
                self.waiting.remove(&ticket);
                self.apply(Event::Withdraw { ticket });
            }
            Call::Undelivered { lease } => {
                self.apply(Event::Undelivered { lease: lease.lease });
            }
            Call::Finish(finish) => {
                self.apply(Event::Finish(finish));
            }
            Call::Heartbeat { heartbeat, reply } => {
                if let Some(answer) = self.apply(Event::Heartbeat(*heartbeat)) {
                    let _ = reply.send(answer);
                }
            }
            Call::Models { reply } => {
                if let Ok(models) = self.core.run(|core| core.models()) {
                    let _ = reply.send(models);
                } else {
                    self.rebuilt();
                }
            }
            Call::Observe { reply } => {
                let now_ms = self.clock.now_ms();
                if let Ok(state) = self.core.run(|core| core.observe(now_ms)) {
                    let _ = reply.send(state);
                } else {
                    self.rebuilt();
                }
            }
            Call::Drain { reply } => {
                self.draining = true;
                self.apply(Event::Drain);
                let _ = reply.send(());
            }
            #[cfg(test)]
            Call::Panic => {
                if self.core.run(|_| panic!("asked to")).is_err() {
                    self.rebuilt();
                }
            }
        }
    }
}
