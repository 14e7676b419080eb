//! The supervisor of an actor, and the thread that all supervisors of a process share. They only react to the end of
//! a run, so the thread sleeps.

use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix::fut::WrapFuture as _;
use actix::{
    Actor, ActorContext as _, ActorFutureExt as _, ArbiterHandle, AsyncContext as _, Context,
    System,
};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::DropGuard;

use super::registry::Entry;
use super::restarts::Restarts;

/// Runs the body of one actor again after each panic. It ends with the body, or with the body's runtime.
pub(super) struct Supervisor {
    entry: Arc<Entry>,
    /// Begins a run, after a pause.
    run: Box<dyn Fn(Duration) -> JoinHandle<()> + Send>,
    restarts: Restarts,
    first: Option<JoinHandle<()>>,
    _ended: DropGuard,
}

impl Supervisor {
    pub(super) fn new(
        entry: Arc<Entry>,
        run: impl Fn(Duration) -> JoinHandle<()> + Send + 'static,
        ended: DropGuard,
    ) -> Self {
        Supervisor {
            entry,
            run: Box::new(run),
            restarts: Restarts::new(),
            first: None,
            _ended: ended,
        }
    }

    /// Watches over the first run, which has begun.
    pub(super) fn start(mut self, first: JoinHandle<()>) {
        self.first = Some(first);
        let entry = self.entry.clone();
        let begin = move || drop(Actor::start(self));
        if !thread().is_some_and(|thread| thread.arbiter.spawn_fn(begin)) {
            tracing::error!(
                actor = entry.name,
                "the thread of the supervisors is missing"
            );
            entry.give_up();
        }
    }

    fn watch(&mut self, run: JoinHandle<()>, ctx: &mut Context<Self>) {
        let end = run.into_actor(self);
        ctx.spawn(end.map(|outcome, supervisor, ctx| supervisor.end(outcome, ctx)));
    }

    fn end(&mut self, outcome: Result<(), JoinError>, ctx: &mut Context<Self>) {
        if !outcome.is_err_and(|error| error.is_panic()) {
            ctx.stop();
            return;
        }
        let run = (self.run)(self.entry.panicked(&mut self.restarts));
        self.watch(run, ctx);
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(first) = self.first.take() {
            self.watch(first, ctx);
        }
    }
}

/// The thread of the supervisors.
pub(super) struct Thread {
    arbiter: ArbiterHandle,
    pub(super) runtime: Handle,
}

/// The thread of the supervisors, which the first actor of the process starts. `None` if the system refused it.
pub(super) fn thread() -> Option<&'static Thread> {
    static THREAD: OnceLock<Option<Thread>> = OnceLock::new();
    let start = || {
        let (started, thread) = sync_channel(1);
        let run = move || {
            let system = System::new();
            let _ = started.send(Thread {
                arbiter: System::current().arbiter().clone(),
                runtime: system.block_on(async { Handle::current() }),
            });
            if let Err(error) = system.run() {
                tracing::error!(%error, "the thread of the supervisors ended");
            }
        };
        let spawned = std::thread::Builder::new()
            .name("supervisors".into())
            .spawn(run);
        spawned.ok().and_then(|_| thread.recv().ok())
    };
    THREAD.get_or_init(start).as_ref()
}
