//! The budget of retries that all requests share: a share of the chunks that begin. When everything fails, retries
//! only add load, and make it worse for all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::IntCounter;
use refrain_service_kit::telemetry::Metrics;

/// How long an unused retry stays in the budget, about.
const KEPT: Duration = Duration::from_secs(10);

/// A bucket of retries like that of linkerd: each chunk adds a share of one, a retry takes one, and some flow in over
/// time, so that a mesh with few requests retries too. Unused retries decay. There is no clock: instants are
/// arguments.
///
/// The retries that a worker may make by itself are read when its chunk begins, and taken when the worker made them.
/// If they were taken at the beginning, a few chunks that wait for their first token would hold the whole budget, and
/// other requests would be refused for retries that nobody makes. So chunks that begin together can make more retries
/// than are left. That is a debt: nothing is retried until it is paid, and it decays as fast as unused retries.
#[derive(Debug)]
struct Bucket {
    /// Retries that a chunk adds.
    share: f64,
    /// Retries that flow in per second.
    per_s: f64,
    /// Retries that are left; negative if there is a debt.
    left: f64,
    /// The time of `left`.
    at: Instant,
}

impl Bucket {
    fn new(share: f64, per_s: f64, now: Instant) -> Self {
        Bucket {
            share,
            per_s,
            left: per_s * KEPT.as_secs_f64(),
            at: now,
        }
    }

    /// The retries that are left at `now`.
    fn left(&mut self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        let remembered = KEPT.as_secs_f64();
        let kept = (-passed / remembered).exp();
        // Without chunks and retries the bucket approaches the inflow of the time that retries are kept.
        let rest = self.per_s * remembered;
        self.left = rest + (self.left - rest) * kept;
        self.at = self.at.max(now);
        self.left
    }

    fn add_chunk(&mut self, now: Instant) {
        self.left(now);
        self.left += self.share;
    }

    /// Takes a retry, if there is one.
    fn take(&mut self, now: Instant) -> bool {
        let is_there = self.left(now) >= 1.0;
        if is_there {
            self.left -= 1.0;
        }
        is_there
    }

    /// Takes a retry that was made, even if that makes a debt.
    fn take_on_credit(&mut self, now: Instant) {
        self.left = self.left(now) - 1.0;
    }
}

/// The budget of all requests.
pub(crate) struct RetryBudget {
    bucket: Arc<Mutex<Bucket>>,
    refused: IntCounter,
}

impl RetryBudget {
    /// Creates a budget of `share` retries per chunk, and `per_s` more per second.
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
        let gauge = bucket.clone();
        metrics.computed_gauge(
            "refrain_gateway_retry_budget",
            "Retries that all requests together may make now; negative if chunks that began together have made more.",
            move || gauge.lock().left(Instant::now()),
        )?;
        Ok(RetryBudget { bucket, refused })
    }

    /// Notes that a chunk begins which is not a retry.
    pub(crate) fn chunk_begins(&self) {
        self.bucket.lock().add_chunk(Instant::now());
    }

    /// Takes a retry, if one is left.
    pub(crate) fn take(&self) -> bool {
        let is_granted = self.bucket.lock().take(Instant::now());
        if !is_granted {
            self.refused.inc();
        }
        is_granted
    }

    /// Number of retries that are left, which is the most that a worker may make by itself.
    pub(crate) fn left(&self) -> u32 {
        self.bucket.lock().left(Instant::now()) as u32
    }

    /// Notes that a worker made a retry.
    pub(crate) fn worker_retried(&self) {
        self.bucket.lock().take_on_credit(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn few_requests_live_on_the_inflow_and_many_on_the_share() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.2, 1.0, start);
        let taken = |bucket: &mut Bucket, now| (0..1000).take_while(|_| bucket.take(now)).count();
        assert_eq!(taken(&mut bucket, start), 10);
        // A second brings back less than one.
        assert_eq!(taken(&mut bucket, start + SECOND), 0);
        assert_eq!(taken(&mut bucket, start + SECOND * 3), 2);
        for _ in 0..500 {
            bucket.add_chunk(start + SECOND * 3);
        }
        assert_eq!(taken(&mut bucket, start + SECOND * 3), 100);
    }

    #[test]
    fn unused_retries_decay() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.2, 1.0, start);
        for _ in 0..5_000 {
            bucket.add_chunk(start);
        }
        assert_eq!(bucket.left(start).round(), 1010.0);
        assert_eq!(bucket.left(start + SECOND * 100).round(), 10.0);
        // An instant of the past changes nothing.
        assert_eq!(bucket.left(start).round(), 10.0);
    }

    #[test]
    fn without_share_and_inflow_there_are_no_retries() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.0, 0.0, start);
        bucket.add_chunk(start);
        assert!(!bucket.take(start) && !bucket.take(start + SECOND * 1000));
    }

    #[test]
    fn a_debt_is_paid_before_anything_is_retried() {
        let start = Instant::now();
        let mut bucket = Bucket::new(0.1, 1.0, start);
        // All these chunks begin while ten retries are left, and each makes two.
        for _ in 0..100 {
            bucket.add_chunk(start);
            assert!(bucket.left(start) >= 2.0);
        }
        for _ in 0..200 {
            bucket.take_on_credit(start);
        }
        assert_eq!(bucket.left(start).round(), -180.0);
        assert_eq!(bucket.left(start) as u32, 0);
        assert!(!bucket.take(start));
        // A thousand chunks that begin do not pay the whole debt at once.
        for _ in 0..1000 {
            bucket.add_chunk(start);
            assert!(!bucket.take(start));
        }
        assert!(!bucket.take(start + SECOND * 10));
        assert!(bucket.take(start + SECOND * 60));
    }

    #[test]
    fn the_gauge_changes_with_time_alone() {
        let metrics = Metrics::new().unwrap();
        let refused = IntCounter::new("refused", "Refused.").unwrap();
        let budget = RetryBudget::new(0.0, 1000.0, &metrics, refused).unwrap();
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
        // The budget was emptied a moment ago, and nothing has happened since.
        {
            let mut bucket = budget.bucket.lock();
            bucket.left = 0.0;
            bucket.at = Instant::now();
        }
        let before = shown();
        budget.bucket.lock().at -= SECOND;
        assert!(shown() > before);
    }
}
