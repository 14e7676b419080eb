//! A context in the segments of an index: in each the interval of its occurrences, from the longest pattern to the
//! shortest.
//!
//! What a search costs is waiting for memory: an entry of the suffix array lies somewhere, and the text it leads to
//! somewhere else. So all segments are searched at once, in turns of loading and looking, and entries are looked at in
//! groups whose loads do not wait for each other.

use super::grams::NEXT_ENTRIES;
use super::look::{Look, Narrow};
use super::{SEPARATOR, View};
use crate::Token;

/// Entries that are looked at together.
const GROUP: usize = 8;

/// How far from the context's place entries are looked at in their order; beyond, the end of an interval is searched
/// for. The nearest and one group behind it: a second group would be waited for on its own.
const STEPS_MAX: usize = 1 + GROUP;

/// A context in several segments. The pattern begins as one too long to occur and is shortened by
/// [`descend`](Probes::descend).
pub(crate) struct Probes<'a> {
    probes: Vec<Probe<'a>>,
    /// Intervals that reach no further than this from the context's place are found to the entry.
    exact_max: usize,
}

/// The occurrences of a pattern, a suffix of the context, in one segment.
pub(crate) struct Probe<'a> {
    look: Look<'a>,
    /// The first entry that is not less than the context.
    place: usize,
    /// Occurrences that stand before it, and those from it on.
    before: Side,
    behind: Side,
}

/// The entries on one side of the context's place, by their distance from it. The further, the less they have in common
/// with the context.
struct Side {
    direction: Direction,
    /// Entries that end with the pattern.
    len: usize,
    /// Common length of the entry behind those; 0 at the end.
    next: usize,
    /// Text positions of the entries from distance `loaded_from` on.
    loaded: [u32; GROUP],
    loaded_from: usize,
    loaded_len: usize,
    /// A search for the end of the interval.
    search: Option<Narrow>,
    entries_read: usize,
}

#[derive(Clone, Copy)]
enum Direction {
    Before,
    Behind,
}

impl<'a> Probes<'a> {
    /// Finds the place of the context in each segment: a search in the fences and one in the entries between two of
    /// them.
    pub(crate) fn new(
        views: impl Iterator<Item = View<'a>>,
        context: &'a [Token],
        len_max: usize,
        exact_max: usize,
    ) -> Self {
        let context = &context[context.len().saturating_sub(len_max)..];
        let separated = context.iter().rposition(|&token| token == SEPARATOR);
        let context = &context[separated.map_or(0, |at| at + 1)..];
        if context.is_empty() {
            return Probes {
                probes: Vec::new(),
                exact_max,
            };
        }
        let mut probes: Vec<Probe<'a>> = views
            .map(|view| Probe::new(Look { view, context }))
            .collect();
        loop {
            let mut searches = 0;
            for probe in &mut probes {
                searches += usize::from(probe.load_place());
            }
            if searches == 0 {
                break;
            }
            probes.iter().for_each(Probe::touch);
            probes.iter_mut().for_each(Probe::step);
        }
        Probes { probes, exact_max }
    }

    /// The longest pattern shorter than the current one that occurs at more places; 0 if there is none.
    pub(crate) fn next_len(&self) -> usize {
        self.probes.iter().map(Probe::next_len).max().unwrap_or(0)
    }

    /// Shortens the pattern to `len` tokens, at least 1; nothing changes above [`next_len`](Self::next_len).
    pub(crate) fn descend(&mut self, len: usize) {
        for probe in &mut self.probes {
            probe.expect(len, self.exact_max);
        }
        for probe in &self.probes {
            probe.touch_expected(len);
        }
        for probe in &mut self.probes {
            probe.walk(len, self.exact_max);
        }
        loop {
            let mut searches = 0;
            for probe in &mut self.probes {
                searches += probe.load(self.exact_max);
            }
            if searches == 0 {
                break;
            }
            self.probes.iter().for_each(Probe::touch);
            self.probes.iter_mut().for_each(Probe::step);
        }
    }

    /// Entries of the suffix arrays that were looked at.
    pub(crate) fn entries_read(&self) -> usize {
        let sides = |probe: &Probe<'_>| probe.before.entries_read + probe.behind.entries_read;
        self.probes.iter().map(sides).sum()
    }

    /// One to a segment, in their order.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Probe<'a>> {
        self.probes.iter()
    }

    /// The text of a segment.
    pub(crate) fn text(&self, segment: u32) -> &'a [Token] {
        self.probes[segment as usize].look.view.text
    }

    /// Text position of the token after an entry of a segment.
    pub(crate) fn after(&self, segment: u32, entry: u32) -> Option<u32> {
        self.probes[segment as usize].look.view.after(entry)
    }
}

impl<'a> Probe<'a> {
    /// Begins the search for the context's place.
    fn new(mut look: Look<'a>) -> Self {
        if !look.view.may_have_pair(look.context) {
            // No more than the last token is there, and all that have it stand behind the place.
            look.context = &look.context[look.context.len() - 1..];
            if let Some(interval) = look.interval(1) {
                return Probe {
                    look,
                    place: interval.start,
                    before: Side::new(Direction::Before),
                    behind: Side {
                        next: usize::from(!interval.is_empty()),
                        ..Side::new(Direction::Behind)
                    },
                };
            }
        }
        Probe {
            look,
            place: 0,
            before: Side {
                search: Some(look.find()),
                ..Side::new(Direction::Before)
            },
            behind: Side::new(Direction::Behind),
        }
    }

