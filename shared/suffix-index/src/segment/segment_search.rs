//! Searches several segments for one context: its place among the entries, and the intervals of its suffixes around
//! it.
//!
//! The cost of such a comparison-up is waiting for memory: an entry of the suffix array is in one place, and the text
//! to which it points in another. So all segments are searched together, in rounds of prefetching, loading and
//! comparing, and entries are prefetched in groups.

use std::ops::Range;

use super::comparison::ContextComparison;
use super::edge_search::EdgeSearch;
use super::format::SEPARATOR;
use super::interval_side::{Direction, IntervalSide, STEPS_MAX};
use super::ngrams::NEXT_ENTRIES;
use super::view::SegmentView;
use crate::Token;

/// The search for a context in several segments. At first, the pattern is too long to occur. It is shortened by
/// [`descend`](SegmentSearches::descend).
pub(crate) struct SegmentSearches<'a> {
    searches: Vec<SegmentSearch<'a>>,
    /// Intervals that reach no further than this from the context's place are found exactly.
    exact_max: usize,
}

/// The occurrences of a pattern in one segment. The pattern is a suffix of the context.
pub(crate) struct SegmentSearch<'a> {
    comparison: ContextComparison<'a>,
    /// The fences near the context's place, until they are searched.
    near: Option<Range<usize>>,
    /// The first entry that is not less than the context.
    place: usize,
    /// The occurrences before that place.
    before: IntervalSide,
    /// The occurrences from that place on.
    behind: IntervalSide,
}

impl<'a> SegmentSearches<'a> {
    /// Finds the context's place in each segment, by a search of the fences, and then of the entries between two
    /// fences.
    pub(crate) fn new(
        views: impl Iterator<Item = SegmentView<'a>>,
        context: &'a [Token],
        len_max: usize,
        exact_max: usize,
    ) -> Self {
        let context = &context[context.len().saturating_sub(len_max)..];
        let separated = context.iter().rposition(|&token| token == SEPARATOR);
        let context = &context[separated.map_or(0, |at| at + 1)..];
        let mut searches: Vec<SegmentSearch<'a>> = match context {
            [] => Vec::new(),
            _ => views
                .map(|view| SegmentSearch::new(ContextComparison { view, context }))
                .collect(),
        };
        searches.iter_mut().for_each(SegmentSearch::begin);
        searches.iter_mut().for_each(SegmentSearch::search_fences);
        loop {
            let mut unfinished = 0;
            for search in &mut searches {
                unfinished += usize::from(search.prefetch_place());
            }
            if unfinished == 0 {
                break;
            }
            searches.iter_mut().for_each(SegmentSearch::load);
            searches.iter_mut().for_each(SegmentSearch::step);
        }
        SegmentSearches {
            searches,
            exact_max,
        }
    }

    /// Length of the longest pattern that is shorter than the current one and occurs at more places, or 0.
    pub(crate) fn next_len(&self) -> usize {
        self.searches
            .iter()
            .map(SegmentSearch::next_len)
            .max()
            .unwrap_or(0)
    }

    /// Shortens the pattern to `len` tokens, which is at least 1. A `len` above [`next_len`](Self::next_len) changes
    /// nothing.
    pub(crate) fn descend(&mut self, len: usize) {
        let exact_max = self.exact_max;
        for search in &mut self.searches {
            search.prefetch_walk(len, exact_max);
        }
        for search in &mut self.searches {
            search.walk(len, exact_max);
        }
        loop {
            let unfinished: usize = self
                .searches
                .iter_mut()
                .map(|search| search.prefetch(exact_max))
                .sum();
            if unfinished == 0 {
                break;
            }
            self.searches.iter_mut().for_each(SegmentSearch::load);
            self.searches.iter_mut().for_each(SegmentSearch::step);
        }
        let found: usize = self
            .searches
            .iter()
            .map(SegmentSearch::prefetch_beyond)
            .sum();
        if found > 0 {
            self.searches
                .iter()
                .for_each(SegmentSearch::prefetch_text_beyond);
            self.searches.iter_mut().for_each(SegmentSearch::finish);
        }
    }

    /// Number of entries of the suffix arrays that were read.
    #[cfg(test)]
    pub(crate) fn entries_read(&self) -> usize {
        let sides =
            |search: &SegmentSearch<'_>| search.before.entries_read + search.behind.entries_read;
        self.searches.iter().map(sides).sum()
    }

    /// The searches of the single segments, in their order.
    pub(crate) fn iter(&self) -> std::slice::Iter<'_, SegmentSearch<'a>> {
        self.searches.iter()
    }

    /// The text of a segment.
    pub(crate) fn text(&self, segment: u32) -> &'a [Token] {
        self.searches[segment as usize].comparison.view.text
    }

    /// The text position of the token after an entry of a segment.
    pub(crate) fn after(&self, segment: u32, entry: u32) -> Option<u32> {
        self.searches[segment as usize].comparison.view.after(entry)
    }
}

impl<'a> SegmentSearch<'a> {
    /// Creates a search, and prefetches the tables that decide most.
    fn new(comparison: ContextComparison<'a>) -> Self {
        comparison.prefetch_ngrams();
        SegmentSearch {
            comparison,
            near: None,
            place: 0,
            before: IntervalSide::new(Direction::Before),
            behind: IntervalSide::new(Direction::Behind),
        }
    }

