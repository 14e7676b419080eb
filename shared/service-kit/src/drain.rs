//! An orderly stop: take nothing new, let what is in flight finish, give up after a grace period.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Shared by everything that has to stop together. Cheap to clone.
#[derive(Clone, Default)]
pub struct Drain {
    draining: CancellationToken,
    in_flight: TaskTracker,
}

/// A piece of work in flight. A drain waits until it is dropped.
pub type InFlight = TaskTrackerToken;

impl Drain {
    /// Creates a drain that has not begun, with nothing in flight.
    pub fn new() -> Self {
        Drain::default()
    }

    /// Registers a piece of work, unless the drain has begun.
    pub fn enter(&self) -> Option<InFlight> {
        // The token comes first: a drain that begins between the two lines waits for it, and then it is dropped.
        let token = self.in_flight.token();
        (!self.is_draining()).then_some(token)
    }

    /// Begins the drain. Repeats are harmless.
    pub fn begin(&self) {
        self.draining.cancel();
    }

    /// Whether the drain has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Number of pieces of work in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Waits until the drain begins.
    pub async fn begun(&self) {
        self.draining.cancelled().await;
    }

    /// Waits until nothing is in flight, at most `grace`. Returns how many pieces of work are left.
    pub async fn finished(&self, grace: Duration) -> usize {
        // Only a closed tracker can be waited for. That forbids nothing: it still takes new work.
        self.in_flight.close();
        let _ = tokio::time::timeout(grace, self.in_flight.wait()).await;
        self.in_flight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_what_is_in_flight_and_admits_nothing_new() {
        let drain = Drain::new();
        assert_eq!(drain.finished(Duration::from_secs(5)).await, 0);
        let work = drain.enter().expect("the drain has not begun");
        assert!(!drain.is_draining());
        drain.begin();
        drain.begun().await;
        assert!(drain.enter().is_none());
        assert_eq!(drain.in_flight(), 1);
        assert_eq!(drain.finished(Duration::from_secs(5)).await, 1);
        let waiting = tokio::spawn({
            let drain = drain.clone();
            async move { drain.finished(Duration::from_secs(3_600)).await }
        });
        tokio::task::yield_now().await;
        drop(work);
        assert_eq!(waiting.await.unwrap(), 0);
    }
}
