//! Times of this machine: sums per token, and the distribution of single calls.

use std::time::{Duration, Instant};

use serde::Serialize;

/// Time spent on a number of tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) time: Duration,
    pub(crate) tokens: u64,
}

impl Spent {
    /// Runs `work` on `tokens` tokens, and adds its time.
    pub(super) fn on<T>(&mut self, tokens: usize, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        self.time += start.elapsed();
        self.tokens += tokens as u64;
        done
    }

    pub(crate) fn us_per_token(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.time.as_secs_f64() * 1e6 / self.tokens as f64)
    }

    pub(super) fn tokens_per_s(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.time.as_secs_f64().max(1e-9))
    }
}

/// Leading bits of a duration that are kept, so quantiles are within 1 / 128 of the true value.
const KEPT_BITS: u32 = 7;

/// A histogram of durations, with buckets that grow with the duration: a trace may hold any number of calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Durations {
    buckets: Vec<u64>,
    count: u64,
    sum: Duration,
}

/// A distribution of durations, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DurationsUs {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Durations {
    pub(super) fn add(&mut self, duration: Duration) {
        let bucket = bucket(duration.as_nanos() as u64);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
        self.count += 1;
        self.sum += duration;
    }

    /// `None` if nothing was counted.
    pub(crate) fn us(&self) -> Option<DurationsUs> {
        (self.count > 0).then(|| DurationsUs {
            mean: self.sum.as_secs_f64() * 1e6 / self.count as f64,
            p50: self.quantile_us(0.5),
            p99: self.quantile_us(0.99),
        })
    }

    fn quantile_us(&self, share: f64) -> f64 {
        let mut left = (self.count as f64 * share) as u64;
        for (bucket, count) in self.buckets.iter().enumerate() {
            if left < *count {
                return middle_ns(bucket) / 1e3;
            }
            left -= count;
        }
        0.0
    }
}

/// Small numbers have a bucket each; larger ones share one by their leading bits.
fn bucket(ns: u64) -> usize {
    let shift = ns.checked_ilog2().unwrap_or(0).saturating_sub(KEPT_BITS);
    ((u64::from(shift) << KEPT_BITS) + (ns >> shift)) as usize
}

fn middle_ns(bucket: usize) -> f64 {
    // Beyond the small numbers, the leading kept bit adds one to the shift.
    let shift = (bucket >> KEPT_BITS).saturating_sub(1);
    let first = (bucket - (shift << KEPT_BITS)) << shift;
    first as f64 + ((1u64 << shift) - 1) as f64 / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_narrow_and_in_order() {
        let mut last = 0;
        for ns in (0..100_000).chain((17..60).map(|bits| (1u64 << bits) + 12_345)) {
            let bucket = bucket(ns);
            assert!(bucket >= last, "{ns}");
            last = bucket;
            let off = (middle_ns(bucket) - ns as f64).abs();
            assert!(off <= ns as f64 / 128.0, "{ns}: {}", middle_ns(bucket));
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let mut durations = Durations::default();
        assert_eq!(durations.us(), None);
        for us in (1..=200).rev() {
            durations.add(Duration::from_micros(us));
        }
        let us = durations.us().unwrap();
        assert!((us.mean - 100.5).abs() < 1e-6, "{us:?}");
        assert!(
            (us.p50 - 101.0).abs() < 1.0 && (us.p99 - 199.0).abs() < 2.0,
            "{us:?}"
        );
    }

    #[test]
    fn time_per_token_needs_a_token() {
        let mut spent = Spent::default();
        assert_eq!((spent.us_per_token(), spent.tokens_per_s()), (None, None));
        assert_eq!(spent.on(3, || 7), 7);
        assert_eq!(spent.tokens, 3);
        spent.time = Duration::from_micros(6);
        assert!((spent.us_per_token().unwrap() - 2.0).abs() < 1e-9);
        assert!((spent.tokens_per_s().unwrap() - 5e5).abs() < 1e-3);
    }
}
