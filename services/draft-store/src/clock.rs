//! The store's own time, by which documents age. It is the wall clock, unless that jumps.
//!
//! A wall clock that is 40 days ahead for a moment would expire every document of a month, and evicted documents do
//! not come back. So a step of more than an hour ([`STEP_MS_MAX`]) is ignored, measured against the last time the
//! store knew or against the other services of the mesh. The store then counts on from its last time at the pace of
//! the machine's monotonic clock.
//!
//! This ends when the wall clock is back, or when an operator confirms the step (`refrain store confirm --clock`). A
//! store that was stopped for longer than an hour sees such a step, too. Its documents then live that much longer,
//! until somebody confirms.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Most that the wall clock may deviate in one day, in sum, beside the time that passes. Larger steps are ignored.
pub(crate) const STEP_MS_MAX: u64 = 3_600_000;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Time since the machine started, which nobody can set. It counts while the machine is suspended.
pub(crate) fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// The store's time in Unix milliseconds at a moment of the machine's clock.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    unix_ms: u64,
    at: Duration,
}

impl ClockReading {
    fn at(self, at: Duration) -> u64 {
        let passed = at.saturating_sub(self.at).as_millis();
        self.unix_ms
            .saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

/// The store's clock as a value: the caller brings both the wall clock and the machine's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreClock {
    last: ClockReading,
    /// The start of the current day. The steps of one day are counted together.
    day: ClockReading,
    /// How far the wall clock is ahead of the store's time, while the wall clock is ignored.
    offset_ms: Option<i64>,
}

impl StoreClock {
    /// A clock that continues from `known_ms`, a time in the past. With 0 it starts from the wall clock.
    pub(crate) fn new(known_ms: u64, wall_ms: u64, since_boot: Duration) -> Self {
        let known = ClockReading {
            unix_ms: if known_ms == 0 { wall_ms } else { known_ms },
            at: since_boot,
        };
        let mut clock = StoreClock {
            last: known,
            day: known,
            offset_ms: None,
        };
        clock.read(wall_ms, 0, since_boot);
        clock
    }

    /// The store's time. `skew_ms` says how far the wall clock is ahead of the mesh's time; it is 0 if unknown.
    pub(crate) fn read(&mut self, wall_ms: u64, skew_ms: i64, since_boot: Duration) -> u64 {
        if since_boot.saturating_sub(self.day.at) >= DAY && self.offset_ms.is_none() {
            self.day = ClockReading {
                unix_ms: self.last.at(since_boot),
                at: since_boot,
            };
        }
        let own_ms = self.last.at(since_boot);
        let expected_ms = self.day.at(since_boot);
        let is_off = skew_ms.unsigned_abs() > STEP_MS_MAX;
        if expected_ms.abs_diff(wall_ms) <= STEP_MS_MAX && !is_off {
            self.offset_ms = None;
            self.last = ClockReading {
                unix_ms: wall_ms,
                at: since_boot,
            };
            return wall_ms;
        }
        let ahead_ms = i128::from(wall_ms) - i128::from(own_ms);
        self.offset_ms = Some(ahead_ms.clamp(i64::MIN.into(), i64::MAX.into()) as i64);
        own_ms
    }

    /// How far the wall clock is ahead of the store's time, if that is too far to follow.
    pub(crate) fn offset_ms(&self) -> Option<i64> {
        self.offset_ms.filter(|ms| ms.unsigned_abs() > STEP_MS_MAX)
    }

