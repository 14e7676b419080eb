//! The threads that search for the drafts of a step.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Maximum number of requests that a thread takes at a time: more would save nothing.
const TAKEN_MAX: usize = 4;
/// Items from which on threads map a batch together. Waking them takes about as long as 100 microseconds of
/// searching.
const TOGETHER_MIN: usize = 12;
/// Maximum number of threads, the caller included.
const THREADS_MAX: usize = 16;

/// Maps many items, on its own threads and the caller's.
///
/// A proposal takes some microseconds, and waking a thread takes some tens of microseconds. So helpers are woken only
/// for large batches. The caller handles a smaller batch alone.
///
/// The caller waits until each helper that it woke has run, even one that finds nothing left to do. The helpers
/// borrow from the batch, and only unsafe code could go on while a thread may still read it. On a machine whose cores
/// are all busy, such a helper makes the step wait for the system's scheduler. So one core is left free, and with two
/// cores there is no helper.
pub(crate) struct Proposers {
    /// The helpers; `None` if the caller works alone.
    helpers: Option<ThreadPool>,
    together_min: usize,
}

impl Proposers {
    /// # Errors
    /// The system gives no threads.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::of_threads(threads(cores), TOGETHER_MIN)
    }

    /// `threads` counts the caller. Batches of at least `together_min` items are mapped together.
    fn of_threads(threads: usize, together_min: usize) -> anyhow::Result<Self> {
        let helpers = ThreadPoolBuilder::new()
            .num_threads(threads.saturating_sub(1))
            .thread_name(|number| format!("propose-{number}"));
        Ok(Proposers {
            helpers: (threads > 1).then(|| helpers.build()).transpose()?,
            together_min,
        })
    }

    /// The results of `make` for each item, in the order of the items.
    pub(crate) fn map<T: Sync, R: Send>(
        &self,
        items: &[T],
        make: impl Fn(&T) -> R + Sync,
    ) -> Vec<R> {
        let helpers = self.helpers.as_ref();
        let Some(helpers) = helpers.filter(|_| items.len() >= self.together_min.max(2)) else {
            return items.iter().map(make).collect();
        };
        let threads = (helpers.current_num_threads() + 1).min(items.len());
        let made: Mutex<Vec<(usize, Vec<R>)>> = Mutex::new(Vec::with_capacity(items.len()));
        let next = AtomicUsize::new(0);
        let work = || {
            // A helper that starts late finds nothing to do.
            while let Some(part) = take(&next, items.len(), threads) {
                let first = part.start;
                let part = items[part].iter().map(&make).collect();
                made.lock().push((first, part));
            }
        };
        helpers.in_place_scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| work());
            }
            work();
        });
        let mut made = made.into_inner();
        made.sort_unstable_by_key(|(first, _)| *first);
        made.into_iter().flat_map(|(_, part)| part).collect()
    }
}

/// Takes some of the items. It takes fewer near the end, where all threads would wait for one that has several left.
fn take(next: &AtomicUsize, items: usize, threads: usize) -> Option<Range<usize>> {
    let end = |from: usize| from + ((items - from) / (2 * threads)).clamp(1, TAKEN_MAX);
    let take = |from: usize| (from < items).then(|| end(from));
    let from = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
    from.ok().map(|from| from..end(from))
}

/// Number of threads that search for drafts on a machine with `cores` cores, including the caller. A core is left
/// free.
fn threads(cores: usize) -> usize {
    cores.saturating_sub(1).clamp(1, THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;
    use std::thread::{ThreadId, current};

    use super::*;

    fn proposers(threads: usize, together_min: usize) -> Proposers {
        Proposers::of_threads(threads, together_min).expect("threads")
    }

    #[test]
    fn a_core_is_left_free() {
        assert_eq!([1, 2, 3, 4, 9, 64].map(threads), [1, 1, 2, 3, 8, 16]);
    }

    #[test]
    fn all_are_made_once_and_in_their_order() {
        for threads in 1..4 {
            let proposers = proposers(threads, 2);
            for len in [0, 1, 2, 4, 5, 64, 101] {
                let items: Vec<usize> = (0..len).collect();
                let made = proposers.map(&items, |item| item * 3);
                assert_eq!(made, items.iter().map(|item| item * 3).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_last_ones_are_taken_one_by_one() {
        let next = AtomicUsize::new(0);
        let sizes: Vec<usize> = std::iter::from_fn(|| take(&next, 64, 4))
            .map(|part| part.len())
            .collect();
        assert_eq!(sizes.iter().sum::<usize>(), 64);
        assert_eq!(sizes[0], TAKEN_MAX);
        assert!(sizes.is_sorted_by(|one, next| one >= next));
        assert!(sizes.ends_with(&[1; 14]), "{sizes:?}");
        assert_eq!(take(&next, 64, 4), None);
        assert_eq!(take(&AtomicUsize::new(0), 0, 4), None);
    }

    #[test]
    fn a_large_batch_is_made_at_once_and_a_small_one_by_the_caller() {
        let proposers = proposers(2, 8);
        // The barrier needs two threads: the one with the first item waits for the one with the last.
        let both = Barrier::new(2);
        let items: Vec<usize> = (0..8).collect();
        let threads = proposers.map(&items, |item| {
            if [0, 7].contains(item) {
                both.wait();
            }
            current().id()
        });
        let threads: HashSet<ThreadId> = threads.into_iter().collect();
        assert_eq!(threads.len(), 2);
        assert!(threads.contains(&current().id()));
        let threads = proposers.map(&items[1..], |_| current().id());
        assert!(threads.iter().all(|thread| *thread == current().id()));
    }
}
