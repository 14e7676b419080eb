//! How long an engine's next word is waited for.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;

/// What is left of it.
pub(super) struct Patience {
    due: Deadline,
    /// When the request's own time is up.
    deadline: Option<Instant>,
    /// It has said something.
    pub(super) has_output: bool,
}

impl Patience {
    /// For so long, and never past the request's own deadline.
    pub(super) fn new(ms: u64, deadline: Option<Instant>, now: Instant) -> Self {
        Patience {
            due: Deadline::at(due(ms, deadline, now)),
            deadline,
            has_output: false,
        }
    }

    /// Waits for so long from now on.
    pub(super) fn renew(&mut self, ms: u64, now: Instant) {
        self.due.set(due(ms, self.deadline, now));
    }

    /// Ready when it has come to its end.
    pub(super) fn poll_spent(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.due.poll_due(context)
    }

    /// What `work` comes to, or `None` if that took too long.
    pub(super) async fn bound<F: Future>(&mut self, work: F) -> Option<F::Output> {
        self.due.bound(work).await
    }

    /// The error of an engine that has said nothing for so long.
    pub(super) fn spent(&self) -> ApiError {
        let what = if self.has_output {
            "a token"
        } else {
            "its first token"
        };
        ApiError::new(
            ErrorKind::Timeout,
            format!("the engine did not give {what} in time"),
        )
        .with_code(code::ENGINE_TIMEOUT)
    }
}

/// So long from now, or when the request's time is up, if that comes first.
pub(super) fn due(ms: u64, deadline: Option<Instant>, now: Instant) -> tokio::time::Instant {
    let due = now + Duration::from_millis(ms);
    deadline.map_or(due, |deadline| deadline.min(due)).into()
}
