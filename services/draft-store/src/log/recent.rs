//! Writes that the journal has and the index does not: the newest part of the log, in memory.
//!
//! Most records are replaced or removed soon. The state of a running document is written with each append, an entry
//! of the outbox is gone after a second, and a document that has ended moves to a segment. Writing each of them to
//! sled at once took a fifth of the processor time of a serving mesh. Now sled gets what is left when there is enough
//! of it, and not while somebody waits.
//!
//! There are two generations. New writes go to the *active* one. Once it is full it becomes the *frozen* one, which
//! never changes and is written to sled. A write in a newer generation hides those in older ones and in sled.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Range;
use std::iter::Peekable;
use std::ops::Bound;
use std::sync::Arc;

use crate::log::Batch;
use crate::log::journal::JournalPosition;

/// Memory of a write beside its key and value.
const WRITE_OVERHEAD_BYTES: usize = 128;

type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

type GenerationRange<'a> = Peekable<Range<'a, Vec<u8>, Option<Vec<u8>>>>;

/// Writes up to a position in the journal. `None` as the value of a key is a removal.
pub(super) struct Generation {
    pub(super) writes: Writes,
    bytes: usize,
    pub(super) position: JournalPosition,
}

impl Generation {
    fn new(position: JournalPosition) -> Self {
        Generation {
            writes: Writes::new(),
            bytes: 0,
            position,
        }
    }

    fn put(&mut self, key: Vec<u8>, value: Option<Vec<u8>>) {
        let len = key.len();
        self.bytes += value.as_ref().map_or(0, Vec::len);
        match self.writes.insert(key, value) {
            Some(before) => self.bytes -= before.map_or(0, |value| value.len()),
            None => self.bytes += len + WRITE_OVERHEAD_BYTES,
        }
    }
}

/// The newest part of the log; see the module.
pub(super) struct RecentWrites {
    active: Generation,
    frozen: Option<Arc<Generation>>,
}

impl RecentWrites {
    /// Without writes: the index is complete up to `position`.
    pub(super) fn new(position: JournalPosition) -> Self {
        RecentWrites {
            active: Generation::new(position),
            frozen: None,
        }
    }

    /// Adds a batch that ends at `position` in the journal.
    pub(super) fn add(&mut self, batch: &Batch, position: JournalPosition) {
        for (key, value) in batch.writes() {
            self.active.put(key.clone(), value.cloned());
        }
        self.active.position = position;
    }

    /// Memory of the active generation.
    pub(super) fn active_bytes(&self) -> usize {
        self.active.bytes
    }

    /// Memory of both.
    pub(super) fn bytes(&self) -> usize {
        self.active.bytes + self.frozen.as_ref().map_or(0, |frozen| frozen.bytes)
    }

    /// The frozen generation. If there is none, the active one becomes it.
    pub(super) fn freeze(&mut self) -> Arc<Generation> {
        let RecentWrites { active, frozen } = self;
        let frozen = frozen.get_or_insert_with(|| {
            let next = Generation::new(active.position);
            Arc::new(std::mem::replace(active, next))
        });
        frozen.clone()
    }

    /// Drops the frozen generation, which the index has now.
    pub(super) fn drop_frozen(&mut self) {
        self.frozen = None;
    }

    /// The newest write to a key; `None` if there is none here.
    pub(super) fn get(&self, key: &[u8]) -> Option<Option<&Vec<u8>>> {
        let frozen = || self.frozen.as_ref()?.writes.get(key);
        let written = self.active.writes.get(key).or_else(frozen);
        written.map(Option::as_ref)
    }

    /// The newest writes to the keys of `from..to`, in order.
    pub(super) fn range<'a>(&'a self, from: &[u8], to: &[u8]) -> RecentRange<'a> {
        let range = |writes: &'a Writes| {
            // A range that ends before it begins is a panic of the map.
            let bounds = (Bound::Included(from), Bound::Excluded(to));
            let writes = (from < to).then(|| writes.range::<[u8], _>(bounds));
            writes.map(Iterator::peekable)
        };
        RecentRange {
            active: range(&self.active.writes),
            frozen: self
                .frozen
                .as_ref()
                .and_then(|frozen| range(&frozen.writes)),
        }
    }
}

/// Writes of both generations in order of their keys; see [`RecentWrites::range`].
pub(super) struct RecentRange<'a> {
    active: Option<GenerationRange<'a>>,
    frozen: Option<GenerationRange<'a>>,
}

impl<'a> Iterator for RecentRange<'a> {
    type Item = (&'a Vec<u8>, Option<&'a Vec<u8>>);

    fn next(&mut self) -> Option<Self::Item> {
        let mut active = self.active.as_mut();
        let mut frozen = self.frozen.as_mut();
        let newest = active.as_mut().and_then(|active| active.peek());
        let older = frozen.as_mut().and_then(|frozen| frozen.peek());
        let order = match (newest, older) {
            (Some((newest, _)), Some((older, _))) => newest.cmp(older),
            (Some(_), None) => Ordering::Less,
            (None, _) => Ordering::Greater,
        };
        let mut next = None;
        if order != Ordering::Less {
            next = frozen.and_then(Iterator::next);
        }
        if order != Ordering::Greater {
            next = active.and_then(Iterator::next);
        }
        next.map(|(key, value)| (key, value.as_ref()))
    }
}
