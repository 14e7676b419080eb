//! Runs independent replays in parallel on the machine's cores, and adds up their progress.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::progress::ProgressLine;

/// The progress of one replay, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplayProgress {
    /// Replayed calls.
    pub docs: u64,
    /// Steps.
    pub steps: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Share of the work that is done, 0 to 1.
    pub share: f64,
}

impl ReplayProgress {
    /// The progress of work that is not told call by call, at its end.
    pub(crate) fn done() -> Self {
        ReplayProgress {
            share: 1.0,
            ..ReplayProgress::default()
        }
    }

    /// Shows it on a terminal.
    pub(crate) fn show_on(self, line: &ProgressLine) {
        let tokens_per_step = self.output_tokens as f64 / self.steps.max(1) as f64;
        let message = format!(
            "{} calls, {} tokens, {tokens_per_step:.3} tokens per step",
            self.docs, self.output_tokens
        );
        line.show(Some(self.share), message);
    }

    fn sum(each: &[ReplayProgress]) -> Self {
        let mut sum = ReplayProgress::default();
        for one in each {
            sum.docs += one.docs;
            sum.steps += one.steps;
            sum.output_tokens += one.output_tokens;
            sum.share += one.share / each.len() as f64;
        }
        sum
    }
}

/// Runs the pieces `0..count`, which begin in this `order`; outcomes are in the order of their numbers. Each piece
/// reports through the function that it receives, and `progress` receives the sum. After a failure no other piece
/// begins.
pub(crate) fn run_in_parallel<O: Send>(
    order: Vec<usize>,
    work: impl Fn(usize, &dyn Fn(ReplayProgress)) -> anyhow::Result<O> + Sync,
    progress: impl FnMut(ReplayProgress) + Send,
) -> anyhow::Result<Vec<O>> {
    let count = order.len();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let waiting = Mutex::new(VecDeque::from(order));
    let outcomes = Mutex::new(Vec::with_capacity(count));
    let progress = Mutex::new((vec![ReplayProgress::default(); count], progress));
    let report = |piece: usize, at: ReplayProgress| {
        let (each, progress) = &mut *progress.lock();
        each[piece] = at;
        progress(ReplayProgress::sum(each));
    };
    let next = || waiting.lock().pop_front();
    let run_waiting = || {
        while let Some(piece) = next() {
            let outcome = work(piece, &|at| report(piece, at));
            if outcome.is_err() {
                waiting.lock().clear();
            }
            outcomes.lock().push((piece, outcome));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..cores.min(count) {
            scope.spawn(run_waiting);
        }
    });
    let mut outcomes = std::mem::take(&mut *outcomes.lock());
    outcomes.sort_by_key(|(piece, _)| *piece);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::bail;

    use super::*;

    #[test]
    fn outcomes_are_in_order_and_progress_is_the_sum() -> anyhow::Result<()> {
        let at = |docs| ReplayProgress {
            docs,
            share: 1.0,
            ..ReplayProgress::default()
        };
        let mut last = ReplayProgress::default();
        let squares = run_in_parallel(
            (0..20).rev().collect(),
            |piece, report| {
                report(at(piece as u64));
                Ok(piece * piece)
            },
            |progress| last = progress,
        )?;
        assert_eq!(
            squares,
            (0..20).map(|piece| piece * piece).collect::<Vec<_>>()
        );
        assert_eq!(last.docs, 190);
        assert!((last.share - 1.0).abs() < 1e-9);
        Ok(())
    }

    #[test]
    fn after_a_failure_no_piece_begins() {
        let begun = AtomicUsize::new(0);
        let failed = run_in_parallel(
            (0..1000).collect(),
            |piece, _| {
                begun.fetch_add(1, Ordering::Relaxed);
                if piece == 3 {
                    bail!("piece 3");
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
                Ok(())
            },
            |_| {},
        );
        assert_eq!(failed.expect_err("piece 3 fails").to_string(), "piece 3");
        assert!(begun.into_inner() < 1000);
    }
}
