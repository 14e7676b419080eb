//! The timeout of an engine's next token.

use std::time::{Duration, Instant};

use refrain_service_kit::deadline::Deadline;

use crate::orders::Gate;

/// How often a held request looks whether it may go on, or whether its reader is to be told that it waits.
pub(super) const HELD_CHECK: Duration = Duration::from_secs(1);

/// A moment on two clocks: the usual one, and the one that stands still while a trainer's order holds everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Instant,
    working_time: Instant,
}

impl Moment {
    pub(super) fn at(gate: &Gate, now: Instant) -> Self {
        Moment {
            now,
            working_time: gate.working_time(now),
        }
    }
}

/// The timeout of the next token, which every token restarts. No time passes while a trainer's order holds
/// everything.
pub(super) struct TokenTimeout {
    /// The end on the usual clock, if nothing is held meanwhile.
    pub(super) due: Deadline,
    /// The end on the clock that stands still.
    end: Instant,
    /// The time when the request itself times out, on that clock.
    request_deadline: Option<Instant>,
}

impl TokenTimeout {
    /// Begins a timeout of `ms`, which ends no later than the request's own deadline.
    pub(super) fn new(ms: u64, request_deadline: Option<Instant>, moment: Moment) -> Self {
        let due = moment.now + Duration::from_millis(ms);
        let mut timeout = TokenTimeout {
            due: Deadline::at(due.into()),
            end: moment.working_time,
            request_deadline,
        };
        timeout.restart(ms, moment);
        timeout
    }

    /// Restarts the timeout.
    pub(super) fn restart(&mut self, ms: u64, moment: Moment) {
        let end = moment.working_time + Duration::from_millis(ms);
        self.end = self.request_deadline.map_or(end, |at| at.min(end));
        self.is_over(moment);
    }

    /// Looks again later, since the request is held.
    pub(super) fn look_again(&mut self, moment: Moment) {
        self.due.set((moment.now + HELD_CHECK).into());
    }

    /// Whether the time is up. Otherwise the rest of it is waited for.
    pub(super) fn is_over(&mut self, moment: Moment) -> bool {
        let left = self.end.saturating_duration_since(moment.working_time);
        self.due.set((moment.now + left).into());
        left.is_zero()
    }
}
