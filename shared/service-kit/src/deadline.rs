//! Deadlines that are moved far more often than they pass, such as one that every event of a stream puts off.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// A deadline that may be moved while it is waited for.
///
/// A new timer for each event would enter and leave the runtime's timer wheel every time. Here the timer stays in
/// place while the deadline moves away. It is set again only when it fires too early.
pub struct Deadline {
    due: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Deadline {
    /// Creates a deadline at `due`.
    pub fn at(due: Instant) -> Self {
        Deadline {
            due,
            timer: Box::pin(sleep_until(due)),
        }
    }

    /// Creates a deadline that passes after `time`.
    pub fn after(time: Duration) -> Self {
        Self::at(Instant::now() + time)
    }

    /// Moves the deadline, later or earlier.
    pub fn set(&mut self, due: Instant) {
        self.due = due;
        if due < self.timer.deadline() {
            self.timer.as_mut().reset(due);
        }
    }

    /// Ready once the deadline has passed, until it is moved.
    pub fn poll_due(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if self.timer.deadline() >= self.due {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(self.due);
        }
    }

    /// Runs `work`, and returns `None` if it is not done when the deadline passes.
    pub async fn bound<F: Future>(&mut self, work: F) -> Option<F::Output> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => self.poll_due(context).map(|()| None),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const NEVER: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn work_that_is_done_is_not_cut_off() {
        let mut past = Deadline::at(Instant::now());
        assert_eq!(past.bound(async { 7 }).await, Some(7));
        let mut later = Deadline::after(NEVER);
        let slept = later.bound(tokio::time::sleep(SOON)).await;
        assert_eq!(slept, Some(()));
    }

    #[tokio::test(start_paused = true)]
    async fn it_passes_when_it_was_last_moved_to_and_not_before() {
        let mut deadline = Deadline::at(Instant::now());
        let due = Instant::now() + 3 * SOON;
        deadline.set(due - SOON);
        deadline.set(due);
        for _ in 0..2 {
            assert_eq!(deadline.bound(pending::<()>()).await, None);
            assert!(Instant::now() >= due);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_can_be_moved_forward() {
        let mut deadline = Deadline::after(NEVER);
        let due = Instant::now() + SOON;
        deadline.set(due);
        assert_eq!(deadline.bound(pending::<()>()).await, None);
        assert!(Instant::now() >= due);
        deadline.set(Instant::now() + NEVER);
        assert_eq!(
            deadline.bound(tokio::time::sleep(SOON)).await,
            Some(()),
            "it was moved away again"
        );
    }
}
