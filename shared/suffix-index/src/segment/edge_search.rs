//! The search for the place where the interval of a pattern starts or ends.

use std::cmp::Ordering;
use std::ops::Range;

use super::comparison::{ContextComparison, compare};
use super::format::{FENCE_ENTRIES, FENCE_TOKENS};
use crate::memory_hints::prefetch;

/// Number of entries that a step looks at. Two steps are enough between two fences, and the loads of one step are few
/// enough to be in flight together.
const STEP_ENTRIES: usize = 12;

/// A search for one edge of a pattern's interval.
///
/// Each round has three parts, [`prefetch`](Self::prefetch), [`load`](Self::load) and [`step`](Self::step), so that
/// several searches wait for memory together.
pub(super) struct EdgeSearch {
    /// The edge is at one of these entries, or at the end of the range.
    range: Range<usize>,
    /// Length of the pattern.
    len: usize,
    edge: IntervalEdge,
    /// How many tokens the entry before the range, and the one after it, share with the pattern. All entries of the
    /// range share at least the smaller number.
    below: usize,
    above: usize,
    /// The edge is known exactly enough.
    done: bool,
    /// The text positions of the entries that are looked at.
    ends: [u32; STEP_ENTRIES],
}

/// The entry beyond an interval.
enum Beyond {
    Nothing,
    /// This fence repeats everything of the entry that matters.
    Fence(usize),
    Entry(usize),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum IntervalEdge {
    /// The start is the first entry that is not less than the pattern.
    Start,
    /// The end is the first entry that is greater than the pattern.
    End,
}

impl EdgeSearch {
    pub(super) fn new(range: Range<usize>, len: usize, edge: IntervalEdge) -> Self {
        EdgeSearch {
            range: range.start..range.end.max(range.start),
            len,
            edge,
            below: 0,
            above: 0,
            done: false,
            ends: [0; STEP_ENTRIES],
        }
    }

    /// Sets how many tokens the entries around the range share with the pattern.
    pub(super) fn between(self, below: usize, above: usize) -> Self {
        EdgeSearch {
            below,
            above,
            ..self
        }
    }

    /// The edge, once it is known exactly enough.
    ///
    /// If the interval has at least `exact_max` entries between the range and the context's `place`, it is enough
    /// that the rest of the range is small compared with these. The interval is then too short by at most a fifth.
    pub(super) fn found(&self, place: usize, exact_max: usize) -> Option<usize> {
        let (near, left) = (self.nearest(), self.range.len());
        let inside = place.abs_diff(near);
        (left == 0 || inside >= exact_max && left * 4 <= inside).then_some(near)
    }

    /// How many tokens the context shares with the entry on the far side of the range, which is not in the interval.
    /// It is 0 if there is no such entry.
    pub(super) fn beyond(&self, comparison: &ContextComparison<'_>) -> usize {
        match self.beyond_at() {
            Beyond::Nothing => 0,
            Beyond::Fence(at) => {
                let fence = comparison.view.fences.get(at);
                let pattern = comparison.pattern(self.len);
                fence.map_or(0, |fence| compare(fence.iter(), pattern.iter().rev()).0)
            }
            Beyond::Entry(at) => comparison
                .view
                .ends
                .get(at)
                .map_or(0, |&end| comparison.common(end)),
        }
    }

    /// Prefetches that entry.
    pub(super) fn prefetch_beyond(&self, comparison: &ContextComparison<'_>) {
        match self.beyond_at() {
            Beyond::Nothing => {}
            Beyond::Fence(at) => prefetch(comparison.view.fences, at),
            Beyond::Entry(at) => prefetch(comparison.view.ends, at),
        }
    }

    /// Prefetches the text to which that entry points.
    pub(super) fn prefetch_text_beyond(&self, comparison: &ContextComparison<'_>) {
        if let Beyond::Entry(at) = self.beyond_at()
            && let Some(&end) = comparison.view.ends.get(at)
        {
            prefetch(comparison.view.text, end as usize);
        }
    }

    fn beyond_at(&self) -> Beyond {
        let entry = match self.edge {
            IntervalEdge::Start => self.range.start.checked_sub(1),
            IntervalEdge::End => Some(self.range.end),
        };
        match entry {
            // A fence repeats the tokens that are needed.
            Some(at) if self.len > 1 && at % FENCE_ENTRIES == 0 && self.len <= FENCE_TOKENS => {
                Beyond::Fence(at / FENCE_ENTRIES)
            }
            // A pattern of one token has no shorter one, so the next entry does not matter.
            Some(at) if self.len > 1 => Beyond::Entry(at),
            _ => Beyond::Nothing,
        }
    }

    /// The end of the range that is nearer to the context's place. It is the edge once that is found.
    pub(super) fn nearest(&self) -> usize {
        match self.edge {
            IntervalEdge::Start => self.range.end,
            IntervalEdge::End => self.range.start,
        }
    }

    /// Prefetches the entries of the next step. Returns whether there is one. `place` and `exact_max` are as for
    /// [`found`](Self::found).
    pub(super) fn prefetch(
        &mut self,
        comparison: &ContextComparison<'_>,
        place: usize,
        exact_max: usize,
    ) -> bool {
        self.done = self.found(place, exact_max).is_some();
        for at in 0..self.count() {
            prefetch(comparison.view.ends, entry(&self.range, at));
        }
        !self.done
    }

    /// Reads these entries and prefetches the text to which they point. Returns their number.
    pub(super) fn load(&mut self, comparison: &ContextComparison<'_>) -> usize {
        let count = self.count();
        for (at, slot) in (0..count).zip(&mut self.ends) {
            *slot = comparison.view.ends[entry(&self.range, at)];
        }
        comparison.prefetch(&self.ends[..count], self.known());
        count
    }

    /// Compares that text, and keeps the range between two neighbouring entries.
    pub(super) fn step(&mut self, comparison: &ContextComparison<'_>) {
        if self.done {
            return;
        }
        let pattern = comparison.pattern(self.len);
        let count = self.count();
        let known = self.known();
        let (mut before, mut behind) = (0, count);
        while before < behind {
            let middle = before.midpoint(behind);
            let (common, order) = comparison.compare(self.ends[middle], pattern, known);
            if order == Ordering::Less || self.edge == IntervalEdge::End && order == Ordering::Equal
            {
                before = middle + 1;
                self.below = common;
            } else {
                behind = middle;
                self.above = common;
            }
        }
        let end = match before < count {
            true => entry(&self.range, before),
            false => self.range.end,
        };
        let start = match before {
            0 => self.range.start,
            _ => entry(&self.range, before - 1) + 1,
        };
        self.range = start..end;
    }

    /// How many tokens all entries of the range share with the pattern, at least.
    fn known(&self) -> usize {
        self.below.min(self.above)
    }

    fn count(&self) -> usize {
        match self.done {
            true => 0,
            false => self.range.len().min(STEP_ENTRIES),
        }
    }
}

/// The entry with number `at` of a step. The entries divide the range evenly, or are all of it.
fn entry(range: &Range<usize>, at: usize) -> usize {
    match range.len() <= STEP_ENTRIES {
        true => range.start + at,
        false => range.start + range.len() * (at + 1) / (STEP_ENTRIES + 1),
    }
}
