//! Work for the life of a process: actors, each under a supervisor.
//!
//! A panic ends the task that it happens in, and nobody hears of it. So every loop that outlives a request is the body
//! of an actor, which [`start`], [`start_on`] or [`start_with`] begins:
//!
//! * The **body** is a future on the runtime of its owner, so bodies run beside each other. It is made anew for each
//!   run. Whatever must outlive a panic belongs outside of it: into the closure that makes it, or into the mailbox.
//! * The **mailbox** has a limit. It outlives the body, so a message that waits is not lost with a panic. The message
//!   that the body works on at that moment is.
//! * The **supervisor** is an actix actor (`actors/supervisor.rs`). It begins the body anew after a panic, after a pause
//!   that grows. An actor that panics too often makes the process unready ([`all_run`]).
//!
//! An [`Actor`] ends when its body returns, and when it is stopped or dropped.

mod mailbox;
mod registry;
mod restarts;
mod supervisor;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use self::mailbox::Inbox;
pub(crate) use self::registry::{all_run, observe};
#[cfg(any(test, feature = "testing"))]
pub use self::registry::{kill, restarts, running};

use self::mailbox::{Order, at_least};
use self::registry::{Entry, Running, killed};
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
    let life = Life::Many(Order::Close);
    supervise(runtime, registry::entry(name), order, life, body)
}

/// Starts an actor that cannot begin anew, since its body takes its state with it. A panic makes the process unready.
/// Prefer [`start`].
pub fn start_once(name: &'static str, body: impl Future<Output = ()> + Send + 'static) -> Actor {
    let body = Mutex::new(Some(body));
    let only = move || OptionFuture::from(body.lock().take()).map(|_| ());
    let order = watch::Sender::new(Order::Run);
    let entry = registry::entry(name);
    supervise(&Handle::current(), entry, order, Life::One, only)
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
    let body = Arc::new(body);
    let slot = mailbox::Slot::new(receiver, order.subscribe());
    let with_inbox = move || {
        let (body, slot) = (body.clone(), slot.clone());
        async move { body(slot.open().await).await }
    };
    let life = Life::Many(Order::Abort);
    let actor = supervise(&Handle::current(), entry, order, life, with_inbox);
    (sender, actor)
}

/// Runs of a body.
#[derive(Clone, Copy)]
enum Life {
    One,
    /// It begins anew after each panic. On this order it is dropped.
    Many(Order),
}

/// Begins the body, and its supervisor.
fn supervise<F>(
    runtime: &Handle,
    entry: Arc<Entry>,
    order: watch::Sender<Order>,
    life: Life,
    body: impl Fn() -> F + Send + Sync + 'static,
) -> Actor
where
    F: Future<Output = ()> + Send + 'static,
{
    let ended = CancellationToken::new();
    let (runtime, orders, body) = (runtime.clone(), order.subscribe(), Arc::new(body));
    let (entry_of_runs, end) = (entry.clone(), ended.clone());
    let (begins_anew, ending) = match life {
        Life::One => (false, Order::Close),
        Life::Many(ending) => (true, ending),
    };
    let run = move |pause: Duration| -> JoinHandle<()> {
        let (body, orders, end) = (body.clone(), orders.clone(), end.clone());
        let kills = begins_anew.then(|| entry_of_runs.kills());
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
            // Who waits hears of it on its own runtime, without the way over the supervisor's thread.
            end.cancel();
        })
    };
    let first = run(Duration::ZERO);
    let (running, guard) = (Running::new(entry), ended.clone().drop_guard());
    Supervisor::new(running, begins_anew.then_some(run), guard).start(first);
    Actor {
        order,
        ended,
        is_detached: false,
    }
}

impl Actor {
    /// Asks the actor to stop, and waits until it has. Without a mailbox it stops at once. With one it reads first what
    /// is there; after `grace` it is aborted. Returns whether it stopped by itself.
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

    /// Whether the body has returned.
    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
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
