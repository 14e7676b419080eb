//! Growing pauses with jitter, between calls to a draft store that refuses or cannot be reached.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};

/// Pauses that double from `min` to `max` at most, each lengthened by a random part of itself.
///
/// All workers of a mesh lose their store at the same moment. Without the random part they would also return at the
/// same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    rules: ExponentialBuilder,
    delays: <ExponentialBuilder as BackoffBuilder>::Backoff,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        let rules = ExponentialBuilder::new()
            .with_min_delay(min.min(max))
            .with_max_delay(max)
            .without_max_times()
            .with_jitter();
        Backoff {
            rules,
            delays: rules.build(),
            max,
        }
    }

    /// The next pause: at least the current delay, and at most twice that.
    pub(crate) fn pause(&mut self) -> Duration {
        self.delays.next().unwrap_or(self.max)
    }

    /// Starts again from the shortest pause.
    pub(crate) fn reset(&mut self) {
        self.delays = self.rules.build();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest_and_no_two_callers_keep_step() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(50), ms(200));
        for delay in [50, 100, 200, 200].map(ms) {
            let next = backoff.pause();
            assert!(delay <= next && next <= delay * 2, "{next:?} of {delay:?}");
        }
        backoff.reset();
        assert!(backoff.pause() <= ms(100));
        let drawn = || Backoff::new(ms(1_000_000), ms(1_000_000)).pause();
        let first = drawn();
        assert!((0..100).any(|_| drawn() != first));
    }
}
