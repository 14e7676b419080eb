//! A context in several segments: where it would stand, and the intervals of its suffixes around that place.
//!
//! What such a look-up costs is waiting for memory: an entry of the suffix array lies somewhere, and the text it leads to
//! somewhere else. So all segments are searched at once, in turns of asking, loading and looking, and entries are looked at in
//! groups that are asked for together.

use std::ops::Range;

use super::grams::NEXT_ENTRIES;
use super::look::Look;
use super::narrow::Narrow;
use super::side::{Direction, STEPS_MAX, Side};
use super::{SEPARATOR, View};
use crate::Token;

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
    /// Fences near the context's place, until they were looked at.
    near: Option<Range<usize>>,
    /// The first entry that is not less than the context.
    place: usize,
    /// Occurrences that stand before it, and those from it on.
    before: Side,
    behind: Side,
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
        let mut probes: Vec<Probe<'a>> = match context {
            [] => Vec::new(),
            _ => views
                .map(|view| Probe::new(Look { view, context }))
                .collect(),
        };
        probes.iter_mut().for_each(Probe::begin);
        probes.iter_mut().for_each(Probe::search_fences);
        loop {
            let mut searches = 0;
            for probe in &mut probes {
                searches += usize::from(probe.fetch_place());
            }
            if searches == 0 {
                break;
            }
            probes.iter_mut().for_each(Probe::load);
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
        let exact_max = self.exact_max;
        for probe in &mut self.probes {
            probe.expect(len, exact_max);
        }
        for probe in &mut self.probes {
            probe.walk(len, exact_max);
        }
        loop {
            let searches: usize = self
                .probes
                .iter_mut()
                .map(|probe| probe.fetch(exact_max))
                .sum();
            if searches == 0 {
                break;
            }
            self.probes.iter_mut().for_each(Probe::load);
            self.probes.iter_mut().for_each(Probe::step);
        }
        let found: usize = self.probes.iter().map(Probe::fetch_beyond).sum();
        if found > 0 {
            self.probes.iter().for_each(Probe::fetch_text_beyond);
            self.probes.iter_mut().for_each(Probe::finish);
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
    /// Nothing is known, and what tells most is asked for.
    fn new(look: Look<'a>) -> Self {
        look.fetch_grams();
        Probe {
            look,
            near: None,
            place: 0,
            before: Side::new(Direction::Before),
            behind: Side::new(Direction::Behind),
        }
    }

    /// Begins the search for the context's place.
    fn begin(&mut self) {
        let look = &mut self.look;
        if !look.view.may_have_pair(look.context) {
            // No more than the last token is there, and all that have it stand behind the place.
            look.context = &look.context[look.context.len() - 1..];
            if let Some(interval) = look.interval(1) {
                self.place = interval.start;
                self.behind.next = usize::from(!interval.is_empty());
                return;
            }
        }
        self.near = Some(look.near());
    }

    fn search_fences(&mut self) {
        if let Some(near) = self.near.take() {
            self.before.search = Some(self.look.find(near));
        }
    }

    /// Goes on with that search; returns whether it does.
    fn fetch_place(&mut self) -> bool {
        let Some(search) = &mut self.before.search else {
            return false;
        };
        if search.fetch(&self.look, 0, usize::MAX) {
            return true;
        }
        self.place = search.nearest();
        self.before.search = None;
        for side in [&mut self.before, &mut self.behind] {
            side.next = side.common(&self.look, self.place);
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

    /// Reads the entries that the walk to a pattern looks at, where there has to be one, and asks for what they lead to.
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
                side.expect(&self.look, self.place);
            }
        }
    }

    /// Takes in the occurrences of a pattern that are near.
    fn walk(&mut self, len: usize, exact_max: usize) {
        for side in [&mut self.before, &mut self.behind] {
            side.walk(&self.look, self.place, len, exact_max);
        }
    }

    /// Goes on with the searches for those that are not, which is a round of three: asks for the entries that they look at
    /// next, and returns how many searches are not done.
    fn fetch(&mut self, exact_max: usize) -> usize {
        let (look, place) = (&self.look, self.place);
        let sides = [&mut self.before, &mut self.behind];
        let searches = sides.into_iter().filter_map(|side| side.search.as_mut());
        searches
            .map(|search| usize::from(search.fetch(look, place, exact_max)))
            .sum()
    }

    /// Reads them and asks for what they lead to.
    fn load(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = &mut side.search {
                side.entries_read += search.load(&self.look);
            }
        }
    }

    /// Looks at that.
    fn step(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = &mut side.search {
                search.step(&self.look);
            }
        }
    }

    /// Asks for the entries behind the intervals that were searched; returns how many these are.
    fn fetch_beyond(&self) -> usize {
        let searches = self.searches();
        searches
            .map(|search| search.fetch_beyond(&self.look))
            .count()
    }

    fn fetch_text_beyond(&self) {
        self.searches()
            .for_each(|search| search.fetch_text_beyond(&self.look));
    }

    /// Takes in what was found.
    fn finish(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = side.search.take() {
                side.next = search.beyond(&self.look);
                side.len = self.place.abs_diff(search.nearest());
            }
        }
    }

    fn searches(&self) -> impl Iterator<Item = &Narrow> {
        [&self.before, &self.behind]
            .into_iter()
            .filter_map(|side| side.search.as_ref())
    }
}
