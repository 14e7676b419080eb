//! Step times of an engine that does not report them, measured by the gaps between its events.
//!
//! A streaming engine composes its batches itself, and sends an event to each request of a batch after each step. So
//! the gap between two events of one request is a step, and all requests of the batch see the same gap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Events that are closer together belong to one step that was sent in pieces. No engine has steps as short as this.
const STEP_MIN: Duration = Duration::from_micros(100);
/// Number of gaps in a median.
const WINDOW: usize = 64;
/// Number of gaps between two reports of the median.
const REPORT_EVERY: usize = 16;
/// Number of size classes. Batches are classified by powers of two; the last class has no upper limit.
const CLASSES: usize = 11;

/// Recent steps, by the number of active streams. It has no clock: callers pass instants.
#[derive(Debug, Default)]
pub(super) struct StepGaps {
    classes: [SizeClass; CLASSES],
}

#[derive(Debug, Default)]
struct SizeClass {
    /// A ring of the last gaps, seconds.
    gaps_s: Vec<f64>,
    count: usize,
}

/// The time of a stream's last event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastEvent(Option<Instant>);

/// The result of measuring a gap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gap {
    /// The request's share of the step, seconds. The shares of all requests of the batch add up to the step.
    pub(super) share_s: f64,
    /// Every [`REPORT_EVERY`] gaps: the largest batch of the class, and the median step of the class, seconds.
    pub(super) median: Option<(u32, f64)>,
}

/// The clock of one stream. It counts the stream as active from its first tokens on.
pub(super) struct StreamClock {
    active_streams: Arc<AtomicU32>,
    is_counted: bool,
    pub(super) last: LastEvent,
}

impl StreamClock {
    pub(super) fn new(active_streams: &Arc<AtomicU32>) -> Self {
        StreamClock {
            active_streams: active_streams.clone(),
            is_counted: false,
            last: LastEvent::default(),
        }
    }

    /// Number of active streams, including this one.
    pub(super) fn batch(&mut self) -> u32 {
        if std::mem::replace(&mut self.is_counted, true) {
            self.active_streams.load(Ordering::Relaxed)
        } else {
            self.active_streams.fetch_add(1, Ordering::Relaxed) + 1
        }
    }
}

impl Drop for StreamClock {
    fn drop(&mut self) {
        if self.is_counted {
            self.active_streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl StepGaps {
    /// Records an event of a stream in a batch of `batch` streams. Returns `None` for the first event of a stream,
    /// and for another piece of the same step.
    pub(super) fn record(&mut self, last: &mut LastEvent, now: Instant, batch: u32) -> Option<Gap> {
        let before = last.0.replace(now)?;
        let gap = now.saturating_duration_since(before);
        if gap < STEP_MIN {
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

impl SizeClass {
    /// Adds a gap. Returns the median if it is due.
    fn add(&mut self, gap_s: f64) -> Option<f64> {
        match self.gaps_s.get_mut(self.count % WINDOW) {
            Some(oldest) => *oldest = gap_s,
            None => self.gaps_s.push(gap_s),
        }
        self.count += 1;
        if !self.count.is_multiple_of(REPORT_EVERY) {
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
    fn the_shares_of_a_batch_add_up_to_its_steps() {
        let mut gaps = StepGaps::default();
        let start = Instant::now();
        let mut requests = [LastEvent::default(); 4];
        let mut seconds = 0.0;
        for step in 0..=100 {
            for last in &mut requests {
                let gap = gaps.record(last, start + STEP * step, 4);
                seconds += gap.map_or(0.0, |gap| gap.share_s);
            }
        }
        assert!((seconds - 1.0).abs() < 1e-9, "{seconds}");
    }

    #[test]
    fn pieces_of_one_step_are_counted_once() {
        let mut gaps = StepGaps::default();
        let mut last = LastEvent::default();
        let start = Instant::now();
        let piece = Duration::from_micros(20);
        assert_eq!(gaps.record(&mut last, start, 1), None);
        assert_eq!(gaps.record(&mut last, start + piece, 1), None);
        let gap = gaps.record(&mut last, start + piece + STEP, 1).unwrap();
        assert!((gap.share_s - STEP.as_secs_f64()).abs() < 1e-9);
    }

    #[test]
    fn medians_cover_recent_steps_of_similar_batches() {
        let mut gaps = StepGaps::default();
        let mut now = Instant::now();
        let mut median = |batch: u32, step: Duration, count: usize| {
            let mut last = LastEvent(Some(now));
            let mut last_median = None;
            for number in 0..count {
                // One in eight is slow.
                let slow = if number % 8 == 0 { 20 } else { 1 };
                now += step * slow;
                let gap = gaps.record(&mut last, now, batch).unwrap();
                last_median = gap.median.or(last_median);
            }
            last_median
        };
        assert_eq!(median(1, STEP, REPORT_EVERY - 1), None);
        assert_eq!(median(1, STEP, 1), Some((1, 0.01)));
        assert_eq!(median(3, STEP * 2, REPORT_EVERY), Some((4, 0.02)));
        assert_eq!(median(1, STEP * 3, WINDOW), Some((1, 0.03)));
        let most = 1 << (CLASSES - 1);
        assert_eq!(median(5000, STEP, REPORT_EVERY), Some((most, 0.01)));
    }
}
