//! An orderly stop: take nothing new, let what runs finish, give up after a grace period.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// Shared by everything that has to stop together. Cheap to clone.
#[derive(Clone)]
pub struct Drain {
    state: Arc<watch::Sender<State>>,
}

#[derive(Clone, Copy, Default)]
struct State {
    draining: bool,
    running: usize,
}

/// Something that runs; a drain waits until it is dropped.
pub struct InFlight {
    state: Arc<watch::Sender<State>>,
}

impl Default for Drain {
    fn default() -> Self {
        Drain::new()
    }
}

impl Drain {
    /// Nothing runs, nothing drains.
    pub fn new() -> Self {
        Drain {
            state: Arc::new(watch::Sender::new(State::default())),
        }
    }

    /// Registers something that runs, unless the drain has begun.
    pub fn enter(&self) -> Option<InFlight> {
        let mut entered = false;
        self.state.send_modify(|state| {
            if !state.draining {
                state.running += 1;
                entered = true;
            }
        });
        entered.then(|| InFlight {
            state: self.state.clone(),
        })
    }

    /// Begins the drain. Repeats are harmless.
    pub fn begin(&self) {
        self.state.send_modify(|state| state.draining = true);
    }

    /// Whether it has begun.
    pub fn is_draining(&self) -> bool {
        self.state.borrow().draining
    }

    /// How many run.
    pub fn running(&self) -> usize {
        self.state.borrow().running
    }

    /// Waits until it begins.
    pub async fn begun(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| state.draining)
            .await;
    }

    /// Waits until nothing runs, at most `grace`. Returns how many were left.
    pub async fn finished(&self, grace: Duration) -> usize {
        let mut receiver = self.state.subscribe();
        let _ = tokio::time::timeout(grace, receiver.wait_for(|state| state.running == 0)).await;
        self.running()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.running -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_waits_for_what_runs_and_admits_nothing_new() {
        let drain = Drain::new();
        let running = drain.enter().expect("open");
        drain.begin();
        assert!(drain.enter().is_none());
        assert_eq!(drain.finished(Duration::from_millis(1)).await, 1);
        drop(running);
        assert_eq!(drain.finished(Duration::from_secs(5)).await, 0);
    }
}
