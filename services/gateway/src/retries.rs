//! How often the mesh may try again: a share of what it is asked for. Where all fails, trying again makes it worse, and one
//! request's patience is another one's load.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::IntCounter;
use refrain_service_kit::telemetry::Metrics;

/// How long what was not used can be used later.
const REMEMBERED: Duration = Duration::from_secs(10);

/// A bucket of retries, as linkerd's: chunks put a share of one in, a retry takes one out, and some flow in by time, so that
/// few requests may be tried again as well. What is not used is forgotten. No clock: instants are handed in.
///
/// What a worker may retry by itself is read when its chunk begins and taken out when it was made. Were it taken out at the
/// beginning, few chunks that wait for their first token would hold all that there is, and others that fail would be refused
/// for retries that nobody makes. So chunks that begin together can make more than is left: that is a debt, nothing is
/// retried until it is paid, and it is forgotten as fast as what is not used.
#[derive(Debug)]
struct Bucket {
    /// What a chunk puts in.
    share: f64,
    /// What flows in, per second.
    per_s: f64,
    /// Below 0: made on credit.
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

    /// One was made, be it on credit.
    fn made(&mut self, now: Instant) {
        self.left = self.left(now) - 1.0;
    }
}

/// The one budget of all requests.
pub(crate) struct Retries {
    bucket: Arc<Mutex<Bucket>>,
    refused: IntCounter,
}

impl Retries {
    /// `share` retries per chunk, and `per_s` a second beside them.
    ///
    /// # Errors
    /// The name of its gauge is taken: two gateways share a registry.
    pub(crate) fn new(
        share: f64,
        per_s: f64,
        metrics: &Metrics,
        refused: IntCounter,
    ) -> anyhow::Result<Self> {
        let bucket = Arc::new(Mutex::new(Bucket::new(share, per_s, Instant::now())));
        let asked = bucket.clone();
        metrics.computed_gauge(
            "refrain_gateway_retry_budget",
            "Retries that all requests together may make at the moment; below 0, made beyond it by chunks that began together.",
            move || lock(&asked).left(Instant::now()),
        )?;
        Ok(Retries { bucket, refused })
    }

    /// A chunk begins that is no retry.
    pub(crate) fn chunk_begins(&self) {
        lock(&self.bucket).put(Instant::now());
    }

    /// Whether something may be tried once more.
    pub(crate) fn take(&self) -> bool {
        let is_granted = lock(&self.bucket).take(Instant::now());
        if !is_granted {
            self.refused.inc();
        }
        is_granted
    }

    /// Most retries that a worker may make by itself of those that are left.
    pub(crate) fn left(&self) -> u32 {
        lock(&self.bucket).left(Instant::now()) as u32
    }

    /// A worker made one.
    pub(crate) fn made(&self) {
        lock(&self.bucket).made(Instant::now());
    }
}

fn lock(bucket: &Mutex<Bucket>) -> MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
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
    }

    #[test]
    fn what_many_make_at_once_is_paid_before_anything_is_tried_again() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.1, 1.0, start);
        // All of these chunks begin while there are ten, and each makes two.
        for _ in 0..100 {
            bucket.put(start);
            assert!(bucket.left(start) >= 2.0);
        }
        for _ in 0..200 {
            bucket.made(start);
        }
        assert_eq!(bucket.left(start).round(), -180.0);
        assert_eq!(bucket.left(start) as u32, 0);
        assert!(!bucket.take(start));
        // A thousand others that begin do not pay for all of it at once.
        for _ in 0..1000 {
            bucket.put(start);
            assert!(!bucket.take(start));
        }
        assert!(!bucket.take(start + SECOND * 10));
        assert!(bucket.take(start + SECOND * 60));
    }

    #[test]
    fn its_gauge_tells_of_time_that_passed() {
        let metrics = Metrics::new().unwrap();
        let refused = IntCounter::new("refused", "Refused.").unwrap();
        let retries = Retries::new(0.0, 1000.0, &metrics, refused).unwrap();
        let shown = || {
            let text = String::from_utf8(metrics.render()).unwrap();
            let line = text
                .lines()
                .find(|line| line.starts_with("refrain_gateway_retry_budget "));
            line.unwrap()
                .split(' ')
                .nth(1)
                .unwrap()
                .parse::<f64>()
                .unwrap()
        };
        assert!((9_999.0..=10_000.0).contains(&shown()));
        // It was emptied a while ago, and nothing has happened since.
        {
            let mut bucket = lock(&retries.bucket);
            bucket.left = 0.0;
            bucket.at = Instant::now();
        }
        let before = shown();
        std::thread::sleep(Duration::from_millis(5));
        assert!(shown() > before);
    }
}
