//! Work for the life of a process: actors, each under a supervisor.
//!
//! A panic ends the task that it happens in, and nobody hears of it. So every loop that outlives a request is the
//! body of an actor, which [`start`], [`start_on`] or [`start_with`] begins:
//!
//! * The **body** is a future on the runtime of its owner, so bodies run beside each other. It is made anew for each
//!   run. Whatever must outlive a panic belongs outside of it: into the closure that makes it, or into the mailbox.
//! * The **mailbox** has a limit. It outlives the body, so a message that waits is not lost with a panic. The message
//!   that the body works on at that moment is.
//! * The **supervisor** is an actix actor (`actors/supervisor.rs`). It begins the body anew after a panic, with a
//!   pause that grows. An actor that panics too often makes the process unready.
//!
//! Work that keeps a core busy has a thread of its own, and [`start_thread`] gives it the same restarts and metrics.
//! A [`Sentinel`] is for work that cannot begin anew.
//!
//! An [`Actor`] ends when its body returns, and when it is stopped or dropped.

mod mailbox;
mod registry;
mod restarts;
mod supervisor;
mod threads;

use std::future::Future;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use self::mailbox::Inbox;
pub(crate) use self::registry::{all_run, observe};
#[cfg(any(test, feature = "testing"))]
pub use self::registry::{kill, restarts, running};
pub use self::threads::{Sentinel, start_thread};

use self::mailbox::{Order, at_least};
use self::registry::{Entry, killed};
use self::supervisor::Supervisor;

/// An actor that runs. It is aborted when this is dropped.
pub struct Actor {
    order: watch::Sender<Order>,
    ended: CancellationToken,
    is_detached: bool,
}

/// Starts an actor on the runtime of the caller. `body` makes its body, once more after each panic.
pub fn start<F>(name: &'static str, body: impl Fn() -> F + Send + Sync + 'static) -> Actor
where
    F: Future<Output = ()> + Send + 'static,
{
    start_on(&Handle::current(), name, body)
}

/// As [`start`], on this runtime.
pub fn start_on<F>(
    runtime: &Handle,
    name: &'static str,
    body: impl Fn() -> F + Send + Sync + 'static,
) -> Actor
where
    F: Future<Output = ()> + Send + 'static,
{
    let order = watch::Sender::new(Order::Run);
    supervise(runtime, registry::entry(name), order, Order::Close, body)
}

/// The runtime of the supervisors' thread, for callers without one. Bodies must do little there, since they share it.
///
/// # Errors
/// The system refuses the thread.
pub fn shared_runtime() -> anyhow::Result<&'static Handle> {
    let thread = supervisor::thread().context("the thread of the supervisors is missing")?;
    Ok(&thread.runtime)
}

/// Starts an actor with a mailbox for `capacity` messages, on the runtime of the caller.
///
/// Its body should end when it has read all messages and the mailbox is closed: the senders are gone, or the actor is
/// asked to stop.
pub fn start_with<M, F>(
    name: &'static str,
    capacity: usize,
    body: impl Fn(Inbox<M>) -> F + Send + Sync + 'static,
) -> (mpsc::Sender<M>, Actor)
where
    M: Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(capacity);
    let order = watch::Sender::new(Order::Run);
    let entry = registry::entry(name);
    entry.add_mailbox(&sender);
    let (body, mailbox) = (Arc::new(body), Arc::new(Mutex::new(receiver)));
    let orders = order.subscribe();
    let with_inbox = move || {
        let (body, mailbox, orders) = (body.clone(), mailbox.clone(), orders.clone());
        async move {
            // A body before this one has given it back by its end.
            let receiver = mailbox.lock_owned().await;
            body(Inbox { receiver, orders }).await;
        }
    };
    let actor = supervise(&Handle::current(), entry, order, Order::Abort, with_inbox);
    (sender, actor)
}

/// Does work of a body that waits for a disk or keeps a core busy, on a thread for such work. A panic of the work is
/// one of the body.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime ends, and the body with it.
            Err(_) => std::future::pending().await,
        },
    }
}

/// Begins the body, and its supervisor. On the order `ending` the body is dropped.
fn supervise<F>(
    runtime: &Handle,
    entry: Arc<Entry>,
    order: watch::Sender<Order>,
    ending: Order,
    body: impl Fn() -> F + Send + Sync + 'static,
) -> Actor
where
    F: Future<Output = ()> + Send + 'static,
{
    let ended = CancellationToken::new();
    let (runtime, orders, body) = (runtime.clone(), order.subscribe(), Arc::new(body));
    let (entry_of_runs, end) = (entry.clone(), ended.clone());
    let run = move |pause: Duration| -> JoinHandle<()> {
        let (body, orders, end) = (body.clone(), orders.clone(), end.clone());
        let kills = entry_of_runs.kills();
        runtime.spawn(async move {
            // The body is made here, so that a panic of what makes it is treated as its own.
            let whole = async {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                body().await;
            };
            tokio::select! {
                biased;
                () = at_least(orders, ending) => {}
                () = killed(kills) => {}
                () = whole => {}
            }
            // Its owner hears of that here, without the way over the supervisors' thread.
            end.cancel();
        })
    };
    let first = run(Duration::ZERO);
    let guard = ended.clone().drop_guard();
    Supervisor::new(entry, run, guard).start(first);
    Actor {
        order,
        ended,
        is_detached: false,
    }
}

impl Actor {
    /// Asks the actor to stop, and waits until it has. Without a mailbox it stops at once. With one it first reads
    /// what is there; after `grace` it is aborted. Returns whether it stopped by itself.
    pub async fn stop(self, grace: Duration) -> bool {
        self.order.send_replace(Order::Close);
        let is_in_order = tokio::time::timeout(grace, self.ended.cancelled()).await;
        self.abort();
        self.ended.cancelled().await;
        is_in_order.is_ok()
    }

    /// Waits until the body has returned.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Ends the actor where its body waits next.
    pub fn abort(&self) {
        self.order.send_replace(Order::Abort);
    }

    /// Lets the actor run until its body returns, also when this is dropped.
    pub fn detached(mut self) -> Self {
        self.is_detached = true;
        self
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        if !self.is_detached {
            self.abort();
        }
    }
}

#[cfg(test)]
mod tests;
