//! A circuit breaker: calls to an engine that keeps failing fail at once for a while, instead of each waiting for it.

use std::time::{Duration, Instant};

/// Counts failures in a row. It has no clock: callers pass instants.
#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    failures_max: u32,
    open_for: Duration,
    failures: u32,
    open_until: Option<Instant>,
}

impl CircuitBreaker {
    /// Creates a breaker that opens for `open_for` after `failures_max` failures in a row.
    pub(crate) fn new(failures_max: u32, open_for: Duration) -> Self {
        CircuitBreaker {
            failures_max,
            open_for,
            failures: 0,
            open_until: None,
        }
    }

    /// Admits a call to the engine. Once an open breaker's time is over, one call at a time probes the engine, and
    /// the others are refused until it has answered.
    ///
    /// # Errors
    /// The time until the next call may be admitted.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<(), Duration> {
        match self.open_until {
            Some(until) if until > now => Err(until - now),
            Some(_) => {
                self.open_until = Some(now + self.open_for);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Records that the engine answered.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
        self.open_until = None;
    }

    /// Records that the engine did not answer, or not properly. Returns whether this opens the breaker.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.failures < self.failures_max {
            return false;
        }
        let opens = self.open_until.is_none();
        self.open_until = Some(now + self.open_for);
        opens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_lets_one_call_probe() {
        let second = Duration::from_secs(1);
        let mut breaker = CircuitBreaker::new(3, second);
        let start = Instant::now();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        breaker.succeeded();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        assert_eq!(breaker.admit(start), Ok(()));
        assert!(breaker.failed(start));
        assert_eq!(breaker.admit(start + second / 4), Err(second * 3 / 4));
        // One call probes the engine; the others are refused.
        assert_eq!(breaker.admit(start + second), Ok(()));
        assert_eq!(breaker.admit(start + second), Err(second));
        assert!(!breaker.failed(start + second));
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
        breaker.succeeded();
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
    }
}
