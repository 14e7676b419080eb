//! When outputs are sent, and when those that merely grow are sent along. A plain value, without clock or I/O.

use std::time::{Duration, Instant};

use crate::config::UploaderConfig;
use refrain_service_kit::backoff::Backoff;

/// Longest pause while the store cannot be reached, without its random part; or the interval, if that is longer.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The times of the uploads.
#[derive(Debug)]
pub(super) struct UploadSchedule {
    interval: Duration,
    group_interval: Duration,
    growing_every: Duration,
    /// When an upload last began that sent all outputs that grow.
    grown_at: Instant,
    /// An upload was to send outputs that grow, and not all of them fitted.
    is_overdue: bool,
    pause: Duration,
    backoff: Backoff,
}

/// The result of one upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlushOutcome {
    /// There was nothing to send.
    Nothing,
    /// The store accepted everything that was sent. If `is_complete`, that was everything that was to be sent.
    Accepted { is_complete: bool },
    /// The store did not accept all of it.
    Refused,
}

impl UploadSchedule {
    pub(super) fn new(config: &UploaderConfig, now: Instant) -> Self {
        let interval = Duration::from_millis(config.interval_ms);
        UploadSchedule {
            interval,
            group_interval: Duration::from_millis(config.group_interval_ms).min(interval),
            growing_every: interval.saturating_mul(config.growing_every),
            grown_at: now,
            is_overdue: false,
            pause: interval,
            backoff: Backoff::new(interval.saturating_mul(2), PAUSE_MAX.max(interval)),
        }
    }

    /// Whether an upload that begins at `now` sends outputs that merely grow as well.
    pub(super) fn includes_growing(&self, now: Instant) -> bool {
        self.is_overdue || now.saturating_duration_since(self.grown_at) >= self.growing_every
    }

    /// Records an upload that began at `began`, with the outputs that grow if `growing`.
    pub(super) fn record(&mut self, began: Instant, growing: bool, outcome: FlushOutcome) {
        match outcome {
            // That says nothing about the store.
            FlushOutcome::Nothing => {}
            FlushOutcome::Accepted { .. } => {
                self.backoff.reset();
                self.pause = self.interval;
            }
            FlushOutcome::Refused => self.pause = self.backoff.pause(),
        }
        if growing {
            let is_done = match outcome {
                FlushOutcome::Nothing => true,
                FlushOutcome::Accepted { is_complete } => is_complete,
                FlushOutcome::Refused => return,
            };
            self.is_overdue = !is_done;
            if is_done {
                self.grown_at = began;
            }
        }
    }

    /// Begins anew after a time in which there was nothing to send.
    pub(super) fn resume(&mut self, now: Instant) {
        self.grown_at = now;
        self.is_overdue = false;
    }

    /// The pause until the next upload, which may be for outputs of groups that grow.
    pub(super) fn pause(&self, has_groups: bool) -> Duration {
        // A longer pause than the interval is for a store that refuses.
        match has_groups && self.pause == self.interval {
            true => self.group_interval,
            false => self.pause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCEPTED: FlushOutcome = FlushOutcome::Accepted { is_complete: true };
    const FULL: FlushOutcome = FlushOutcome::Accepted { is_complete: false };

    fn schedule(growing_every: u32, began: Instant) -> UploadSchedule {
        let config = UploaderConfig {
            interval_ms: 100,
            growing_every,
            ..UploaderConfig::default()
        };
        UploadSchedule::new(&config, began)
    }

    #[test]
    fn growing_outputs_are_sent_by_their_age_however_long_the_store_takes() {
        for (store_ms, expected) in [(0, [200, 400, 600]), (150, [250, 500, 750])] {
            let began = Instant::now();
            let mut schedule = schedule(2, began);
            let mut grown_ms = Vec::new();
            let mut now = began;
            while grown_ms.len() < 3 {
                let growing = schedule.includes_growing(now);
                if growing {
                    grown_ms.push((now - began).as_millis());
                }
                schedule.record(now, growing, ACCEPTED);
                now += Duration::from_millis(store_ms) + schedule.pause(false);
            }
            assert_eq!(grown_ms, expected, "the store takes {store_ms} ms");
        }
    }

    #[test]
    fn outputs_that_did_not_fit_or_were_not_accepted_go_with_the_next_upload() {
        let began = Instant::now();
        let mut schedule = schedule(10, began);
        let due = began + Duration::from_secs(1);
        assert!(!schedule.includes_growing(due - Duration::from_millis(1)));
        for unfinished in [FULL, FlushOutcome::Refused, FULL] {
            assert!(schedule.includes_growing(due), "{unfinished:?}");
            schedule.record(due, true, unfinished);
        }
        schedule.record(due, true, ACCEPTED);
        assert!(!schedule.includes_growing(due));
        // A full batch of urgent outputs says nothing about those that grow.
        schedule.record(due, false, FULL);
        assert!(!schedule.includes_growing(due));
        assert!(schedule.includes_growing(due + Duration::from_secs(1)));
    }

    #[test]
    fn a_first_update_after_an_idle_time_waits_for_its_turn() {
        let began = Instant::now();
        let mut schedule = schedule(3, began);
        let later = began + Duration::from_secs(60);
        assert!(schedule.includes_growing(later));
        schedule.resume(later);
        assert!(!schedule.includes_growing(later));
        assert!(schedule.includes_growing(later + Duration::from_millis(300)));
    }

    #[test]
    fn outputs_of_groups_are_sent_sooner_unless_the_store_refuses() {
        let began = Instant::now();
        let config = UploaderConfig {
            interval_ms: 200,
            group_interval_ms: 50,
            ..UploaderConfig::default()
        };
        let mut schedule = UploadSchedule::new(&config, began);
        let pauses = |schedule: &UploadSchedule| {
            [false, true].map(|has_groups| schedule.pause(has_groups).as_millis())
        };
        assert_eq!(pauses(&schedule), [200, 50]);
        schedule.record(began, false, FlushOutcome::Refused);
        let [alone, with_groups] = pauses(&schedule);
        assert!(alone >= 400 && with_groups == alone);
        schedule.record(began, false, ACCEPTED);
        assert_eq!(pauses(&schedule), [200, 50]);
    }

    #[test]
    fn pauses_grow_until_the_store_accepts_something() {
        let began = Instant::now();
        let mut schedule = schedule(2, began);
        let mut pause_after = |outcome| {
            schedule.record(began, true, outcome);
            schedule.pause(false).as_millis()
        };
        let first = pause_after(FlushOutcome::Refused);
        assert!((200..400).contains(&first), "{first}");
        assert!((400..800).contains(&pause_after(FlushOutcome::Refused)));
        let third = pause_after(FlushOutcome::Refused);
        assert!((800..1_600).contains(&third), "{third}");
        assert_eq!(pause_after(FlushOutcome::Nothing), third);
        assert_eq!(pause_after(ACCEPTED), 100);
        for _ in 0..40 {
            pause_after(FlushOutcome::Refused);
        }
        let longest = pause_after(FlushOutcome::Refused);
        assert!((5_000..10_000).contains(&longest), "{longest}");
    }
}
