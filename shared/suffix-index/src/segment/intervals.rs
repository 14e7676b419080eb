//! The place of a context among a segment's entries, and the edges of a pattern's interval.

use std::cmp::Ordering;
use std::ops::Range;

use super::comparison::{ContextComparison, compare};
use super::edge_search::{EdgeSearch, IntervalEdge};
use super::format::{FENCE_ENTRIES, FENCE_TOKENS};
use super::view::{SUMMARY_FENCES, summary};
use crate::Token;
use crate::memory_hints::prefetch;

/// Number of entries between two entries of the summary.
const BLOCK_ENTRIES: usize = SUMMARY_FENCES * FENCE_ENTRIES;

impl ContextComparison<'_> {
    /// Begins the search for the context's place: the first entry that is not less than the context. `near` is the
    /// result of [`near`](Self::near).
    pub(super) fn find(&self, near: Range<usize>) -> EdgeSearch {
        let fences = self.view.fences;
        let len = self.context.len().min(FENCE_TOKENS);
        let pattern = self.pattern(len);
        let order = |fence: &[Token; FENCE_TOKENS]| compare(fence.iter(), pattern.iter().rev());
        let low =
            near.start + fences[near].partition_point(|fence| order(fence).1 == Ordering::Less);
        // The place is between the last fence below the context and the first one above it.
        let high = if self.context.len() > len {
            low + gallop(fences.len() - low, |at| {
                order(&fences[low + at]).1 == Ordering::Equal
            })
        } else {
            low
        };
        let below = low.checked_sub(1);
        let range = below.map_or(0, |below| below * FENCE_ENTRIES + 1)
            ..(high * FENCE_ENTRIES).min(self.view.ends.len());
        // All entries between two fences share with the context at least what both of these share with it.
        let common = |at: Option<usize>| {
            let fence = at.and_then(|at| fences.get(at));
            fence.map_or(0, |fence| order(fence).0)
        };
        EdgeSearch::new(range, self.context.len(), IntervalEdge::Start)
            .between(common(below), common(Some(high)))
    }

    /// The fences that contain the first one that is not less than the context, unless it is the one after them.
    /// Prefetches them.
    pub(super) fn near(&self) -> Range<usize> {
        let (last, rest) = self.context.split_last().unwrap_or((&0, &[]));
        let key = summary(*last, rest.last().copied().unwrap_or(0));
        let behind = self.view.summary.partition_point(|&other| other < key);
        let rest = &self.view.summary[behind..];
        let equal = gallop(rest.len(), |at| rest[at] == key);
        let end = ((behind + equal) * SUMMARY_FENCES).min(self.view.fences.len());
        let near = behind.saturating_sub(1) * SUMMARY_FENCES..end;
        // Two fences are a cache line.
        if near.len() <= SUMMARY_FENCES {
            near.clone()
                .step_by(2)
                .for_each(|at| prefetch(self.view.fences, at));
        }
        near
    }

    /// Begins the search for the start of a pattern's interval. All entries from `known` up to the context's `place`
    /// are known to belong to it.
    pub(super) fn start(
        &self,
        len: usize,
        known: usize,
        place: usize,
        exact_max: usize,
    ) -> EdgeSearch {
        if let Some(interval) = self.interval(len) {
            let start = interval.start.min(known);
            return EdgeSearch::new(start..start, len, IntervalEdge::Start);
        }
        let mut range = 0..known;
        if let Some(blocks) = self.blocks(len) {
            let before = blocks.start.checked_sub(1);
            range.start = before.map_or(0, |block| block * BLOCK_ENTRIES + 1);
            if !blocks.is_empty() {
                range.end = known.min(blocks.start * BLOCK_ENTRIES);
            }
        }
        let search = EdgeSearch::new(range.clone(), len, IntervalEdge::Start);
        if search.found(place, exact_max).is_some() {
            return search;
        }
        let fences = range.start.div_ceil(FENCE_ENTRIES)..range.end.div_ceil(FENCE_ENTRIES);
        let within = gallop(fences.len(), |at| self.has_fence(fences.end - 1 - at, len));
        if within < fences.len() {
            range.start = (fences.end - within - 1) * FENCE_ENTRIES + 1;
        }
        if within > 0 && len <= FENCE_TOKENS {
            range.end = (fences.end - within) * FENCE_ENTRIES;
        }
        EdgeSearch::new(range, len, IntervalEdge::Start)
    }

    /// Begins the search for the end of a pattern's interval. All entries from the context's `place` up to `known`
    /// are known to belong to it.
    pub(super) fn end(
        &self,
        len: usize,
        known: usize,
        place: usize,
        exact_max: usize,
    ) -> EdgeSearch {
        if let Some(interval) = self.interval(len) {
            let end = interval.end.max(known);
            return EdgeSearch::new(end..end, len, IntervalEdge::End);
        }
        let mut range = known..self.view.ends.len();
        if let Some(blocks) = self.blocks(len) {
            range.end = range.end.min(blocks.end * BLOCK_ENTRIES);
            if !blocks.is_empty() {
                range.start = known.max((blocks.end - 1) * BLOCK_ENTRIES + 1);
            }
        }
        let search = EdgeSearch::new(range.clone(), len, IntervalEdge::End);
        if search.found(place, exact_max).is_some() {
            return search;
        }
        let fences = range.start.div_ceil(FENCE_ENTRIES)..range.end.div_ceil(FENCE_ENTRIES);
        let within = gallop(fences.len(), |at| self.has_fence(fences.start + at, len));
        if within < fences.len() {
            range.end = (fences.start + within) * FENCE_ENTRIES;
        }
        if within > 0 && len <= FENCE_TOKENS {
            range.start = (fences.start + within - 1) * FENCE_ENTRIES + 1;
        }
        EdgeSearch::new(range, len, IntervalEdge::End)
    }

    /// The interval of a pattern, if the tables know it.
    pub(super) fn interval(&self, len: usize) -> Option<Range<usize>> {
        let last = *self.context.last()?;
        (len == 1).then(|| self.view.interval(last)).flatten()
    }

    /// The blocks of fences whose first fence has the pattern, if the pattern is short enough for the summary.
    fn blocks(&self, len: usize) -> Option<Range<usize>> {
        let (low, high) = match *self.pattern(len) {
            [last] => (summary(last, 0), summary(last, Token::MAX)),
            [last_but_one, last] => {
                let key = summary(last, last_but_one);
                (key, key)
            }
            _ => return None,
        };
        let summary = self.view.summary;
        let start = summary.partition_point(|&key| key < low);
        let count = summary[start..].partition_point(|&key| key <= high);
        Some(start..start + count)
    }

    /// Whether a fence has the pattern, or as much of it as fits into a fence.
    fn has_fence(&self, at: usize, len: usize) -> bool {
        let fence: &[Token; FENCE_TOKENS] = &self.view.fences[at];
        let pattern = self.pattern(len).iter().rev();
        fence.iter().zip(pattern).all(|(one, other)| one == other)
    }
}

/// The number of indices below `count` for which `holds` is true. They must be the first ones. The cost is
/// logarithmic in the result.
fn gallop(count: usize, holds: impl Fn(usize) -> bool) -> usize {
    let mut inside = 0;
    let mut step = 1;
    let mut outside = loop {
        let probed = inside + step - 1;
        if probed >= count {
            break count;
        }
        if !holds(probed) {
            break probed;
        }
        inside = probed + 1;
        step *= 2;
    };
    while inside < outside {
        let middle = inside.midpoint(outside);
        if holds(middle) {
            inside = middle + 1;
        } else {
            outside = middle;
        }
    }
    inside
}
