//! When a namespace that was left out in part is checked again for whether all of it fits.

use std::time::{Duration, Instant};

use refrain_service_kit::backoff::Backoff;

/// The longest pause, in multiples of the shortest.
const PAUSES_MAX: u32 = 64;

/// The pause before the next check.
///
/// It doubles each time that the namespace did not stay once it was taken over. A limit that is met only while no
/// request runs would otherwise be met again and again.
#[derive(Debug)]
pub(crate) struct TakeOverRetry {
    since: Instant,
    pause: Duration,
    backoff: Backoff,
}

impl TakeOverRetry {
    pub(crate) fn new(pause: Duration, now: Instant) -> Self {
        let mut backoff = Backoff::new(pause, pause.saturating_mul(PAUSES_MAX));
        TakeOverRetry {
            since: now,
            pause: backoff.pause(),
            backoff,
        }
    }

    /// Whether it is time to check a namespace, of which a part is left out if `lacks_capacity`.
    pub(crate) fn is_due(&mut self, lacks_capacity: bool, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) < self.pause {
            return false;
        }
        if !lacks_capacity {
            self.backoff.reset();
            self.pause = self.backoff.pause();
        }
        lacks_capacity
    }

    /// Notes a check that found no capacity.
    pub(crate) fn record_check(&mut self, now: Instant) {
        self.since = now;
    }

    /// Notes that the whole namespace was taken over again.
    pub(crate) fn record_take_over(&mut self, now: Instant) {
        self.since = now;
        self.pause = self.backoff.pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: u64 = 60;

    #[test]
    fn a_namespace_that_does_not_stay_is_taken_over_ever_more_seldom() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut retry = TakeOverRetry::new(Duration::from_secs(PAUSE), start);
        // A pause is drawn between its length and twice that.
        assert!(!retry.is_due(true, at(PAUSE - 1)) && !retry.is_due(false, at(2 * PAUSE)));
        assert!(retry.is_due(true, at(2 * PAUSE)));
        // A check alone makes the next one no rarer.
        let mut now = 2 * PAUSE;
        retry.record_check(at(now));
        assert!(!retry.is_due(true, at(now + PAUSE - 1)));
        now += 2 * PAUSE;
        assert!(retry.is_due(true, at(now)));
        retry.record_take_over(at(now));
        for factor in [4, 8, 16, 32, 64, 128, 128] {
            assert!(!retry.is_due(true, at(now + factor / 2 * PAUSE - 1)));
            now += factor * PAUSE;
            assert!(retry.is_due(true, at(now)), "{factor}");
            retry.record_take_over(at(now));
        }
        // Once the namespace stayed for a whole pause, the pauses are as at first.
        assert!(!retry.is_due(false, at(now + 2 * u64::from(PAUSES_MAX) * PAUSE)));
        assert!(retry.is_due(true, at(now + 2 * u64::from(PAUSES_MAX) * PAUSE)));
        retry.record_take_over(at(now));
        assert!(retry.is_due(true, at(now + 4 * PAUSE)));
    }
}
