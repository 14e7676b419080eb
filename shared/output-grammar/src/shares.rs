//! A cache with a share for each namespace, so that none pushes out what others use.

use std::collections::HashMap;

use lru::LruCache;
use refrain_protocol::NamespaceId;

use crate::cache_key::CacheKey;

/// Values with weights, of which all together have a limit.
pub(crate) struct Shares<V> {
    by_namespace: HashMap<NamespaceId, Share<V>>,
    weight: usize,
    weight_max: usize,
    /// Counts the uses of all values.
    clock: u64,
}

/// The values of one namespace.
struct Share<V> {
    /// The value that was not used for longest comes last.
    entries: LruCache<CacheKey, Entry<V>>,
    weight: usize,
}

struct Entry<V> {
    value: V,
    weight: usize,
    /// The clock at its last use.
    used: u64,
}

impl<V> Default for Share<V> {
    fn default() -> Self {
        Share {
            entries: LruCache::unbounded(),
            weight: 0,
        }
    }
}

impl<V> Shares<V> {
    pub(crate) fn new(weight_max: usize) -> Self {
        Shares {
            by_namespace: HashMap::new(),
            weight: 0,
            weight_max,
            clock: 0,
        }
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        let shares = self.by_namespace.values();
        shares.map(|share| share.entries.len()).sum()
    }

    /// The weight of all values.
    pub(crate) fn weight(&self) -> usize {
        self.weight
    }

    pub(crate) fn get(&mut self, key: &CacheKey) -> Option<&V> {
        self.clock += 1;
        let share = self.by_namespace.get_mut(&key.namespace)?;
        let entry = share.entries.get_mut(key)?;
        entry.used = self.clock;
        Some(&entry.value)
    }

    /// Adds a value, and pushes others out until the weight fits. Returns their number.
    pub(crate) fn insert(&mut self, key: CacheKey, value: V, weight: usize) -> usize {
        self.clock += 1;
        let used = self.clock;
        let entry = Entry {
            value,
            weight,
            used,
        };
        let share = self.by_namespace.entry(key.namespace).or_default();
        let old = share.entries.put(key, entry);
        let old_weight = old.map_or(0, |old| old.weight);
        share.weight = share.weight + weight - old_weight;
        self.weight = self.weight + weight - old_weight;
        let mut pushed_out = 0;
        while self.weight > self.weight_max && self.push_out() {
            pushed_out += 1;
        }
        pushed_out
    }

    /// Pushes out the value that was not used for longest, of the namespace that has most. So none can push out those
    /// of others by asking for many.
    fn push_out(&mut self) -> bool {
        let oldest = |share: &Share<V>| share.entries.peek_lru().map(|(_, entry)| entry.used);
        let rank = |(_, share): &(&NamespaceId, &Share<V>)| {
            (share.weight, std::cmp::Reverse(oldest(share)))
        };
        let heaviest = self.by_namespace.iter().max_by_key(rank);
        let Some(namespace) = heaviest.map(|(namespace, _)| *namespace) else {
            return false;
        };
        let Some(share) = self.by_namespace.get_mut(&namespace) else {
            return false;
        };
        let popped = share.entries.pop_lru();
        let weight = popped.as_ref().map_or(0, |(_, entry)| entry.weight);
        share.weight -= weight;
        self.weight -= weight;
        if share.entries.is_empty() {
            self.by_namespace.remove(&namespace);
        }
        popped.is_some()
    }
}
