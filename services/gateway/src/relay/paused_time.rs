//! The times in which a trainer has paused the workers: no limit on the time of a request counts them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Pauses that are remembered. The oldest is forgotten for a new one, so a request that is older ends a
/// little earlier.
const PAUSES_MAX: usize = 1_024;

/// The present pause and earlier ones.
#[derive(Debug, Default)]
pub(super) struct PausedTime {
    since: Option<Instant>,
    past: VecDeque<(Instant, Instant)>,
}

impl PausedTime {
    /// Begins a pause, unless there is one.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Ends the pause, if there is one.
    pub(super) fn end(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            if self.past.len() == PAUSES_MAX {
                self.past.pop_front();
            }
            self.past.push_back((since, now));
        }
    }

    /// Whether there is a pause now.
    pub(super) fn is_paused(&self) -> bool {
        self.since.is_some()
    }

    /// The part of the time from `from` to `until` that was paused.
    pub(super) fn within(&self, from: Instant, until: Instant) -> Duration {
        let present = self.since.map(|since| (since, until));
        let pauses = self.past.iter().copied().chain(present);
        let parts = pauses
            .map(|(begun, ended)| ended.min(until).saturating_duration_since(begun.max(from)));
        parts.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_paused_part_of_a_time_counts() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut paused = PausedTime::default();
        let seconds =
            |paused: &PausedTime, from, until| paused.within(at(from), at(until)).as_secs();
        assert_eq!(seconds(&paused, 0, 100), 0);
        paused.begin(at(10));
        paused.begin(at(15));
        assert!(paused.is_paused());
        assert_eq!(seconds(&paused, 0, 30), 20);
        assert_eq!(seconds(&paused, 12, 13), 1);
        paused.end(at(40));
        paused.end(at(50));
        assert!(!paused.is_paused());
        paused.begin(at(60));
        paused.end(at(61));
        assert_eq!(seconds(&paused, 0, 100), 31);
        assert_eq!(seconds(&paused, 20, 30), 10);
        assert_eq!(seconds(&paused, 41, 59), 0);
        assert_eq!(seconds(&paused, 70, 100), 0);
    }

    #[test]
    fn pauses_are_bounded() {
        let start = Instant::now();
        let mut paused = PausedTime::default();
        for second in 0..2 * PAUSES_MAX as u64 {
            paused.begin(start + Duration::from_secs(2 * second));
            paused.end(start + Duration::from_secs(2 * second + 1));
        }
        assert_eq!(paused.past.len(), PAUSES_MAX);
        let end = start + Duration::from_secs(1 << 20);
        assert_eq!(paused.within(start, end).as_secs(), PAUSES_MAX as u64);
    }
}
