//! Pieces of work that have nothing to do with each other, on the machine's cores.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;

use super::Progress;

/// Does pieces `0..count`, begun in this `order`; outcomes are in theirs. Each tells its progress through the function that
/// it is given; `progress` hears of all of them together. Once a piece has failed no other begins.
pub(crate) fn on_cores<O: Send>(
    order: Vec<usize>,
    work: impl Fn(usize, &dyn Fn(Progress)) -> anyhow::Result<O> + Sync,
    mut progress: impl FnMut(Progress),
) -> anyhow::Result<Vec<O>> {
    let count = order.len();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let waiting = Mutex::new(VecDeque::from(order));
    let outcomes = Mutex::new(Vec::with_capacity(count));
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..cores.min(count) {
            let sender = sender.clone();
            let (waiting, outcomes, work) = (&waiting, &outcomes, &work);
            scope.spawn(move || {
                let next = || lock(waiting).pop_front();
                while let Some(piece) = next() {
                    let outcome = work(piece, &|at| {
                        // The listener stays until all senders are gone.
                        let _ = sender.send((piece, at));
                    });
                    if outcome.is_err() {
                        lock(waiting).clear();
                    }
                    lock(outcomes).push((piece, outcome));
                }
            });
        }
        drop(sender);
        let mut each = vec![Progress::default(); count];
        for (piece, at) in receiver {
            each[piece] = at;
            progress(Progress::of_all(&each));
        }
    });
    let mut outcomes = outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|(piece, _)| *piece);
    let done: anyhow::Result<Vec<O>> = outcomes.into_iter().map(|(_, outcome)| outcome).collect();
    done.and_then(|done| {
        let all = done.len() == count;
        all.then_some(done).context("a thread has ended early")
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress {
    fn of_all(each: &[Progress]) -> Self {
        let mut all = Progress::default();
        for Progress {
            docs,
            steps,
            output_tokens,
            share,
        } in each
        {
            all.docs += docs;
            all.steps += steps;
            all.output_tokens += output_tokens;
            all.share += share / each.len() as f64;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::bail;

    use super::*;

    #[test]
    fn outcomes_are_in_order_and_progress_is_of_all() -> anyhow::Result<()> {
        let at = |docs| Progress {
            docs,
            share: 1.0,
            ..Progress::default()
        };
        let mut last = Progress::default();
        let squares = on_cores(
            (0..20).rev().collect(),
            |piece, told| {
                told(at(piece as u64));
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
    fn a_failure_ends_it() {
        let begun = AtomicUsize::new(0);
        let failed = on_cores(
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
        assert_eq!(failed.expect_err("it has failed").to_string(), "piece 3");
        assert!(begun.into_inner() < 1000);
    }
}
