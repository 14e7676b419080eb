//! The actors of this process by their names, for its metrics and its readiness.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;
#[cfg(any(test, feature = "testing"))]
use tokio::sync::watch;

use super::restarts::{Restart, Restarts};

/// All names that actors of this process had so far. They are in the program, so there are few.
static ENTRIES: Mutex<BTreeMap<&'static str, Arc<Entry>>> = Mutex::new(BTreeMap::new());

/// Names of actors that panicked too often, or cannot begin anew.
static LOST: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Number of messages that wait in a mailbox. `None` once it is closed for good.
type Waiting = Box<dyn Fn() -> Option<usize> + Send>;

/// The actors of one name.
pub(super) struct Entry {
    pub(super) name: &'static str,
    restarts: AtomicU64,
    mailboxes: Mutex<Vec<Waiting>>,
    #[cfg(any(test, feature = "testing"))]
    kills: watch::Sender<u64>,
}

/// A test's wish that a run panics.
pub(super) struct Kills(#[cfg(any(test, feature = "testing"))] watch::Receiver<u64>);

pub(super) fn entry(name: &'static str) -> Arc<Entry> {
    let new = || {
        Arc::new(Entry {
            name,
            restarts: AtomicU64::new(0),
            mailboxes: Mutex::default(),
            #[cfg(any(test, feature = "testing"))]
            kills: watch::Sender::new(0),
        })
    };
    ENTRIES.lock().entry(name).or_insert_with(new).clone()
}

impl Entry {
    pub(super) fn add_mailbox<M: Send + 'static>(&self, sender: &mpsc::Sender<M>) {
        let weak = sender.downgrade();
        let waiting = move || {
            weak.upgrade()
                .map(|held| held.max_capacity() - held.capacity())
        };
        self.mailboxes.lock().push(Box::new(waiting));
    }

    /// Counts a restart.
    pub(super) fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the panic of an actor. Returns the pause before it begins anew.
    pub(super) fn panicked(&self, restarts: &mut Restarts) -> Duration {
        let Restart { pause, is_too_many } = restarts.next(Instant::now());
        self.restarted();
        tracing::error!(
            actor = self.name,
            ?pause,
            "an actor panicked, and begins anew"
        );
        if is_too_many {
            self.give_up();
        }
        pause
    }

    /// Makes the process unready for good.
    pub(super) fn give_up(&self) {
        if LOST.lock().insert(self.name) {
            tracing::error!(
                actor = self.name,
                "an actor of this process is lost by panics, so it is no longer ready; restart it"
            );
        }
    }

    pub(super) fn kills(&self) -> Kills {
        Kills(
            #[cfg(any(test, feature = "testing"))]
            self.kills.subscribe(),
        )
    }
}

/// Panics when a test asks for it. It never returns.
pub(super) async fn killed(kills: Kills) {
    #[cfg(any(test, feature = "testing"))]
    if { kills }.0.changed().await.is_ok() {
        std::panic::resume_unwind(Box::new("a test asked for it"));
    }
    #[cfg(not(any(test, feature = "testing")))]
    let _ = kills;
    std::future::pending::<()>().await;
}

/// Whether all actors of this process run.
///
/// # Errors
/// One has panicked too often, or cannot begin anew; the text is for `/readyz`.
pub(crate) fn all_run() -> Result<(), String> {
    match LOST.lock().first() {
        None => Ok(()),
        Some(name) => Err(format!(
            "the actor \"{name}\" is lost by panics; the log says where. Restart this process"
        )),
    }
}

/// Shows each name with its restarts so far, and the messages in its mailboxes if it has any.
pub(crate) fn observe(mut show: impl FnMut(&'static str, u64, Option<usize>)) {
    let entries: Vec<Arc<Entry>> = ENTRIES.lock().values().cloned().collect();
    for entry in entries {
        let mut mailboxes = entry.mailboxes.lock();
        let had_mailbox = !mailboxes.is_empty();
        let mut waiting = 0;
        mailboxes.retain(|mailbox| mailbox().inspect(|count| waiting += count).is_some());
        let restarts = entry.restarts.load(Ordering::Relaxed);
        show(entry.name, restarts, had_mailbox.then_some(waiting));
    }
}

/// Names of all actors that run in this process and that [`kill`] reaches.
#[cfg(any(test, feature = "testing"))]
pub fn running() -> Vec<&'static str> {
    let entries = ENTRIES.lock();
    let runs = |entry: &&Arc<Entry>| entry.kills.receiver_count() > 0;
    entries
        .values()
        .filter(runs)
        .map(|entry| entry.name)
        .collect()
}

/// Restarts so far of the actors of this name.
#[cfg(any(test, feature = "testing"))]
pub fn restarts(name: &'static str) -> u64 {
    entry(name).restarts.load(Ordering::Relaxed)
}

/// Makes all actors of this name panic where they wait.
#[cfg(any(test, feature = "testing"))]
pub fn kill(name: &'static str) {
    entry(name).kills.send_modify(|count| *count += 1);
}
