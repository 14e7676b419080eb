//! The actix actor around [`Dispatch`]. It supplies the time, carries out effects, and survives panics of the core.
//!
//! A panic in the core loses the queue, the leases and the worker table. Waiting calls get an error on which the
//! gateway tries again. The next heartbeats refill the worker table, including the running chunks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, Lease, LeaseRequest, ServedModel};
use refrain_service_kit::clock;
use refrain_service_kit::guard::{Guarded, Panicked};
use tokio::sync::oneshot;

use crate::config::SchedulerConfig;
use crate::dispatch::{
    Dispatch, DispatchEffect, DispatchEvent, DispatchState, LeaseCallId, LeaseEnd,
    scheduler_unavailable,
};
use crate::metrics::SchedulerMetrics;

/// Messages that the mailbox holds. It only absorbs bursts, since the core has the queue. Further messages get 503.
const MAILBOX_MAX: usize = 4_096;

/// The error for calls that were lost in a panic of the core.
pub(crate) const QUEUE_LOST: &str = "the scheduler lost its queue; try again";

/// A message to the dispatcher. A `reply` that is dropped unused means that the core panicked over the message.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum DispatchMessage {
    Submit {
        call: LeaseCallId,
        request: Box<LeaseRequest>,
        reply: oneshot::Sender<Result<Lease, ApiError>>,
    },
    /// An event that nobody waits for.
    Event(Box<DispatchEvent>),
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

/// The dispatcher: the core and the calls that wait for its answers.
pub(crate) struct DispatchActor {
    core: Guarded<Dispatch>,
    clock: Clock,
    /// Calls that wait for a lease.
    waiting: HashMap<LeaseCallId, oneshot::Sender<Result<Lease, ApiError>>>,
    /// The reply to the heartbeat that is applied now.
    heartbeat_reply: Option<oneshot::Sender<Result<HeartbeatReply, ApiError>>>,
    /// The newest epoch granted, for the core that follows a panic.
    epoch_last: Arc<AtomicU64>,
    draining: bool,
    metrics: SchedulerMetrics,
    /// The timer for the next tick, if one is set.
    tick: Option<TickTimer>,
}

/// A timer that is set.
struct TickTimer {
    due_ms: u64,
    timer: SpawnHandle,
}

impl DispatchActor {
    pub(crate) fn new(config: SchedulerConfig, metrics: SchedulerMetrics) -> Self {
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
        DispatchActor {
            core: Guarded::new("dispatch", rebuild, metrics.actor_restarts.clone()),
            clock,
            waiting: HashMap::new(),
            heartbeat_reply: None,
            epoch_last,
            draining: false,
            metrics,
            tick: None,
        }
    }

    /// Applies an event and all events that follow from it.
    fn apply(&mut self, event: DispatchEvent) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
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
                let id = lease.lease;
                let delivered = self
                    .waiting
                    .remove(&call)
                    .is_some_and(|reply| reply.send(Ok(lease)).is_ok());
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
                if let Some(reply) = self.waiting.remove(&call) {
                    // Sending fails only if the caller is gone.
                    let _ = reply.send(Err(error));
                }
            }
            DispatchEffect::HeartbeatAnswer(answer) => {
                if let Err(error) = &answer {
                    tracing::warn!(%error, "heartbeat refused");
                }
                if let Some(reply) = self.heartbeat_reply.take() {
                    let _ = reply.send(answer);
                }
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

    /// Sets the timer so that the core gets its next tick in time. An event that postpones a deadline does not move
    /// the timer: the tick then comes early, and sets the timer again.
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
            actor.apply(DispatchEvent::Tick);
            actor.set_tick(ctx);
        });
        self.tick = Some(TickTimer { due_ms, timer });
    }

    /// Cleans up after a panic, when the core is a fresh one: fails the calls that waited in the old core.
    fn after_rebuild(&mut self) {
        self.heartbeat_reply = None;
        for (_, reply) in self.waiting.drain() {
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

impl Actor for DispatchActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Handler<DispatchMessage> for DispatchActor {
    type Result = ();

    fn handle(&mut self, message: DispatchMessage, ctx: &mut Self::Context) {
        self.answer(message);
        self.set_tick(ctx);
    }
}

impl DispatchActor {
    fn answer(&mut self, message: DispatchMessage) {
        // Replies fail only for callers that are gone, so their results are ignored.
        match message {
            DispatchMessage::Submit {
                call,
                request,
                reply,
            } => {
                self.waiting.insert(call, reply);
                self.apply(DispatchEvent::Submit {
                    call,
                    request: *request,
                });
            }
            DispatchMessage::Event(event) => {
                if let DispatchEvent::Withdraw { call } = *event {
                    self.waiting.remove(&call);
                }
                self.apply(*event);
            }
            DispatchMessage::Heartbeat { heartbeat, reply } => {
                self.heartbeat_reply = Some(reply);
                self.apply(DispatchEvent::Heartbeat(*heartbeat));
            }
            DispatchMessage::Models { reply } => self.read(reply, |core| core.models()),
            DispatchMessage::Observe { reply } => {
                let now_ms = self.clock.now_ms();
                self.read(reply, |core| core.observe(now_ms));
            }
            DispatchMessage::Drain { reply } => {
                self.draining = true;
                self.apply(DispatchEvent::Drain);
                let _ = reply.send(());
            }
            #[cfg(test)]
            DispatchMessage::Panic => {
                self.read(oneshot::channel().0, |_| panic!("a test asked for it"));
            }
        }
    }

    fn read<A>(&mut self, reply: oneshot::Sender<A>, read: impl FnOnce(&Dispatch) -> A) {
        match self.core.run(|core| read(core)) {
            Ok(answer) => drop(reply.send(answer)),
            Err(Panicked) => self.after_rebuild(),
        }
    }
}
