//! The actix actor beside the [`Dispatcher`](crate::dispatcher::Dispatcher): it keeps its timer, and applies what
//! comes by message: heartbeats, questions, and the drain.
//!
//! Such events may name thousands of leases, and their callers need no quick answer. So they are applied on the
//! actor's thread, and a mailbox of limited size holds those that wait.

use std::time::Duration;

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, ServedModel, WorkerReport};
use refrain_service_kit::tasks::Sentinel;
use tokio::sync::oneshot;

use crate::dispatch::DispatchState;
use crate::dispatcher::SharedDispatcher;

/// Messages that the mailbox holds. Further messages get 503.
const MAILBOX_MAX: usize = 4_096;

/// A message to the actor. A `reply` that is dropped unused means that the core panicked over the message.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum DispatchMessage {
    /// Set the timer: an event that was applied elsewhere needs a tick at this time.
    TickAt {
        due_ms: u64,
    },
    Heartbeat {
        heartbeat: Box<Heartbeat>,
        reply: oneshot::Sender<Result<HeartbeatReply, ApiError>>,
    },
    Models {
        reply: oneshot::Sender<Vec<ServedModel>>,
    },
    Workers {
        reply: oneshot::Sender<Vec<WorkerReport>>,
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

/// The actor. It stops with its thread, after which no lease is granted.
pub(crate) struct DispatchActor {
    dispatcher: SharedDispatcher,
    /// The timer for the next tick, if one is set.
    tick: Option<TickTimer>,
    _sentinel: Sentinel,
}

/// A timer that is set.
struct TickTimer {
    due_ms: u64,
    timer: SpawnHandle,
}

impl DispatchActor {
    pub(crate) fn new(dispatcher: SharedDispatcher) -> Self {
        DispatchActor {
            dispatcher,
            tick: None,
            _sentinel: Sentinel("dispatch"),
        }
    }

    /// Sets the timer, unless it fires earlier anyway.
    fn tick_at(&mut self, due_ms: u64, ctx: &mut Context<Self>) {
        if let Some(tick) = &self.tick {
            if tick.due_ms <= due_ms {
                return;
            }
            ctx.cancel_future(tick.timer);
        }
        let now_ms = self.dispatcher.lock().now_ms();
        let wait_ms = due_ms.saturating_sub(now_ms).max(1);
        let timer = ctx.run_later(Duration::from_millis(wait_ms), |actor, ctx| {
            actor.tick = None;
            let wanted_ms = {
                let mut dispatcher = actor.dispatcher.lock();
                dispatcher.tick();
                dispatcher.wanted_tick_ms()
            };
            if let Some(due_ms) = wanted_ms {
                actor.tick_at(due_ms, ctx);
            }
        });
        self.tick = Some(TickTimer { due_ms, timer });
    }

    /// Applies a message. Returns when a tick is needed, if the timer has to be set for it.
    fn answer(&self, message: DispatchMessage) -> Option<u64> {
        let mut dispatcher = self.dispatcher.lock();
        // Replies fail only for callers that are gone, so their results are ignored.
        match message {
            DispatchMessage::TickAt { due_ms } => return Some(due_ms),
            DispatchMessage::Heartbeat { heartbeat, reply } => {
                if let Some(answer) = dispatcher.heartbeat(*heartbeat) {
                    let _ = reply.send(answer);
                }
            }
            DispatchMessage::Models { reply } => {
                if let Some(models) = dispatcher.read(|core| core.models()) {
                    let _ = reply.send(models);
                }
            }
            DispatchMessage::Workers { reply } => {
                let now_ms = dispatcher.now_ms();
                if let Some(workers) = dispatcher.read(|core| core.worker_reports(now_ms)) {
                    let _ = reply.send(workers);
                }
            }
            DispatchMessage::Observe { reply } => {
                let now_ms = dispatcher.now_ms();
                if let Some(state) = dispatcher.read(|core| core.observe(now_ms)) {
                    let _ = reply.send(state);
                }
            }
            DispatchMessage::Drain { reply } => {
                dispatcher.drain();
                let _ = reply.send(());
            }
            #[cfg(test)]
            DispatchMessage::Panic => {
                dispatcher.read(|_| panic!("a test asked for it"));
            }
        }
        dispatcher.wanted_tick_ms()
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
        if let Some(due_ms) = self.answer(message) {
            self.tick_at(due_ms, ctx);
        }
    }
}
