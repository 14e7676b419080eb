//! The table of parked requests: a plain value with a budget of entries, tokens and time.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use refrain_protocol::RequestId;

/// The limits of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) entries: usize,
    pub(super) tokens: u64,
    /// How long an entry stays.
    pub(super) time: Duration,
}

/// The place of an entry in the order of age: the time since when it is parked, and a number for equal times.
type Age = (Instant, u64);

struct Entry<T> {
    request: RequestId,
    value: T,
    tokens: u64,
}

/// Parked requests, the oldest first.
pub(super) struct ParkedTable<T> {
    limits: Limits,
    entries: BTreeMap<Age, Entry<T>>,
    ages: HashMap<RequestId, Age>,
    tokens: u64,
    next: u64,
}

impl<T> ParkedTable<T> {
    pub(super) fn new(limits: Limits) -> Self {
        ParkedTable {
            limits,
            entries: BTreeMap::new(),
            ages: HashMap::new(),
            tokens: 0,
            next: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Length of all texts together.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Whether a text of this length can be parked at all.
    pub(super) fn takes(&self, tokens: u64) -> bool {
        self.limits.entries > 0 && tokens <= self.limits.tokens
    }

    /// Adds an entry that has been parked since then. Returns those that made room for it, the oldest first. An entry
    /// of the same request is among them.
    pub(super) fn insert(
        &mut self,
        request: RequestId,
        value: T,
        tokens: u64,
        since: Instant,
    ) -> Vec<T> {
        let mut gone: Vec<T> = self
            .take(&request)
            .map(|(old, _)| old)
            .into_iter()
            .collect();
        let age = (since, self.next);
        self.next += 1;
        self.tokens += tokens;
        self.ages.insert(request, age);
        let entry = Entry {
            request,
            value,
            tokens,
        };
        self.entries.insert(age, entry);
        while self.entries.len() > self.limits.entries || self.tokens > self.limits.tokens {
            match self.entries.keys().next().copied() {
                Some(oldest) => gone.extend(self.remove(oldest)),
                None => break,
            }
        }
        gone
    }

    /// Takes the entry of a request, with the time since when it has been parked.
    pub(super) fn take(&mut self, request: &RequestId) -> Option<(T, Instant)> {
        let age = self.ages.get(request).copied()?;
        Some((self.remove(age)?, age.0))
    }

    /// Takes the first entry for which this holds.
    pub(super) fn take_where(&mut self, holds: impl Fn(&T) -> bool) -> Option<T> {
        let mut entries = self.entries.iter();
        let (age, _) = entries.find(|(_, entry)| holds(&entry.value))?;
        self.remove(*age)
    }

    /// Takes the entries whose time is up.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<T> {
        let mut expired = Vec::new();
        while let Some(age) = self.entries.keys().next().copied()
            && now.saturating_duration_since(age.0) >= self.limits.time
        {
            expired.extend(self.remove(age));
        }
        expired
    }

    /// Takes all entries.
    pub(super) fn clear(&mut self) -> Vec<T> {
        self.ages.clear();
        self.tokens = 0;
        let entries = std::mem::take(&mut self.entries);
        entries.into_values().map(|entry| entry.value).collect()
    }

    fn remove(&mut self, age: Age) -> Option<T> {
        let entry = self.entries.remove(&age)?;
        self.ages.remove(&entry.request);
        self.tokens -= entry.tokens;
        Some(entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> (ParkedTable<&'static str>, Instant) {
        let limits = Limits {
            entries: 3,
            tokens: 100,
            time: Duration::from_secs(10),
        };
        (ParkedTable::new(limits), Instant::now())
    }

    #[test]
    fn the_oldest_make_room_for_new_ones() {
        let (mut table, now) = table();
        let at = |seconds| now + Duration::from_secs(seconds);
        assert!(table.takes(100) && !table.takes(101));
        for (number, name) in [(1, "a"), (2, "b"), (3, "c")] {
            let gone = table.insert(RequestId(number), name, 20, at(number as u64));
            assert!(gone.is_empty());
        }
        assert_eq!(table.insert(RequestId(4), "d", 20, at(4)), ["a"]);
        assert_eq!((table.len(), table.tokens()), (3, 60));
        assert_eq!(table.insert(RequestId(5), "e", 80, at(5)), ["b", "c"]);
        // A request that comes again takes its own place, and one that was put back is as old as before.
        assert_eq!(table.insert(RequestId(5), "f", 10, at(6)), ["e"]);
        assert_eq!(table.take(&RequestId(4)), Some(("d", at(4))));
        assert!(table.insert(RequestId(4), "d", 20, at(4)).is_empty());
        assert_eq!(table.insert(RequestId(6), "g", 80, at(7)), ["d"]);
        assert_eq!(table.take_where(|name| *name == "f"), Some("f"));
        assert_eq!(table.take_where(|name| *name == "f"), None);
        assert_eq!((table.len(), table.tokens()), (1, 80));
        assert_eq!(table.clear(), ["g"]);
        assert_eq!((table.len(), table.tokens()), (0, 0));
    }

    #[test]
    fn entries_expire_after_their_time() {
        let (mut table, now) = table();
        let at = |seconds| now + Duration::from_secs(seconds);
        table.insert(RequestId(1), "a", 1, at(0));
        table.insert(RequestId(2), "b", 1, at(5));
        assert_eq!(table.expire(at(9)), [""; 0]);
        assert_eq!(table.expire(at(10)), ["a"]);
        assert_eq!(table.take(&RequestId(1)), None);
        assert_eq!(table.expire(at(15)), ["b"]);
        assert_eq!(table.len(), 0);
    }
}
