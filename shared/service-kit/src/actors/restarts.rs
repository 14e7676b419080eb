//! When an actor begins anew after a panic, and when there were too many. This is a pure function of instants.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// An actor with more restarts than this within [`WINDOW`] makes the process unready.
pub(super) const RESTARTS_MAX: usize = 5;

/// The time in which restarts are counted. After such a time without a panic, pauses are short again.
pub(super) const WINDOW: Duration = Duration::from_secs(60);

const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(10);

/// The restarts of one actor.
pub(super) struct Restarts {
    recent: VecDeque<Instant>,
    backoff: Backoff,
}

/// How an actor goes on after a panic.
pub(super) struct Restart {
    pub(super) pause: Duration,
    pub(super) is_too_many: bool,
}

impl Restarts {
    pub(super) fn new() -> Self {
        Restarts {
            recent: VecDeque::with_capacity(RESTARTS_MAX + 2),
            backoff: Backoff::new(PAUSE_FIRST, PAUSE_LONGEST),
        }
    }

    /// Takes a panic.
    pub(super) fn next(&mut self, now: Instant) -> Restart {
        self.recent
            .retain(|at| now.saturating_duration_since(*at) < WINDOW);
        if self.recent.is_empty() {
            self.backoff.reset();
        }
        self.recent.push_back(now);
        let is_too_many = self.recent.len() > RESTARTS_MAX;
        if is_too_many {
            self.recent.pop_front();
        }
        Restart {
            pause: self.backoff.pause(),
            is_too_many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_are_short_again_after_a_quiet_time() {
        let (mut restarts, mut now) = (Restarts::new(), Instant::now());
        for nominal_ms in [100, 200, 400] {
            let Restart { pause, is_too_many } = restarts.next(now);
            let nominal = Duration::from_millis(nominal_ms);
            assert!((nominal..=2 * nominal).contains(&pause), "{pause:?}");
            assert!(!is_too_many);
        }
        now += WINDOW;
        assert!(restarts.next(now).pause <= 2 * PAUSE_FIRST);
        for _ in 0..20 {
            assert!(restarts.next(now).pause <= 2 * PAUSE_LONGEST);
        }
    }

    #[test]
    fn only_restarts_in_the_window_are_too_many() {
        let (mut restarts, start) = (Restarts::new(), Instant::now());
        let steady = WINDOW / RESTARTS_MAX as u32;
        for number in 0..50 {
            assert!(!restarts.next(start + number * steady).is_too_many);
        }
        let mut restarts = Restarts::new();
        for number in 0..20 {
            let is_too_many = restarts.next(start + number * steady / 2).is_too_many;
            assert_eq!(is_too_many, number as usize >= RESTARTS_MAX, "{number}");
        }
    }
}
