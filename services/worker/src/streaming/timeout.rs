//! The timeout of an engine's next token.

use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;

/// The timeout of the next token, which every token restarts.
pub(super) struct TokenTimeout {
    pub(super) due: Deadline,
    /// The time when the request itself times out.
    request_deadline: Option<Instant>,
    /// The engine has sent a token of this chunk.
    pub(super) has_output: bool,
}

impl TokenTimeout {
    /// Begins a timeout of `ms`, which ends no later than the request's own deadline.
    pub(super) fn new(ms: u64, request_deadline: Option<Instant>, now: Instant) -> Self {
        TokenTimeout {
            due: Deadline::at(due(ms, request_deadline, now)),
            request_deadline,
            has_output: false,
        }
    }

    /// Restarts the timeout.
    pub(super) fn restart(&mut self, ms: u64, now: Instant) {
        self.due.set(due(ms, self.request_deadline, now));
    }

    /// The error of an engine that sent no token in time.
    pub(super) fn error(&self) -> ApiError {
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

/// `ms` from now on, or the request's own deadline if that is earlier.
pub(super) fn due(
    ms: u64,
    request_deadline: Option<Instant>,
    now: Instant,
) -> tokio::time::Instant {
    let due = now + Duration::from_millis(ms);
    request_deadline
        .map_or(due, |deadline| deadline.min(due))
        .into()
}