    /// Follows the wall clock from now on: an operator says that it is right.
    pub(crate) fn confirm(&mut self, wall_ms: u64, since_boot: Duration) {
        *self = StoreClock::new(0, wall_ms, since_boot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;
    const DAY_MS: u64 = 24 * HOUR_MS;
    const NOW_MS: u64 = 1_800_000_000_000;

    fn after(ms: u64) -> Duration {
        Duration::from_secs(500) + Duration::from_millis(ms)
    }

    #[test]
    fn a_running_wall_clock_is_followed_with_its_small_steps() {
        let mut clock = StoreClock::new(0, NOW_MS, after(0));
        assert_eq!(clock.read(NOW_MS + 10, 0, after(10)), NOW_MS + 10);
        // The clock is set back by half an hour, and forward again.
        let back = NOW_MS - HOUR_MS / 2;
        assert_eq!(clock.read(back, 0, after(20)), back);
        assert_eq!(clock.read(NOW_MS + 30, 0, after(30)), NOW_MS + 30);
        // A clock that gains a minute an hour is followed for ever.
        let mut wall = NOW_MS;
        for hour in 1..=24 * 40 {
            wall += HOUR_MS + 60_000;
            assert_eq!(
                clock.read(wall, 0, after(hour * HOUR_MS)),
                wall,
                "hour {hour}"
            );
        }
    }

    #[test]
    fn a_jump_is_ignored_until_the_wall_clock_returns() {
        for jump in [
            40 * DAY_MS as i64,
            -(25 * HOUR_MS as i64),
            HOUR_MS as i64 + 10_000,
        ] {
            let mut clock = StoreClock::new(0, NOW_MS, after(0));
            let wall = |ms: u64| (NOW_MS + ms).saturating_add_signed(jump);
            for ms in [1_000, 2_000, 4_000] {
                assert_eq!(clock.read(wall(ms), 0, after(ms)), NOW_MS + ms);
                assert_eq!(clock.offset_ms(), Some(jump));
            }
            assert_eq!(clock.read(NOW_MS + 5_000, 0, after(5_000)), NOW_MS + 5_000);
            assert_eq!(clock.offset_ms(), None);
        }
    }

    #[test]
    fn a_wall_clock_that_the_mesh_disagrees_with_is_not_followed() {
        let mut clock = StoreClock::new(0, NOW_MS, after(0));
        let skew_ms = 2 * HOUR_MS as i64;
        assert_eq!(clock.read(NOW_MS + 90, skew_ms, after(60)), NOW_MS + 60);
        assert_eq!(clock.read(NOW_MS + 90, 0, after(80)), NOW_MS + 90);
        assert_eq!(clock.offset_ms(), None);
    }

    #[test]
    fn many_small_steps_are_not_a_large_one() {
        let mut clock = StoreClock::new(0, NOW_MS, after(0));
        let mut wall = NOW_MS;
        for second in 1..100 {
            wall += 50 * 60_000;
            let own = clock.read(wall, 0, after(second * 1_000));
            assert!(own <= NOW_MS + second * 1_000 + HOUR_MS);
        }
        assert!(clock.offset_ms().is_some());
    }

    #[test]
    fn a_start_continues_from_the_last_known_time() {
        // The store was stopped for a minute, and for three days.
        let clock = StoreClock::new(NOW_MS - 60_000, NOW_MS, after(0));
        assert_eq!(clock.offset_ms(), None);
        let mut clock = StoreClock::new(NOW_MS - 3 * DAY_MS, NOW_MS, after(0));
        assert_eq!(clock.offset_ms(), Some(3 * DAY_MS as i64));
        assert_eq!(clock.read(NOW_MS + 7, 0, after(7)), NOW_MS - 3 * DAY_MS + 7);
        clock.confirm(NOW_MS + 8, after(8));
        assert_eq!(clock.read(NOW_MS + 9, 0, after(9)), NOW_MS + 9);
        assert_eq!(clock.offset_ms(), None);
    }

    #[test]
    fn after_an_unconfirmed_jump_time_passes_at_its_usual_pace() {
        let mut clock = StoreClock::new(0, NOW_MS, after(0));
        for hour in 1..=24 * 5 {
            let ms = hour * HOUR_MS;
            assert_eq!(
                clock.read(NOW_MS + 40 * DAY_MS + ms, 0, after(ms)),
                NOW_MS + ms
            );
        }
        assert_eq!(clock.offset_ms(), Some(40 * DAY_MS as i64));
    }
}
