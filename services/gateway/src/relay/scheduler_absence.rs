//! A scheduler that cannot be reached: how long a request waits for it, and when it asks again. No clock and no I/O.
//!
//! A restart of the scheduler takes seconds, and nothing is wrong with any request meanwhile. Its place in the queue
//! is lost, but asking again gives it another one.

use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::backoff::Backoff;

/// Longest nominal pause between two calls. A restarted scheduler is found within twice this.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Time after which a client may try again whose request has waited in vain.
const RETRY_AFTER_MS: u64 = 5_000;

/// The absence of the scheduler, as one choice sees it.
#[derive(Debug)]
pub(crate) struct SchedulerAbsence {
    /// How long a request waits for the scheduler.
    wait: Duration,
    backoff: Backoff,
    /// When the absence was noticed; `None` while the scheduler answers.
    since: Option<Instant>,
}

impl SchedulerAbsence {
    /// Creates the state of a scheduler that answers. `first_pause` is about the first pause between two calls.
    pub(crate) fn new(wait: Duration, first_pause: Duration) -> Self {
        SchedulerAbsence {
            wait,
            backoff: Backoff::new(first_pause, PAUSE_MAX),
            since: None,
        }
    }

    /// Whether an error means that the scheduler is absent. Other errors are its answer to the request. Where an
    /// earlier call of the request overtook this one while the scheduler stood still, this one has no answer.
    pub(crate) fn is_shown_by(error: &ApiError) -> bool {
        use ErrorKind::{Conflict, Timeout, Upstream};
        matches!(error.kind, Upstream | Timeout | Conflict)
            || error.has_code(code::SCHEDULER_UNAVAILABLE)
            || error.has_code(code::SERVICE_UNREACHABLE)
    }

    /// Returns the pause after a call that failed with such an error, or with another one that is waited for as long.
    ///
    /// # Errors
    /// The error that ends the request, which has waited long enough.
    pub(crate) fn call_failed(
        &mut self,
        error: ApiError,
        now: Instant,
    ) -> Result<Duration, ApiError> {
        let since = *self.since.get_or_insert(now);
        let left = self
            .wait
            .saturating_sub(now.saturating_duration_since(since));
        if left.is_zero() {
            return Err(match Self::is_shown_by(&error) {
                true => unreachable(error),
                false => error,
            });
        }
        let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        // The last call is made when the wait ends.
        Ok(self.backoff.pause().max(hint).min(left))
    }

    /// Notes that the scheduler answered.
    pub(crate) fn call_answered(&mut self) {
        if self.since.take().is_some() {
            self.backoff.reset();
        }
    }
}

fn unreachable(error: ApiError) -> ApiError {
    let message = match error.kind {
        ErrorKind::Conflict => {
            "the scheduler of this mesh goes by another call of this request; try again later"
        }
        _ => "the scheduler of this mesh cannot be reached; try again later",
    };
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SCHEDULER_UNAVAILABLE)
        .with_retry_after_ms(RETRY_AFTER_MS)
        .with_detail(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(10);
    const PAUSE: Duration = Duration::from_millis(50);

    fn unreached() -> ApiError {
        ApiError::new(
            ErrorKind::Upstream,
            "a service of the mesh cannot be reached",
        )
    }

    /// Calls until the request gives up. Returns how long that took and the number of calls.
    fn call_in_vain(absence: &mut SchedulerAbsence, start: Instant) -> (Duration, usize) {
        let mut now = start;
        for calls in 1..10_000 {
            match absence.call_failed(unreached(), now) {
                Ok(pause) => now += pause,
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::Unavailable);
                    assert_eq!(error.code.as_deref(), Some(code::SCHEDULER_UNAVAILABLE));
                    assert!(error.retry_after_ms.is_some());
                    return (now - start, calls);
                }
            }
        }
        panic!("the request never gives up");
    }

    #[test]
    fn a_request_waits_as_long_as_configured_and_calls_seldom() {
        let mut absence = SchedulerAbsence::new(WAIT, PAUSE);
        let start = Instant::now();
        let (waited, calls) = call_in_vain(&mut absence, start);
        assert_eq!(waited, WAIT);
        // In the end a pause is between PAUSE_MAX and twice that.
        assert!((10..40).contains(&calls), "{calls} calls");
        // After an answer the wait begins anew.
        absence.call_answered();
        assert_eq!(call_in_vain(&mut absence, start).0, WAIT);
        let mut no_wait = SchedulerAbsence::new(Duration::ZERO, PAUSE);
        assert_eq!(call_in_vain(&mut no_wait, start), (Duration::ZERO, 1));
    }

    #[test]
    fn a_pause_is_at_least_the_hint_of_the_scheduler() {
        let mut absence = SchedulerAbsence::new(WAIT, PAUSE);
        let hinted = unreached().with_retry_after_ms(1_500);
        let decision = absence.call_failed(hinted, Instant::now());
        assert_eq!(decision, Ok(Duration::from_millis(1_500)));
    }
}
