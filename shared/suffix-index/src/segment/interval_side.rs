//! The entries on one side of a context's place in a segment, nearest first.

use super::comparison::ContextComparison;
use super::edge_search::EdgeSearch;

/// Number of entries that are loaded together.
const GROUP: usize = 8;

/// How many entries from the context's place are read one after the other. Beyond that, the end of the interval is
/// searched for. These are the nearest entry and one group, since a second group would be another wait for memory.
pub(super) const STEPS_MAX: usize = 1 + GROUP;

/// The entries on one side of the context's place, by distance. The further away an entry is, the less it shares with
/// the context.
pub(super) struct IntervalSide {
    direction: Direction,
    /// Number of entries that end with the pattern.
    pub(super) len: usize,
    /// How many tokens the next entry beyond those shares with the context, or 0 if there is none.
    pub(super) next: usize,
    /// Text positions of `loaded_len` entries, from distance `loaded_from` on.
    loaded: [u32; GROUP],
    loaded_from: usize,
    loaded_len: usize,
    /// The search for the end of the interval, while one is needed.
    pub(super) search: Option<EdgeSearch>,
    pub(super) entries_read: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Direction {
    Before,
    Behind,
}

impl IntervalSide {
    pub(super) fn new(direction: Direction) -> Self {
        IntervalSide {
            direction,
            len: 0,
            next: 0,
            loaded: [0; GROUP],
            loaded_from: 0,
            loaded_len: 0,
            search: None,
            entries_read: 0,
        }
    }

    /// Loads the entries beyond those that end with the pattern, and prefetches the text to which they point.
    pub(super) fn prefetch_next(&mut self, comparison: &ContextComparison<'_>, place: usize) {
        self.load(comparison, place, self.len + 1);
        comparison.prefetch(&self.loaded[..self.loaded_len], 0);
    }

    /// Adds the entries that end with the pattern of `len` tokens, one group at a time. Begins a search if there are
    /// many.
    pub(super) fn walk(
        &mut self,
        comparison: &ContextComparison<'_>,
        place: usize,
        len: usize,
        exact_max: usize,
    ) {
        if self.next < len || self.search.is_some() {
            return;
        }
        self.len += 1;
        while self.len < STEPS_MAX {
            self.load(comparison, place, self.len);
            let skipped = self.len - self.loaded_from.min(self.len);
            let loaded = &self.loaded[..self.loaded_len];
            let Some(rest) = loaded.get(skipped..).filter(|rest| !rest.is_empty()) else {
                self.next = 0;
                return;
            };
            // If the furthest entry ends with the pattern, all of them do.
            let holds = |end: &u32| comparison.ends_with(*end, len);
            if rest.last().is_some_and(holds) {
                self.len += rest.len();
                continue;
            }
            let within = rest[..rest.len() - 1].partition_point(holds);
            self.next = comparison.common(rest[within]);
            self.len += within;
            return;
        }
        self.search = Some(self.begin(comparison, place, len, self.len, exact_max));
    }

    /// Begins a search for the end of a pattern's interval. The nearest `known` entries are known to belong to it.
    pub(super) fn begin(
        &self,
        comparison: &ContextComparison<'_>,
        place: usize,
        len: usize,
        known: usize,
        exact_max: usize,
    ) -> EdgeSearch {
        match self.direction {
            Direction::Before => comparison.start(len, place - known, place, exact_max),
            Direction::Behind => comparison.end(len, place + known, place, exact_max),
        }
    }

    /// How many tokens the nearest entry shares with the context, or 0 if there is none.
    pub(super) fn common(&mut self, comparison: &ContextComparison<'_>, place: usize) -> usize {
        self.load(comparison, place, 0);
        self.loaded(0).map_or(0, |end| comparison.common(end))
    }

    fn loaded(&self, distance: usize) -> Option<u32> {
        let loaded = &self.loaded[..self.loaded_len];
        loaded.get(distance.checked_sub(self.loaded_from)?).copied()
    }

    /// Loads the entry at a distance, and those beyond it.
    fn load(&mut self, comparison: &ContextComparison<'_>, place: usize, distance: usize) {
        if self.loaded(distance).is_some() {
            return;
        }
        let all = comparison.view.ends;
        // The nearest entry is often the only one that is needed, and the search has just read its neighbourhood.
        let wanted = if distance == 0 { 1 } else { GROUP };
        let count = match self.direction {
            Direction::Before => {
                let end = place - distance;
                let count = end.min(wanted);
                let nearest = all[end - count..end].iter().rev();
                for (slot, &end) in self.loaded.iter_mut().zip(nearest) {
                    *slot = end;
                }
                count
            }
            Direction::Behind => {
                let start = place + distance;
                let count = (all.len() - start).min(wanted);
                self.loaded[..count].copy_from_slice(&all[start..start + count]);
                count
            }
        };
        self.loaded_from = distance;
        self.loaded_len = count;
        self.entries_read += count;
    }
}