    /// Goes on with that search; returns whether it does.
    fn load_place(&mut self) -> bool {
        let Some(search) = &mut self.before.search else {
            return false;
        };
        let Some(place) = search.found(0, usize::MAX) else {
            self.before.entries_read += search.load(&self.look);
            return true;
        };
        self.before.search = None;
        self.place = place;
        for side in [&mut self.before, &mut self.behind] {
            side.next = side.common(&self.look, place, 0);
        }
        false
    }

    fn next_len(&self) -> usize {
        self.before.next.max(self.behind.next)
    }

    /// Number of occurrences.
    pub(crate) fn occurrences(&self) -> usize {
        self.before.len + self.behind.len
    }

    /// Text positions of occurrences, each with the number of those it stands for: all of them, or `count_max`
    /// out of equal parts of the interval.
    ///
    /// Not those with the longest left context in common: they are what belongs to longer patterns.
    pub(crate) fn sample(&self, count_max: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let count = self.occurrences().min(count_max);
        self.parts(count)
            .map(|(middle, weight)| (self.look.view.ends[middle], weight))
    }

    /// The same for an interval so large that the entries whose next token is at hand are enough: entry, that token, and
    /// for how many it stands. Not all parts have a sample exactly in their middle, and there may be half as many.
    pub(crate) fn sample_known(
        &self,
        count_max: usize,
    ) -> Option<impl Iterator<Item = (u32, Token, u32)> + '_> {
        // No part is smaller than the distance between two of them, so each has one.
        let count = (self.occurrences() / NEXT_ENTRIES).min(count_max);
        (count >= count_max.div_ceil(2)).then(|| {
            self.parts(count).map(|(middle, weight)| {
                let nearest = (middle + NEXT_ENTRIES / 2) / NEXT_ENTRIES * NEXT_ENTRIES;
                let token = self.look.view.next(nearest).unwrap_or(SEPARATOR);
                (nearest as u32, token, weight)
            })
        })
    }

    /// The interval in equal parts, each with the entry in its middle and its size.
    fn parts(&self, count: usize) -> impl Iterator<Item = (usize, u32)> + use<> {
        let first = self.place - self.before.len;
        let total = self.occurrences();
        // In fixed point: a division for each would take as long as the reading.
        let width = ((total as u64) << 32) / count.max(1) as u64;
        let bound = move |part: usize| match part == count {
            true => total,
            false => ((part as u64 * width) >> 32) as usize,
        };
        (0..count).map(move |part| {
            let (low, high) = (bound(part), bound(part + 1));
            (first + low.midpoint(high - 1), (high - low) as u32)
        })
    }

    /// Reads the entries that the walk to a pattern looks at, where there has to be one.
    fn expect(&mut self, len: usize, exact_max: usize) {
        let is_known = self.look.interval(len).is_some();
        for side in [&mut self.before, &mut self.behind] {
            if side.next < len || side.len + 1 >= STEPS_MAX {
                continue;
            }
            if is_known {
                let known = side.len + 1;
                side.search = Some(side.begin(&self.look, self.place, len, known, exact_max));
            } else {
                side.load(&self.look, self.place, side.len + 1);
            }
        }
    }

    /// Has what they lead to loaded.
    fn touch_expected(&self, len: usize) {
        for side in [&self.before, &self.behind] {
            if side.next >= len && side.len + 1 < STEPS_MAX && side.search.is_none() {
                self.look.touch(&side.loaded[..side.loaded_len], 0);
            }
        }
    }

    /// Takes in the occurrences of a pattern that are near.
    fn walk(&mut self, len: usize, exact_max: usize) {
        for side in [&mut self.before, &mut self.behind] {
            side.walk(&self.look, self.place, len, exact_max);
        }
    }

    /// Goes on with the searches for those that are not: finishes those that are done, reads the entries that the others
    /// look at next, and returns how many these are.
    fn load(&mut self, exact_max: usize) -> usize {
        let mut searches = 0;
        for side in [&mut self.before, &mut self.behind] {
            let Some(search) = &mut side.search else {
                continue;
            };
            match search.found(self.place, exact_max) {
                Some(edge) => {
                    side.next = search.beyond(&self.look);
                    side.len = self.place.abs_diff(edge);
                    side.search = None;
                }
                None => {
                    side.entries_read += search.load(&self.look);
                    searches += 1;
                }
            }
        }
        searches
    }

    fn touch(&self) {
        for side in [&self.before, &self.behind] {
            if let Some(search) = &side.search {
                search.touch(&self.look);
            }
        }
    }

    fn step(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = &mut side.search {
                search.step(&self.look);
            }
        }
    }
}

impl Side {
    fn new(direction: Direction) -> Self {
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

    /// Takes in what ends with the pattern of `len` tokens, group by group; begins a search where there are many.
    fn walk(&mut self, look: &Look<'_>, place: usize, len: usize, exact_max: usize) {
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
    fn begin(
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

    /// Common length of the entry at a distance; 0 beyond the last.
    fn common(&mut self, look: &Look<'_>, place: usize, distance: usize) -> usize {
        self.load(look, place, distance);
        self.loaded(distance).map_or(0, |end| look.common(end))
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
