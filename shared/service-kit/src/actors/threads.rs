//! Threads that are kept busy, and work that cannot begin anew. Neither can be an [`Actor`](super::Actor), and both
//! have the names and metrics of actors.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::registry::{self, Entry};
use super::restarts::Restarts;

/// Starts a thread that does `work`, once more after each panic, until it returns.
///
/// # Errors
/// The system refuses a thread.
pub fn start_thread(
    name: &'static str,
    mut work: impl FnMut() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let (entry, mut restarts) = (registry::entry(name), Restarts::new());
    let run = move || {
        // The work knows what a panic leaves half done, as with the state of any actor.
        while catch_unwind(AssertUnwindSafe(&mut work)).is_err() {
            std::thread::sleep(entry.panicked(&mut restarts));
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// Part of work that a process needs, and that cannot begin anew, since it takes its state with it. If this is
/// dropped by a panic, the process is not ready.
pub struct Sentinel(Arc<Entry>);

impl Sentinel {
    /// The sentinel of work of this name.
    pub fn new(name: &'static str) -> Self {
        Sentinel(registry::entry(name))
    }

    /// Counts a panic that the work itself caught.
    pub fn restarted(&self) {
        self.0.restarted();
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up();
        }
    }
}
