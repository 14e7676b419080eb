//! The contents of each worker's KV cache, by hashes of prefixes.
//!
//! A worker's report names the longest prefix of each context that it holds, which is exact. It cannot name all
//! shorter ones, and other engines name none. So the table also remembers the prefixes of what was sent to a worker.
//! Those are a guess: the least recently sent ones are forgotten as an engine would evict them, by its capacity, and
//! all of them when the process is another one.
//!
//! Only contexts of one namespace match, since the hash covers it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use lru::LruCache;
use refrain_protocol::prefix::{PrefixHash, mark};

/// Up to this many workers are asked one by one. For more of them it is faster to go through the holders of prefixes.
const ONE_BY_ONE_MAX: usize = 4;

/// The prefixes on all workers. Workers are named by their places in the worker table.
#[derive(Debug)]
pub(crate) struct PrefixTable {
    workers: HashMap<usize, WorkerPrefixes>,
    /// The workers that hold a prefix.
    holders: Holders,
    prefixes_max: usize,
}

/// Workers by prefix. The hasher is the one of [`LruCache`], since there are many look-ups for each event.
type Holders = HashMap<PrefixHash, Holding, lru::DefaultHasher>;

/// The workers that hold a prefix. Nearly always it is one, which needs no memory of its own.
#[derive(Debug)]
enum Holding {
    One(usize),
    Several(Vec<usize>),
}

impl Holding {
    fn workers(&self) -> &[usize] {
        match self {
            Holding::One(worker) => std::slice::from_ref(worker),
            Holding::Several(workers) => workers,
        }
    }
}

fn add_holder(holders: &mut Holders, prefix: PrefixHash, worker: usize) {
    match holders.entry(prefix) {
        Entry::Vacant(place) => {
            place.insert(Holding::One(worker));
        }
        Entry::Occupied(mut place) => match place.get_mut() {
            Holding::Several(workers) => workers.push(worker),
            Holding::One(other) => {
                let workers = vec![*other, worker];
                place.insert(Holding::Several(workers));
            }
        },
    }
}

#[derive(Debug)]
struct WorkerPrefixes {
    /// Prefixes that were sent, with the tokens that each adds to the next shorter one.
    sent: LruCache<PrefixHash, u32>,
    sent_tokens: u64,
    /// Prefixes that the worker reported.
    reported: HashSet<PrefixHash, lru::DefaultHasher>,
}

impl WorkerPrefixes {
    fn new() -> Self {
        WorkerPrefixes {
            sent: LruCache::unbounded(),
            sent_tokens: 0,
            reported: HashSet::default(),
        }
    }
}

impl PrefixTable {
    /// `prefixes_max` bounds the sent prefixes of each worker, and the reported ones.
    pub(crate) fn new(prefixes_max: usize) -> Self {
        PrefixTable {
            workers: HashMap::new(),
            holders: Holders::default(),
            prefixes_max,
        }
    }

    /// Notes that a context was sent to a worker whose KV cache holds at most `capacity_tokens`.
    pub(crate) fn sent(
        &mut self,
        worker: usize,
        prefixes: &[PrefixHash],
        capacity_tokens: Option<u64>,
    ) {
        if prefixes.is_empty() {
            return;
        }
        let of_worker = self
            .workers
            .entry(worker)
            .or_insert_with(WorkerPrefixes::new);
        // The longest one first, so that it is also forgotten first.
        for (nth, prefix) in prefixes.iter().enumerate().rev() {
            if of_worker.sent.get(prefix).is_some() {
                continue;
            }
            let shorter = nth.checked_sub(1).map_or(0, mark);
            let tokens = mark(nth) - shorter;
            of_worker.sent.put(*prefix, tokens);
            of_worker.sent_tokens += u64::from(tokens);
            if !of_worker.reported.contains(prefix) {
                add_holder(&mut self.holders, *prefix, worker);
            }
        }
        let tokens_max = capacity_tokens.unwrap_or(u64::MAX);
        while of_worker.sent.len() > self.prefixes_max || of_worker.sent_tokens > tokens_max {
            let Some((prefix, tokens)) = of_worker.sent.pop_lru() else {
                break;
            };
            of_worker.sent_tokens -= u64::from(tokens);
            if !of_worker.reported.contains(&prefix) {
                remove_holder(&mut self.holders, prefix, worker);
            }
        }
    }

    /// Replaces the prefixes that a worker reported.
    pub(crate) fn reported(&mut self, worker: usize, prefixes: Vec<PrefixHash>) {
        let of_worker = self
            .workers
            .entry(worker)
            .or_insert_with(WorkerPrefixes::new);
        let reported: HashSet<PrefixHash, lru::DefaultHasher> =
            prefixes.into_iter().take(self.prefixes_max).collect();
        for prefix in of_worker.reported.difference(&reported) {
            if !of_worker.sent.contains(prefix) {
                remove_holder(&mut self.holders, *prefix, worker);
            }
        }
        for prefix in reported.difference(&of_worker.reported) {
            if !of_worker.sent.contains(prefix) {
                add_holder(&mut self.holders, *prefix, worker);
            }
        }
        of_worker.reported = reported;
    }

