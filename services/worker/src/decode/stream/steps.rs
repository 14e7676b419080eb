//! What a step takes of an engine that does not say: told by the gaps between what it sends.
//!
//! Engines that generate by themselves batch as they like, and send each request of their batch something after each step. So
//! the gap between two sendings to one request is a step, and all requests of the batch see the same one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Sendings that are closer together are of one step, sent in pieces. No engine's step is as short.
const TOGETHER: Duration = Duration::from_micros(100);
/// Gaps that a median is of.
const WINDOW: usize = 64;
/// Gaps after which it is told anew.
const TOLD_EVERY: usize = 16;
/// Sizes of batch are told apart by powers of two, up to this one and above.
const CLASSES: usize = 11;

/// Steps lately, by the number of requests that the engine sent to. No clock: instants are handed in.
#[derive(Debug, Default)]
pub(super) struct Steps {
    classes: [Class; CLASSES],
}

#[derive(Debug, Default)]
struct Class {
    /// The last ones, a ring.
    gaps_s: Vec<f64>,
    heard: usize,
}

/// When a request was last sent something.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastSent(Option<Instant>);

/// What a gap tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gap {
    /// The request's share of the step: that of all requests of the batch together is the step.
    pub(super) share_s: f64,
    /// Now and then: the largest batch of a class, and the median step of such ones.
    pub(super) median: Option<(u32, f64)>,
}

/// A stream that the engine sends tokens over, from the first one on.
pub(super) struct SentTo {
    all: Arc<AtomicU32>,
    is_counted: bool,
    pub(super) last: LastSent,
}

impl SentTo {
    pub(super) fn new(all: &Arc<AtomicU32>) -> Self {
        SentTo {
            all: all.clone(),
            is_counted: false,
            last: LastSent::default(),
        }
    }

    /// How many there are, this one among them.
    pub(super) fn batch(&mut self) -> u32 {
        if std::mem::replace(&mut self.is_counted, true) {
            self.all.load(Ordering::Relaxed)
        } else {
            self.all.fetch_add(1, Ordering::Relaxed) + 1
        }
    }
}

impl Drop for SentTo {
    fn drop(&mut self) {
        if self.is_counted {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Steps {
    /// A request of `batch` was sent something. `None` where that begins its answer, or belongs to the step before.
    pub(super) fn heard(&mut self, last: &mut LastSent, now: Instant, batch: u32) -> Option<Gap> {
        let before = last.0.replace(now)?;
        let gap = now.saturating_duration_since(before);
        if gap < TOGETHER {
            return None;
        }
        let batch = batch.max(1);
        let at = (batch.next_power_of_two().ilog2() as usize).min(CLASSES - 1);
        let median = self.classes[at].add(gap.as_secs_f64());
        Some(Gap {
            share_s: gap.as_secs_f64() / f64::from(batch),
            median: median.map(|seconds| (1 << at, seconds)),
        })
    }
}

impl Class {
    fn add(&mut self, gap_s: f64) -> Option<f64> {
        match self.gaps_s.get_mut(self.heard % WINDOW) {
            Some(oldest) => *oldest = gap_s,
            None => self.gaps_s.push(gap_s),
        }
        self.heard += 1;
        if !self.heard.is_multiple_of(TOLD_EVERY) {
            return None;
        }
        let mut sorted = self.gaps_s.clone();
        sorted.sort_by(f64::total_cmp);
        Some(sorted[sorted.len() / 2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(10);

    #[test]
    fn the_shares_of_a_batch_are_its_steps() {
        let mut steps = Steps::default();
        let start = Instant::now();
        let mut requests = [LastSent::default(); 4];
        let mut seconds = 0.0;
        for step in 0..=100 {
            for last in &mut requests {
                let gap = steps.heard(last, start + STEP * step, 4);
                seconds += gap.map_or(0.0, |gap| gap.share_s);
            }
        }
        assert!((seconds - 1.0).abs() < 1e-9, "{seconds}");
    }

    #[test]
    fn what_is_sent_in_pieces_is_one_step() {
        let mut steps = Steps::default();
        let mut last = LastSent::default();
        let start = Instant::now();
        let piece = Duration::from_micros(20);
        assert_eq!(steps.heard(&mut last, start, 1), None);
        assert_eq!(steps.heard(&mut last, start + piece, 1), None);
        let gap = steps.heard(&mut last, start + piece + STEP, 1).unwrap();
        assert!((gap.share_s - STEP.as_secs_f64()).abs() < 1e-9);
    }

    #[test]
    fn medians_are_of_steps_lately_and_of_batches_alike() {
        let mut steps = Steps::default();
        let mut now = Instant::now();
        let mut told = |batch: u32, step: Duration, count: usize| {
            let mut last = LastSent(Some(now));
            let mut median = None;
            for number in 0..count {
                // One in eight waits for something.
                let slow = if number % 8 == 0 { 20 } else { 1 };
                now += step * slow;
                median = steps
                    .heard(&mut last, now, batch)
                    .unwrap()
                    .median
                    .or(median);
            }
            median
        };
        assert_eq!(told(1, STEP, TOLD_EVERY - 1), None);
        assert_eq!(told(1, STEP, 1), Some((1, 0.01)));
        assert_eq!(told(3, STEP * 2, TOLD_EVERY), Some((4, 0.02)));
        assert_eq!(told(1, STEP * 3, WINDOW), Some((1, 0.03)));
        let most = 1 << (CLASSES - 1);
        assert_eq!(told(5000, STEP, TOLD_EVERY), Some((most, 0.01)));
    }
}
