//! A limit per minute as a bucket that fills continuously. Pure: the time is a parameter.
//!
//! These are the maths of all limits per minute. `redis_counts/script.lua` has them once more, for Redis to run, and
//! a test compares both.
//!
//! `governor` was rejected for it. It takes cells and never gives them back, but a request reserves what it may use,
//! and is settled for what it did use.

use std::time::{Duration, Instant};

/// A bucket that holds a minute's amount and fills in a minute.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    per_minute: f64,
    /// The amount that is left at `at`. Below zero, more was used than was reserved.
    level: f64,
    at: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(super) fn new(per_minute: f64, now: Instant) -> Self {
        Bucket {
            per_minute,
            level: per_minute,
            at: now,
        }
    }

    /// A bucket of which `level` is left, as somebody else counts it.
    pub(super) fn at_level(per_minute: f64, level: f64, now: Instant) -> Self {
        Bucket {
            per_minute,
            level,
            at: now,
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.level += passed.as_secs_f64() * self.per_minute / 60.0;
        self.level = self.level.min(self.per_minute);
        self.at = self.at.max(now);
    }

    /// Changes the limit. The share that is left stays the same.
    pub(super) fn resize(&mut self, per_minute: f64, now: Instant) {
        self.fill(now);
        self.level *= per_minute / self.per_minute;
        self.per_minute = per_minute;
    }

    pub(super) fn per_minute(&self) -> f64 {
        self.per_minute
    }

    /// The amount that may be taken now.
    pub(super) fn left(&mut self, now: Instant) -> f64 {
        self.fill(now);
        self.level.max(0.0)
    }

    /// How long it takes until `amount` may be taken; zero if it may be taken now. More than the bucket holds counts
    /// as a full bucket: otherwise such a request could never run.
    pub(super) fn wait(&mut self, amount: f64, now: Instant) -> Duration {
        self.fill(now);
        let missing = amount.min(self.per_minute) - self.level;
        match missing > 0.0 {
            true => Duration::from_secs_f64(missing * 60.0 / self.per_minute),
            false => Duration::ZERO,
        }
    }

    /// The level, which is below zero for a debt.
    #[cfg(test)]
    pub(super) fn level_at(mut self, now: Instant) -> f64 {
        self.fill(now);
        self.level
    }

    /// How long it takes until the bucket is full.
    pub(super) fn until_full(&mut self, now: Instant) -> Duration {
        self.wait(f64::INFINITY, now)
    }

    /// Takes an amount, or gives one back if it is negative.
    pub(super) fn take(&mut self, amount: f64, now: Instant) {
        self.fill(now);
        self.level = (self.level - amount).min(self.per_minute);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_minute_gives_what_the_limit_says_however_it_is_asked_for() {
        for step_ms in [7, 100, 1_000, 30_000] {
            let start = Instant::now();
            let mut bucket = Bucket::new(600.0, start);
            let mut taken = 0;
            let mut now = start;
            while now < start + 60 * SECOND {
                while bucket.wait(1.0, now).is_zero() {
                    bucket.take(1.0, now);
                    taken += 1;
                }
                now += Duration::from_millis(step_ms);
            }
            // A full bucket at the start, and a minute's filling.
            assert!((890..=1_200).contains(&taken), "{step_ms}: {taken}");
        }
    }

    #[test]
    fn an_amount_that_was_not_used_comes_back_and_a_debt_is_paid_first() {
        let now = Instant::now();
        let mut bucket = Bucket::new(60.0, now);
        bucket.take(50.0, now);
        bucket.take(-45.0, now);
        assert!((bucket.left(now) - 55.0).abs() < 1e-9);
        bucket.take(75.0, now);
        assert_eq!(bucket.left(now), 0.0);
        assert!((bucket.wait(1.0, now).as_secs_f64() - 21.0).abs() < 1e-6);
        assert!((bucket.until_full(now).as_secs_f64() - 80.0).abs() < 1e-6);
        // It never holds more than a minute's amount, and a clock that stands still gives nothing.
        assert!((bucket.left(now + 600 * SECOND) - 60.0).abs() < 1e-9);
        assert!((bucket.left(now) - 60.0).abs() < 1e-9);
    }

    #[test]
    fn more_than_a_bucket_waits_for_a_full_one_and_another_limit_keeps_the_share() {
        let now = Instant::now();
        let mut bucket = Bucket::new(60.0, now);
        assert!(bucket.wait(1e9, now).is_zero());
        bucket.take(30.0, now);
        assert!((bucket.wait(1e9, now).as_secs_f64() - 30.0).abs() < 1e-6);
        bucket.resize(6_000.0, now);
        assert!((bucket.left(now) - 3_000.0).abs() < 1e-6);
    }
}
