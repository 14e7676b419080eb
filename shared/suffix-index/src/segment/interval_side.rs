//! The entries on one side of a context's place in a segment, nearest first.

use super::look::Look;
use super::narrow::Narrow;

/// Entries that are looked at together.
const GROUP: usize = 8;

/// How far from the context's place entries are looked at in their order; beyond, the end of an interval is searched
/// for. The nearest and one group behind it: a second group would be waited for on its own.
pub(super) const STEPS_MAX: usize = 1 + GROUP;

/// The entries on one side of the context's place, by their distance from it. The further, the less they have in common
/// with the context.
pub(super) struct Side {
    direction: Direction,
    /// Entries that end with the pattern.
    pub(super) len: usize,
    /// Common length of the entry behind those; 0 at the end.
    pub(super) next: usize,
    /// Text positions of the entries from distance `loaded_from` on.
    loaded: [u32; GROUP],
    loaded_from: usize,
    loaded_len: usize,
    /// A search for the end of the interval.
    pub(super) search: Option<Narrow>,
    pub(super) entries_read: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Direction {
    Before,
    Behind,
}

impl Side {
    pub(super) fn new(direction: Direction) -> Self {
        Side {
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

    /// Reads the entries behind those that end with the pattern, and asks for what they lead to.
    pub(super) fn expect(&mut self, look: &Look<'_>, place: usize) {
        self.load(look, place, self.len + 1);
        look.fetch(&self.loaded[..self.loaded_len], 0);
    }

    /// Takes in what ends with the pattern of `len` tokens, group by group; begins a search where there are many.
    pub(super) fn walk(&mut self, look: &Look<'_>, place: usize, len: usize, exact_max: usize) {
        if self.next < len || self.search.is_some() {
            return;
        }
        self.len += 1;
        while self.len < STEPS_MAX {
            self.load(look, place, self.len);
            let skipped = self.len - self.loaded_from.min(self.len);
            let loaded = &self.loaded[..self.loaded_len];
            let Some(rest) = loaded.get(skipped..).filter(|rest| !rest.is_empty()) else {
                self.next = 0;
                return;
            };
            // What holds of the furthest holds of all.
            let holds = |end: &u32| look.ends_with(*end, len);
            if rest.last().is_some_and(holds) {
                self.len += rest.len();
                continue;
            }
            let within = rest[..rest.len() - 1].partition_point(holds);
            self.next = look.common(rest[within]);
            self.len += within;
            return;
        }
        self.search = Some(self.begin(look, place, len, self.len, exact_max));
    }

    /// A search for the end of a pattern's interval, which so many entries are known to belong to.
    pub(super) fn begin(
        &self,
        look: &Look<'_>,
        place: usize,
        len: usize,
        known: usize,
        exact_max: usize,
    ) -> Narrow {
        match self.direction {
            Direction::Before => look.start(len, place - known, place, exact_max),
            Direction::Behind => look.end(len, place + known, place, exact_max),
        }
    }

    /// Common length of the entry nearest to the place; 0 if there is none.
    pub(super) fn common(&mut self, look: &Look<'_>, place: usize) -> usize {
        self.load(look, place, 0);
        self.loaded(0).map_or(0, |end| look.common(end))
    }

    fn loaded(&self, distance: usize) -> Option<u32> {
        let loaded = &self.loaded[..self.loaded_len];
        loaded.get(distance.checked_sub(self.loaded_from)?).copied()
    }

    /// Reads the entry at a distance, and those behind it along with it.
    fn load(&mut self, look: &Look<'_>, place: usize, distance: usize) {
        if self.loaded(distance).is_some() {
            return;
        }
        let all = look.view.ends;
        // The nearest is often the only one that is asked for, and the search has just been there.
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
