//! The timeout of an engine's next token.

use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;

use crate::orders::Gate;

/// How often a held request looks whether it may go on, or whether its reader is to be told that it waits.
pub(super) const HELD_CHECK: Duration = Duration::from_secs(1);

/// A moment on two clocks: the usual one, and the one that stands still while a trainer's order holds everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Instant,
    pub(super) working_time: Instant,
}

impl Moment {
    pub(super) fn at(gate: &Gate, now: Instant) -> Self {
        Moment {
            now,
            working_time: gate.working_time(now),
        }
    }

    /// The end of a time of `ms` from now on, or the request's own deadline if that is earlier. Both ends are on the
    /// clock that stands still.
    fn end(self, ms: u64, request_deadline: Option<Instant>) -> Instant {
        let end = self.working_time + Duration::from_millis(ms);
        request_deadline.map_or(end, |deadline| deadline.min(end))
    }

    /// As [`Moment::end`], on the usual clock, if nothing is held meanwhile.
    pub(super) fn due(self, ms: u64, request_deadline: Option<Instant>) -> tokio::time::Instant {
        let end = self.end(ms, request_deadline);
        let left = end.saturating_duration_since(self.working_time);
        (self.now + left).into()
    }
}

/// The timeout of the next token, which every token restarts. No time passes while a trainer's order holds
/// everything.
pub(super) struct TokenTimeout {
    pub(super) due: Deadline,
    /// The end on the clock that stands still.
    end: Instant,
    /// The time when the request itself times out, on that clock.
    request_deadline: Option<Instant>,
    /// The engine has sent a token of this chunk.
    pub(super) has_output: bool,
}

impl TokenTimeout {
    /// Begins a timeout of `ms`, which ends no later than the request's own deadline.
    pub(super) fn new(ms: u64, request_deadline: Option<Instant>, moment: Moment) -> Self {
        TokenTimeout {
            due: Deadline::at(moment.due(ms, request_deadline)),
            end: moment.end(ms, request_deadline),
            request_deadline,
            has_output: false,
        }
    }

    /// Restarts the timeout.
    pub(super) fn restart(&mut self, ms: u64, moment: Moment) {
        self.end = moment.end(ms, self.request_deadline);
        self.due.set(moment.due(ms, self.request_deadline));
    }

    /// Looks again later, since the request is held.
    pub(super) fn look_again(&mut self, moment: Moment) {
        self.due.set((moment.now + HELD_CHECK).into());
    }

    /// Whether the time is up. Otherwise the rest of it is waited for.
    pub(super) fn is_over(&mut self, moment: Moment) -> bool {
        let left = self.end.saturating_duration_since(moment.working_time);
        if left.is_zero() {
            return true;
        }
        self.due.set((moment.now + left).into());
        false
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
