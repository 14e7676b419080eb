//! A search for where the interval of a pattern begins or ends.

use std::cmp::Ordering;
use std::ops::Range;

use super::look::{Look, compare};
use super::{FENCE_ENTRIES, FENCE_TOKENS};
use crate::memory::fetch;

/// Entries that a step looks at: two steps get from between two fences to the edge, and the loads of one are few enough
/// to be under way together.
const STEP_ENTRIES: usize = 12;

/// A search for an edge of a pattern's interval, in steps of three parts, [`fetch`](Self::fetch), [`load`](Self::load) and
/// [`step`](Self::step), so that several searches wait for memory together.
pub(super) struct Narrow {
    /// The edge is at one of these or at their end.
    range: Range<usize>,
    /// Length of the pattern.
    len: usize,
    edge: Edge,
    /// How much of the pattern the entries around the range end with: at least so much all of it does as well.
    below: usize,
    above: usize,
    /// The edge is known well enough.
    done: bool,
    /// The entries looked at.
    ends: [u32; STEP_ENTRIES],
}

/// What is behind an interval.
enum Beyond {
    Nothing,
    /// A fence has all of it that matters.
    Fence(usize),
    Entry(usize),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Edge {
    /// The first entry that is not less than the pattern.
    Start,
    /// The first entry that is greater.
    End,
}

impl Narrow {
    pub(super) fn new(range: Range<usize>, len: usize, edge: Edge) -> Self {
        Narrow {
            range: range.start..range.end.max(range.start),
            len,
            edge,
            below: 0,
            above: 0,
            done: false,
            ends: [0; STEP_ENTRIES],
        }
    }

    /// The same where the entries around the range are known to have so much of the pattern.
    pub(super) fn between(self, below: usize, above: usize) -> Self {
        Narrow {
            below,
            above,
            ..self
        }
    }

    /// The edge, once it is known: exactly, or, if the interval has more than `exact_max` entries between the range and
    /// the context's `place`, when these are much against what is left of the range. The interval is then short by
    /// at most a fifth.
    pub(super) fn found(&self, place: usize, exact_max: usize) -> Option<usize> {
        let (near, left) = (self.nearest(), self.range.len());
        let inside = place.abs_diff(near);
        (left == 0 || inside >= exact_max && left * 4 <= inside).then_some(near)
    }

    /// Common length with the context of the entry on the far side of the range, which is not in the interval; 0 if
    /// there is none.
    pub(super) fn beyond(&self, look: &Look<'_>) -> usize {
        match self.beyond_at() {
            Beyond::Nothing => 0,
            Beyond::Fence(at) => {
                let fence = look.view.fences.get(at);
                let pattern = look.pattern(self.len);
                fence.map_or(0, |fence| compare(fence.iter(), pattern.iter().rev()).0)
            }
            Beyond::Entry(at) => look.view.ends.get(at).map_or(0, |&end| look.common(end)),
        }
    }

    /// Asks for that entry.
    pub(super) fn fetch_beyond(&self, look: &Look<'_>) {
        match self.beyond_at() {
            Beyond::Nothing => {}
            Beyond::Fence(at) => fetch(look.view.fences, at),
            Beyond::Entry(at) => fetch(look.view.ends, at),
        }
    }

    /// Asks for the text that it leads to.
    pub(super) fn fetch_text_beyond(&self, look: &Look<'_>) {
        if let Beyond::Entry(at) = self.beyond_at()
            && let Some(&end) = look.view.ends.get(at)
        {
            fetch(look.view.text, end as usize);
        }
    }

    fn beyond_at(&self) -> Beyond {
        let entry = match self.edge {
            Edge::Start => self.range.start.checked_sub(1),
            Edge::End => Some(self.range.end),
        };
        match entry {
            // A fence repeats what is needed of it.
            Some(at) if self.len > 1 && at % FENCE_ENTRIES == 0 && self.len <= FENCE_TOKENS => {
                Beyond::Fence(at / FENCE_ENTRIES)
            }
            // Nothing is shorter than one token.
            Some(at) if self.len > 1 => Beyond::Entry(at),
            _ => Beyond::Nothing,
        }
    }

    /// The end of the range that the interval begins from: the edge, once that is found.
    pub(super) fn nearest(&self) -> usize {
        match self.edge {
            Edge::Start => self.range.end,
            Edge::End => self.range.start,
        }
    }

    /// Asks for the entries of the next step; returns whether there is one. `place` and `exact_max` are as for
    /// [`found`](Self::found).
    pub(super) fn fetch(&mut self, look: &Look<'_>, place: usize, exact_max: usize) -> bool {
        self.done = self.found(place, exact_max).is_some();
        for at in 0..self.count() {
            fetch(look.view.ends, entry(&self.range, at));
        }
        !self.done
    }

    /// Reads them and asks for what they lead to; returns their number.
    pub(super) fn load(&mut self, look: &Look<'_>) -> usize {
        let count = self.count();
        for (at, slot) in (0..count).zip(&mut self.ends) {
            *slot = look.view.ends[entry(&self.range, at)];
        }
        look.fetch(&self.ends[..count], self.known());
        count
    }

    /// Looks at them and keeps the range between two of them.
    pub(super) fn step(&mut self, look: &Look<'_>) {
        if self.done {
            return;
        }
        let pattern = look.pattern(self.len);
        let count = self.count();
        let known = self.known();
        let (mut before, mut behind) = (0, count);
        while before < behind {
            let middle = before.midpoint(behind);
            let (common, order) = look.compare(self.ends[middle], pattern, known);
            if order == Ordering::Less || self.edge == Edge::End && order == Ordering::Equal {
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

    /// How much of the pattern all of the range ends with, at least.
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

/// The entries looked at divide the range evenly, or are all of it.
fn entry(range: &Range<usize>, at: usize) -> usize {
    match range.len() <= STEP_ENTRIES {
        true => range.start + at,
        false => range.start + range.len() * (at + 1) / (STEP_ENTRIES + 1),
    }
}
