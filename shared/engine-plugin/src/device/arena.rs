//! The division of the device's memory among segments.

use std::collections::{BTreeMap, HashSet};

/// Where a segment lies in the arena, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: u64,
    pub(super) words: u64,
}

/// The part of the arena that may be full, so that segments seldom fail for want of a gap that is long enough.
const FULL_PERCENT: u64 = 90;

/// The free words of an arena.
pub(super) struct Arena {
    words_max: u64,
    /// Free pieces: their lengths by their beginnings. No two touch.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    /// An arena of so many words that holds these segments.
    pub(super) fn new(words_max: u64, loaded: &BTreeMap<u32, Place>) -> Self {
        let mut places: Vec<Place> = loaded.values().copied().collect();
        places.sort_by_key(|place| place.at);
        let mut free = BTreeMap::new();
        let mut from = 0;
        for place in places {
            if place.at > from {
                free.insert(from, place.at - from);
            }
            from = place.at + place.words;
        }
        if words_max > from {
            free.insert(from, words_max - from);
        }
        Arena { words_max, free }
    }

    /// The numbers of those segments, given by number and size with the most important first, that the arena has room
    /// for. A segment that is too large for what is left does not keep smaller ones out.
    pub(super) fn fitting(
        &self,
        sizes: impl Iterator<Item = (u32, u64)>,
        segments_max: usize,
    ) -> HashSet<u32> {
        let mut left = self.words_max / 100 * FULL_PERCENT;
        let mut fitting = HashSet::new();
        for (number, words) in sizes {
            if words <= left && fitting.len() < segments_max {
                left -= words;
                fitting.insert(number);
            }
        }
        fitting
    }

    /// Frees the words of a segment.
    pub(super) fn free(&mut self, place: Place) {
        let Place { mut at, mut words } = place;
        if let Some(after) = self.free.remove(&(at + words)) {
            words += after;
        }
        if let Some((&before, &length)) = self.free.range(..at).next_back()
            && before + length == at
        {
            at = before;
            words += length;
        }
        self.free.insert(at, words);
    }

    /// Takes words for a segment: the first free piece that is long enough.
    pub(super) fn take(&mut self, words: u64) -> Option<Place> {
        let (&at, &length) = self.free.iter().find(|(_, length)| **length >= words)?;
        self.free.remove(&at);
        if length > words {
            self.free.insert(at + words, length - words);
        }
        Some(Place { at, words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_pieces_join_and_are_used_again() {
        let mut arena = Arena::new(100, &BTreeMap::new());
        let places: Vec<Place> = (0..4).filter_map(|_| arena.take(25)).collect();
        assert_eq!(places.len(), 4);
        assert_eq!(arena.take(1), None);
        arena.free(places[1]);
        arena.free(places[3]);
        assert_eq!(arena.take(26), None, "no piece is long enough");
        arena.free(places[2]);
        assert_eq!(arena.take(75), Some(Place { at: 25, words: 75 }));
    }

    #[test]
    fn an_arena_knows_the_gaps_between_its_segments() {
        let loaded = BTreeMap::from([
            (7, Place { at: 50, words: 10 }),
            (2, Place { at: 0, words: 20 }),
        ]);
        let mut arena = Arena::new(100, &loaded);
        assert_eq!(arena.take(40), Some(Place { at: 60, words: 40 }));
        assert_eq!(arena.take(30), Some(Place { at: 20, words: 30 }));
        assert_eq!(arena.take(1), None);
    }

    #[test]
    fn the_most_important_segments_fit_and_small_ones_beside_them() {
        let arena = Arena::new(1_000, &BTreeMap::new());
        let sizes = [(1, 500), (2, 600), (3, 300), (4, 100), (5, 1)];
        let fitting = arena.fitting(sizes.into_iter(), 10);
        assert_eq!(fitting, HashSet::from([1, 3, 4]));
        let fitting = arena.fitting(sizes.into_iter(), 2);
        assert_eq!(fitting, HashSet::from([1, 3]));
    }
}
