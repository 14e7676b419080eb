//! Pauses between attempts, and between polls, drawn at random.
//!
//! Many callers notice the same failure at the same moment. With fixed pauses they would all try again together, and
//! the service that just came back would fail under the flood. So no pause here is the same for two callers.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// The growing pauses of one caller.
///
/// The nominal pause doubles with every attempt, from `first` to `longest`. Each pause is drawn evenly between the
/// nominal pause and twice that. The caller decides when to give up.
#[derive(Debug)]
pub struct Backoff {
    builder: ExponentialBuilder,
    pauses: ExponentialBackoff,
    longest: Duration,
}

impl Backoff {
    /// Creates a backoff whose nominal pause begins at `first` and never exceeds `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        let builder = ExponentialBuilder::new()
            .with_min_delay(first.min(longest))
            .with_max_delay(longest)
            .with_jitter()
            .without_max_times();
        Backoff {
            pauses: builder.build(),
            builder,
            longest,
        }
    }

    /// Draws the pause before the next attempt.
    pub fn pause(&mut self) -> Duration {
        // The iterator never ends, which its type does not show.
        self.pauses.next().unwrap_or(self.longest)
    }

    /// Starts again at the first pause, after an attempt that succeeded.
    pub fn reset(&mut self) {
        self.pauses = self.builder.build();
    }
}

/// Draws a pause of `period` on average, at most a quarter shorter or longer, for callers that poll at a steady rate.
pub fn jittered(period: Duration) -> Duration {
    period.mul_f64(0.75 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_millis(300);

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_a_reset() {
        let mut backoff = Backoff::new(FIRST, LONGEST);
        for _ in 0..2 {
            for nominal_ms in [50, 100, 200, 300, 300, 300] {
                let nominal = Duration::from_millis(nominal_ms);
                let pause = backoff.pause();
                assert!((nominal..=2 * nominal).contains(&pause), "{pause:?}");
            }
            backoff.reset();
        }
        for _ in 0..10_000 {
            assert!(backoff.pause() <= 2 * LONGEST);
        }
    }

    #[test]
    fn a_first_pause_above_the_longest_is_cut_to_it() {
        let pause = Backoff::new(LONGEST, FIRST).pause();
        assert!((FIRST..=2 * FIRST).contains(&pause), "{pause:?}");
        assert_eq!(
            Backoff::new(Duration::ZERO, LONGEST).pause(),
            Duration::ZERO
        );
    }

    #[test]
    fn callers_that_fail_together_do_not_try_again_together() {
        let distinct =
            |draw: &dyn Fn() -> Duration| (0..100).map(|_| draw()).collect::<HashSet<_>>().len();
        assert!(distinct(&|| Backoff::new(FIRST, LONGEST).pause()) > 50);
        assert!(distinct(&|| jittered(FIRST)) > 50);
    }

    #[test]
    fn a_jittered_period_stays_within_a_quarter_of_it() {
        let pauses: Vec<f64> = (0..10_000).map(|_| jittered(FIRST).as_secs_f64()).collect();
        assert!(pauses.iter().all(|pause| (0.0375..=0.0625).contains(pause)));
        let mean = pauses.iter().sum::<f64>() / pauses.len() as f64;
        assert!((0.049..0.051).contains(&mean), "{mean}");
    }
}