    /// Begins the search for the context's place.
    fn begin(&mut self) {
        let comparison = &mut self.comparison;
        if !comparison.view.may_have_pair(comparison.context) {
            // At most the last token occurs, and all entries that end with it are after the place.
            comparison.context = &comparison.context[comparison.context.len() - 1..];
            if let Some(interval) = comparison.interval(1) {
                self.place = interval.start;
                self.behind.next = usize::from(!interval.is_empty());
                return;
            }
        }
        self.near = Some(comparison.near());
    }

    fn search_fences(&mut self) {
        if let Some(near) = self.near.take() {
            self.before.search = Some(self.comparison.find(near));
        }
    }

    /// Continues the search for the context's place. Returns whether it is still going on.
    fn prefetch_place(&mut self) -> bool {
        let Some(search) = &mut self.before.search else {
            return false;
        };
        if search.prefetch(&self.comparison, 0, usize::MAX) {
            return true;
        }
        self.place = search.nearest();
        self.before.search = None;
        for side in [&mut self.before, &mut self.behind] {
            side.next = side.common(&self.comparison, self.place);
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

    /// Text positions of occurrences, each with the number of occurrences that it represents. These are all
    /// occurrences, or the middle ones of `count_max` equal parts of the interval.
    ///
    /// The occurrences with the longest common left context would be a bad sample, since longer patterns have counted
    /// them already.
    pub(crate) fn sample(&self, count_max: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let count = self.occurrences().min(count_max);
        self.parts(count)
            .map(|(middle, weight)| (self.comparison.view.ends[middle], weight))
    }

    /// A sample of entries whose next token is in the tables, for large intervals: entry, next token, and the number
    /// of occurrences that it represents. The entries are only near the middles of their parts, and there may be half
    /// as many parts.
    pub(crate) fn sample_known(
        &self,
        count_max: usize,
    ) -> Option<impl Iterator<Item = (u32, Token, u32)> + '_> {
        // No part is smaller than the distance between two such entries, so each part has one.
        let count = (self.occurrences() / NEXT_ENTRIES).min(count_max);
        (count >= count_max.div_ceil(2)).then(|| {
            self.parts(count).map(|(middle, weight)| {
                let nearest = (middle + NEXT_ENTRIES / 2) / NEXT_ENTRIES * NEXT_ENTRIES;
                let token = self.comparison.view.next(nearest).unwrap_or(SEPARATOR);
                (nearest as u32, token, weight)
            })
        })
    }

    /// Divides the interval into equal parts. Returns the entry in the middle and the size of each part.
    fn parts(&self, count: usize) -> impl Iterator<Item = (usize, u32)> + use<> {
        let first = self.place - self.before.len;
        let total = self.occurrences();
        // Fixed-point arithmetic, because a division per part would take as long as reading the sample.
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

    /// Loads the entries that [`walk`](Self::walk) will comparison at, and prefetches the text to which they point.
    fn prefetch_walk(&mut self, len: usize, exact_max: usize) {
        let is_known = self.comparison.interval(len).is_some();
        for side in [&mut self.before, &mut self.behind] {
            if side.next < len || side.len + 1 >= STEPS_MAX {
                continue;
            }
            if is_known {
                let known = side.len + 1;
                side.search = Some(side.begin(&self.comparison, self.place, len, known, exact_max));
            } else {
                side.prefetch_next(&self.comparison, self.place);
            }
        }
    }

    /// Adds the occurrences of a pattern that are near the context's place.
    fn walk(&mut self, len: usize, exact_max: usize) {
        for side in [&mut self.before, &mut self.behind] {
            side.walk(&self.comparison, self.place, len, exact_max);
        }
    }

    /// Begins a round of the searches for occurrences that are not near: prefetches the entries that they comparison
    /// at next. Returns the number of searches that are not done.
    fn prefetch(&mut self, exact_max: usize) -> usize {
        let (comparison, place) = (&self.comparison, self.place);
        let sides = [&mut self.before, &mut self.behind];
        let searches = sides.into_iter().filter_map(|side| side.search.as_mut());
        searches
            .map(|search| usize::from(search.prefetch(comparison, place, exact_max)))
            .sum()
    }

    /// Reads these entries, and prefetches the text to which they point.
    fn load(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = &mut side.search {
                side.entries_read += search.load(&self.comparison);
            }
        }
    }

    /// Compares that text, which ends the round.
    fn step(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = &mut side.search {
                search.step(&self.comparison);
            }
        }
    }

    /// Prefetches the entries beyond the intervals that were searched. Returns the number of these intervals.
    fn prefetch_beyond(&self) -> usize {
        let searches = self.searches();
        searches
            .map(|search| search.prefetch_beyond(&self.comparison))
            .count()
    }

    /// Prefetches the text to which those entries point.
    fn prefetch_text_beyond(&self) {
        self.searches()
            .for_each(|search| search.prefetch_text_beyond(&self.comparison));
    }

    /// Stores the results of the searches.
    fn finish(&mut self) {
        for side in [&mut self.before, &mut self.behind] {
            if let Some(search) = side.search.take() {
                side.next = search.beyond(&self.comparison);
                side.len = self.place.abs_diff(search.nearest());
            }
        }
    }

    fn searches(&self) -> impl Iterator<Item = &EdgeSearch> {
        [&self.before, &self.behind]
            .into_iter()
            .filter_map(|side| side.search.as_ref())
    }
}
