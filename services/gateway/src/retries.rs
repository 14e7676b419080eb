//! How often the mesh may try again: a share of what it is asked for. Where all fails, trying again makes it worse, and one
//! request's patience is another one's load.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{Gauge, IntCounter};

/// How long what was not used can be used later.
const REMEMBERED: Duration = Duration::from_secs(10);

/// A bucket of retries, as linkerd's: chunks put a share of one in, a retry takes one out, and some flow in by time, so that
/// few requests may be tried again as well. What is not used is forgotten. No clock: instants are handed in.
#[derive(Debug)]
struct Bucket {
    /// What a chunk puts in.
    share: f64,
    /// What flows in, per second.
    per_s: f64,
    left: f64,
    at: Instant,
}

impl Bucket {
    fn new(share: f64, per_s: f64, now: Instant) -> Self {
        Bucket {
            share,
            per_s,
            left: per_s * REMEMBERED.as_secs_f64(),
            at: now,
        }
    }

    /// What is left of it by now.
    fn left(&mut self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let remembered = REMEMBERED.as_secs_f64();
        let kept = (-passed / remembered).exp();
        // Where nobody takes or puts anything, it comes to rest at what flows in while it is remembered.
        let rest = self.per_s * remembered;
        self.left = rest + (self.left - rest) * kept;
        self.at = self.at.max(now);
        self.left
    }

    fn put(&mut self, now: Instant) {
        self.left(now);
        self.left += self.share;
    }

    /// Takes one out, if there is one.
    fn take(&mut self, now: Instant) -> bool {
        let is_there = self.left(now) >= 1.0;
        if is_there {
            self.left -= 1.0;
        }
        is_there
    }

    /// One was made.
    fn made(&mut self, now: Instant) {
        self.left = (self.left(now) - 1.0).max(0.0);
    }
}

/// The one budget of all requests.
pub(crate) struct Retries {
    bucket: Mutex<Bucket>,
    left: Gauge,
    refused: IntCounter,
}

impl Retries {
    /// `share` retries per chunk, and `per_s` a second beside them.
    pub(crate) fn new(share: f64, per_s: f64, left: Gauge, refused: IntCounter) -> Self {
        let bucket = Bucket::new(share, per_s, Instant::now());
        left.set(bucket.left);
        Retries {
            bucket: Mutex::new(bucket),
            left,
            refused,
        }
    }

    /// A chunk begins that is no retry.
    pub(crate) fn chunk_begins(&self) {
        self.change(Bucket::put);
    }

    /// Whether something may be tried once more.
    pub(crate) fn take(&self) -> bool {
        let is_granted = self.change(Bucket::take);
        if !is_granted {
            self.refused.inc();
        }
        is_granted
    }

    /// Most retries that a worker may make by itself of those that are left.
    pub(crate) fn left(&self) -> u32 {
        self.change(|bucket, now| bucket.left(now)) as u32
    }

    /// A worker made one.
    pub(crate) fn made(&self) {
        self.change(Bucket::made);
    }

    fn change<T>(&self, change: impl FnOnce(&mut Bucket, Instant) -> T) -> T {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut bucket, Instant::now());
        self.left.set(bucket.left);
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn few_requests_are_tried_again_by_time_and_many_by_their_number() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.2, 1.0, start);
        let taken = |bucket: &mut Bucket, now| (0..1000).take_while(|_| bucket.take(now)).count();
        assert_eq!(taken(&mut bucket, start), 10);
        // A second brings back less than one.
        assert_eq!(taken(&mut bucket, start + SECOND), 0);
        assert_eq!(taken(&mut bucket, start + SECOND * 3), 2);
        for _ in 0..500 {
            bucket.put(start + SECOND * 3);
        }
        assert_eq!(taken(&mut bucket, start + SECOND * 3), 100);
    }

    #[test]
    fn what_is_not_used_is_forgotten() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.2, 1.0, start);
        for _ in 0..5_000 {
            bucket.put(start);
        }
        assert_eq!(bucket.left(start).round(), 1010.0);
        assert_eq!(bucket.left(start + SECOND * 100).round(), 10.0);
        // Time that seems to run back changes nothing.
        assert_eq!(bucket.left(start).round(), 10.0);
    }

    #[test]
    fn without_share_and_flow_nothing_is_tried_again() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.0, 0.0, start);
        bucket.put(start);
        assert!(!bucket.take(start) && !bucket.take(start + SECOND * 1000));
        bucket.made(start);
        assert_eq!(bucket.left(start), 0.0);
    }
}
