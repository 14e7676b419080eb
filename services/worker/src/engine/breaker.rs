//! A circuit breaker: an engine that keeps failing is left alone for a while, instead of every request waiting for it.

use std::time::{Duration, Instant};

/// Counts failures in a row. No clock: instants are handed in.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures_max: u32,
    open_for: Duration,
    failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    /// Opens for `open_for` after `failures_max` failures in a row.
    pub(crate) fn new(failures_max: u32, open_for: Duration) -> Self {
        Breaker {
            failures_max,
            open_for,
            failures: 0,
            open_until: None,
        }
    }

    /// Whether the engine may be asked. Once an open breaker's time is over, one caller at a time finds out, and the
    /// others wait on.
    ///
    /// # Errors
    /// How long to wait.
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

    /// The engine answered.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
        self.open_until = None;
    }

    /// The engine did not answer, or not as an engine. Returns whether the breaker opens by it.
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
    fn it_opens_after_failures_in_a_row_and_lets_one_find_out() {
        let second = Duration::from_secs(1);
        let mut breaker = Breaker::new(3, second);
        let start = Instant::now();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        breaker.succeeded();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        assert_eq!(breaker.admit(start), Ok(()));
        assert!(breaker.failed(start));
        assert_eq!(breaker.admit(start + second / 4), Err(second * 3 / 4));
        // One finds out; the others wait on.
        assert_eq!(breaker.admit(start + second), Ok(()));
        assert_eq!(breaker.admit(start + second), Err(second));
        assert!(!breaker.failed(start + second));
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
        breaker.succeeded();
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
        assert_eq!(breaker.admit(start + second * 2), Ok(()));
    }
}
