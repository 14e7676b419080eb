//! When outputs go to the store, and when those that merely grow go along. A plain value: no clock, no I/O.

use std::time::{Duration, Instant};

use crate::config::HarvestConfig;

/// Longest pause while the store is away, if the interval is not longer.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Most times that the pause is doubled.
const DOUBLINGS_MAX: u32 = 6;

/// See the module.
#[derive(Debug)]
pub(super) struct Turns {
    interval: Duration,
    growing_every: Duration,
    /// When a turn last began that took all that grew.
    grown_at: Instant,
    /// A turn that was to take what grows had no room for all of it.
    owes: bool,
    /// Turns in a row that the store did not take.
    failures: u32,
}

/// What came of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// There was nothing to send.
    Nothing,
    /// The store took all that was sent. Where that was not complete, some of what was to be sent had no room.
    Taken { is_complete: bool },
    /// The store did not take all of it.
    Refused,
}

impl Turns {
    pub(super) fn new(config: &HarvestConfig, now: Instant) -> Self {
        let every_ms = config
            .interval_ms
            .saturating_mul(u64::from(config.growing_every));
        Turns {
            interval: Duration::from_millis(config.interval_ms),
            growing_every: Duration::from_millis(every_ms),
            grown_at: now,
            owes: false,
            failures: 0,
        }
    }

    /// Whether a turn that begins at `now` takes what merely grows as well.
    pub(super) fn takes_growing(&self, now: Instant) -> bool {
        self.owes || now.saturating_duration_since(self.grown_at) >= self.growing_every
    }

    /// A turn that began at `began`, with what grows or without, is over.
    pub(super) fn over(&mut self, began: Instant, growing: bool, flushed: Flushed) {
        match flushed {
            // That says nothing of the store.
            Flushed::Nothing => {}
            Flushed::Taken { .. } => self.failures = 0,
            Flushed::Refused => self.failures += 1,
        }
        if growing {
            let is_done = match flushed {
                Flushed::Nothing => true,
                Flushed::Taken { is_complete } => is_complete,
                Flushed::Refused => return,
            };
            self.owes = !is_done;
            if is_done {
                self.grown_at = began;
            }
        }
    }

    /// Nothing is left to be sent.
    pub(super) fn rested(&mut self, now: Instant) {
        self.grown_at = now;
        self.owes = false;
    }

    /// How long to wait for the next turn.
    pub(super) fn pause(&self) -> Duration {
        let doubled = 1 << self.failures.min(DOUBLINGS_MAX);
        let longest = PAUSE_MAX.max(self.interval);
        self.interval.saturating_mul(doubled).min(longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAKEN: Flushed = Flushed::Taken { is_complete: true };
    const FULL: Flushed = Flushed::Taken { is_complete: false };

    fn turns(growing_every: u32, began: Instant) -> Turns {
        let config = HarvestConfig {
            interval_ms: 100,
            growing_every,
            ..HarvestConfig::default()
        };
        Turns::new(&config, began)
    }

    #[test]
    fn what_grows_is_sent_by_its_age_and_however_long_the_store_takes() {
        for (store_ms, expected) in [(0, [200, 400, 600]), (150, [250, 500, 750])] {
            let began = Instant::now();
            let mut turns = turns(2, began);
            let mut grown_ms = Vec::new();
            let mut now = began;
            while grown_ms.len() < 3 {
                let growing = turns.takes_growing(now);
                if growing {
                    grown_ms.push((now - began).as_millis());
                }
                turns.over(now, growing, TAKEN);
                now += Duration::from_millis(store_ms) + turns.pause();
            }
            assert_eq!(grown_ms, expected, "the store takes {store_ms} ms");
        }
    }

    #[test]
    fn what_had_no_room_or_was_not_taken_goes_with_the_next_turn() {
        let began = Instant::now();
        let mut turns = turns(10, began);
        let due = began + Duration::from_secs(1);
        assert!(!turns.takes_growing(due - Duration::from_millis(1)));
        for unfinished in [FULL, Flushed::Refused, FULL] {
            assert!(turns.takes_growing(due), "{unfinished:?}");
            turns.over(due, true, unfinished);
        }
        turns.over(due, true, TAKEN);
        assert!(!turns.takes_growing(due));
        // What presses says nothing of what grows.
        turns.over(due, false, FULL);
        assert!(!turns.takes_growing(due));
        assert!(turns.takes_growing(due + Duration::from_secs(1)));
    }

    #[test]
    fn a_first_piece_behind_a_rest_waits_for_its_turn() {
        let began = Instant::now();
        let mut turns = turns(3, began);
        let later = began + Duration::from_secs(60);
        assert!(turns.takes_growing(later));
        turns.rested(later);
        assert!(!turns.takes_growing(later));
        assert!(turns.takes_growing(later + Duration::from_millis(300)));
    }

    #[test]
    fn pauses_grow_until_the_store_takes_something() {
        let began = Instant::now();
        let mut turns = turns(2, began);
        let mut pauses_ms = Vec::new();
        for flushed in [
            Flushed::Refused,
            Flushed::Refused,
            Flushed::Nothing,
            Flushed::Refused,
            TAKEN,
        ] {
            turns.over(began, true, flushed);
            pauses_ms.push(turns.pause().as_millis());
        }
        assert_eq!(pauses_ms, [200, 400, 400, 800, 100]);
        for _ in 0..40 {
            turns.over(began, true, Flushed::Refused);
        }
        assert_eq!(turns.pause(), PAUSE_MAX);
    }
}