    /// Forgets a worker, because it is gone or another process.
    pub(crate) fn forget(&mut self, worker: usize) {
        let Some(of_worker) = self.workers.remove(&worker) else {
            return;
        };
        let sent = of_worker.sent.iter().map(|(prefix, _)| *prefix);
        let prefixes: HashSet<PrefixHash> = sent.chain(of_worker.reported).collect();
        for prefix in prefixes {
            remove_holder(&mut self.holders, prefix, worker);
        }
    }

    /// For each of the workers, the tokens of the longest prefix of the context that it holds.
    pub(crate) fn held_tokens(&self, prefixes: &[PrefixHash], workers: &[usize]) -> Vec<u32> {
        if workers.len() <= ONE_BY_ONE_MAX {
            let held = workers.iter().map(|worker| self.held_by(*worker, prefixes));
            return held.collect();
        }
        // By place in the worker table; `u32::MAX` marks those that are not asked for.
        let places = workers.iter().max().map_or(0, |last| last + 1);
        let mut held = vec![u32::MAX; places];
        for worker in workers {
            held[*worker] = 0;
        }
        for (nth, prefix) in prefixes.iter().enumerate().rev() {
            let holding = self.holders.get(prefix);
            for worker in holding.map_or(&[][..], Holding::workers) {
                if let Some(tokens) = held.get_mut(*worker)
                    && *tokens == 0
                {
                    *tokens = mark(nth);
                }
            }
        }
        workers.iter().map(|worker| held[*worker]).collect()
    }

    fn held_by(&self, worker: usize, prefixes: &[PrefixHash]) -> u32 {
        let Some(of_worker) = self.workers.get(&worker) else {
            return 0;
        };
        let holds = |prefix| of_worker.sent.contains(prefix) || of_worker.reported.contains(prefix);
        let longest = prefixes.iter().rposition(holds);
        longest.map_or(0, mark)
    }

    /// Prefixes that are remembered, of all workers.
    pub(crate) fn len(&self) -> usize {
        self.holders.len()
    }
}

fn remove_holder(holders: &mut Holders, prefix: PrefixHash, worker: usize) {
    let Entry::Occupied(mut place) = holders.entry(prefix) else {
        return;
    };
    match place.get_mut() {
        Holding::Several(workers) => {
            workers.retain(|holder| *holder != worker);
            if let [other] = workers[..] {
                place.insert(Holding::One(other));
            }
        }
        Holding::One(holder) if *holder == worker => {
            place.remove();
        }
        Holding::One(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(numbers: impl IntoIterator<Item = u64>) -> Vec<PrefixHash> {
        numbers.into_iter().map(PrefixHash).collect()
    }

    fn held(table: &PrefixTable, prefixes: &[PrefixHash]) -> Vec<(usize, u32)> {
        let few = table.held_tokens(prefixes, &[1, 2]);
        let many: Vec<usize> = (0..=ONE_BY_ONE_MAX).collect();
        assert_eq!(table.held_tokens(prefixes, &many)[1..3], few);
        let held = [1, 2].into_iter().zip(few);
        held.filter(|(_, tokens)| *tokens > 0).collect()
    }

    #[test]
    fn the_longest_shared_prefix_counts() {
        let mut table = PrefixTable::new(100);
        table.sent(1, &context([1, 2, 3, 4]), None);
        table.sent(2, &context([1, 2, 9]), None);
        assert_eq!(held(&table, &context([1, 2, 3, 7])), [(1, 192), (2, 128)]);
        assert_eq!(held(&table, &context([8, 2])), [(1, 128), (2, 128)]);
        assert_eq!(held(&table, &context([8])), []);
        table.forget(1);
        assert_eq!(held(&table, &context([1, 2, 3])), [(2, 128)]);
        table.forget(2);
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn the_least_recent_context_goes_first_and_its_longest_prefix_before_all() {
        let mut table = PrefixTable::new(4);
        table.sent(1, &context([1, 2]), None);
        table.sent(1, &context([5, 6]), None);
        table.sent(1, &context([1]), None);
        table.sent(1, &context([9]), None);
        assert_eq!(held(&table, &context([1, 2])), [(1, 64)]);
        assert_eq!(held(&table, &context([5, 6])), [(1, 128)]);
        // By tokens of the KV cache: two prefixes of 64 tokens fit.
        table.sent(1, &context([9]), Some(128));
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn a_report_is_replaced_by_the_next_one() {
        let mut table = PrefixTable::new(100);
        table.reported(1, context([7]));
        table.sent(1, &context([1]), None);
        assert_eq!(held(&table, &context([1, 7])), [(1, 128)]);
        table.reported(1, context([1]));
        assert_eq!(held(&table, &context([1, 7])), [(1, 64)]);
        table.reported(1, Vec::new());
        assert_eq!(held(&table, &context([1, 7])), [(1, 64)]);
        table.forget(1);
        assert_eq!(table.len(), 0);
    }
}
