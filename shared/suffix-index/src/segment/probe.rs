//! A context in a segment: the interval of its occurrences, from the longest pattern to the shortest.

use std::cmp::Ordering;
use std::ops::Range;

use super::{FENCE_ENTRIES, FENCE_TOKENS, SEPARATOR, View};
use crate::Token;

/// An interval that reaches further than this from where it was known is not followed entry by entry, if it need
/// not be exact: its ends are those of the fences within it. It is then short by less than a fence's
/// entries at each end, which is little against this.
const COARSE_ENTRIES: usize = 16 * FENCE_ENTRIES;

/// The occurrences of a pattern, a suffix of the context. The pattern begins as one too long to occur and is
/// shortened by [`descend`](Probe::descend).
pub(crate) struct Probe<'a> {
    view: View<'a>,
    /// The end of the context, to the longest pattern of interest; no separator in it.
    context: &'a [Token],
    /// The entries that end with the pattern.
    entries: Range<usize>,
    /// How much of the context the entries next to the interval end with: less than the pattern.
    before: usize,
    behind: usize,
    /// Whether intervals are found to the entry, however large.
    exact: bool,
}

impl<'a> Probe<'a> {
    /// Finds the place of the context: a search in the fences and one in the entries between two of them.
    pub(crate) fn new(view: View<'a>, context: &'a [Token], len_max: usize, exact: bool) -> Self {
        let context = &context[context.len().saturating_sub(len_max)..];
        let separated = context.iter().rposition(|&token| token == SEPARATOR);
        let context = &context[separated.map_or(0, |at| at + 1)..];
        let mut probe = Probe {
            view,
            context,
            entries: 0..0,
            before: 0,
            behind: 0,
            exact,
        };
        if !context.is_empty() {
            probe.find();
        }
        probe
    }

    /// The longest pattern shorter than the current one that occurs at more places; 0 if there is none.
    pub(crate) fn next_len(&self) -> usize {
        self.before.max(self.behind)
    }

    pub(crate) fn text(&self) -> &'a [Token] {
        self.view.text
    }

    /// Number of occurrences.
    pub(crate) fn occurrences(&self) -> usize {
        self.entries.len()
    }

    /// Shortens the pattern to `len` tokens, at most [`next_len`](Self::next_len) to have an effect.
    pub(crate) fn descend(&mut self, len: usize) {
        if self.before >= len {
            let reach = self.reach(len, |distance| self.entries.start.checked_sub(distance));
            match reach {
                Some(distance) => self.entries.start -= distance,
                None => self.entries.start = self.coarse(len).start.min(self.entries.start),
            }
            self.before = match self.entries.start.checked_sub(1) {
                Some(entry) => self.common(entry).min(len - 1),
                None => 0,
            };
        }
        if self.behind >= len {
            let last = self.view.ends.len();
            let reach = self.reach(len, |distance| {
                Some(self.entries.end + distance - 1).filter(|&entry| entry < last)
            });
            match reach {
                Some(distance) => self.entries.end += distance,
                None => self.entries.end = self.coarse(len).end.max(self.entries.end),
            }
            self.behind = if self.entries.end < last {
                self.common(self.entries.end).min(len - 1)
            } else {
                0
            };
        }
    }

    /// Text positions of occurrences, each with the number of those it stands for: all of them, or `count_max`
    /// out of equal parts of the interval.
    ///
    /// Not those with the longest left context in common: they are what belongs to longer patterns.
    pub(crate) fn sample(&self, count_max: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let total = self.entries.len();
        let count = total.min(count_max);
        let bound = move |part: usize| (part as u64 * total as u64 / count as u64) as usize;
        (0..count).map(move |part| {
            let (low, high) = (bound(part), bound(part + 1));
            let entry = self.entries.start + low.midpoint(high);
            (self.view.ends[entry], (high - low) as u32)
        })
    }

    /// How far the pattern of `len` tokens reaches in the direction of `entry_at`, which is known to be at least
    /// one entry; `None` where that is far and need not be known.
    fn reach(&self, len: usize, entry_at: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let holds = |distance| entry_at(distance).is_some_and(|entry| self.ends_with(entry, len));
        let mut inside = 1;
        let mut step = 1;
        loop {
            if !self.exact && len <= FENCE_TOKENS && inside >= COARSE_ENTRIES {
                return None;
            }
            let outside = inside + step;
            if !holds(outside) {
                let distances = inside + 1..outside;
                return Some(inside + partition(distances, holds));
            }
            inside = outside;
            step *= 2;
        }
    }

    /// The interval of a pattern no longer than a fence, to the fences that have it; empty if none has.
    fn coarse(&self, len: usize) -> Range<usize> {
        let pattern = &self.context[self.context.len() - len..];
        let order = |fence: &[Token; FENCE_TOKENS]| compare(fence, pattern.iter().rev());
        let fences = self.view.fences;
        let start = fences.partition_point(|fence| order(fence).1 == Ordering::Less);
        let width = fences[start..].partition_point(|fence| order(fence).1 == Ordering::Equal);
        if width == 0 {
            return self.entries.clone();
        }
        start * FENCE_ENTRIES..((start + width - 1) * FENCE_ENTRIES + 1).min(self.view.ends.len())
    }

    /// Puts the empty interval to where the context would stand.
    fn find(&mut self) {
        let pattern = &self.context[self.context.len().saturating_sub(FENCE_TOKENS)..];
        let order = |fence: &[Token; FENCE_TOKENS]| compare(fence, pattern.iter().rev());
        let fences = self.view.fences;
        let low = fences.partition_point(|fence| order(fence).1 == Ordering::Less);
        // Between the last fence below the context and the first above it.
        let equal = if self.context.len() > pattern.len() {
            fences[low..].partition_point(|fence| order(fence).1 == Ordering::Equal)
        } else {
            0
        };
        let mut start = low.saturating_sub(1) * FENCE_ENTRIES;
        let mut end = ((low + equal) * FENCE_ENTRIES).min(self.view.ends.len());
        let common =
            |fence: Option<&[Token; FENCE_TOKENS]>| fence.map_or(0, |fence| order(fence).0);
        // What both ends have in common with the context, all between them have as well.
        let mut below = common(low.checked_sub(1).and_then(|fence| fences.get(fence)));
        let mut above = common(fences.get(low + equal));
        while start < end {
            let middle = start.midpoint(end);
            let known = below.min(above);
            let (common, order) = self.compare(middle, known);
            if order == Ordering::Less {
                start = middle + 1;
                below = common;
            } else {
                end = middle;
                above = common;
            }
        }
        self.entries = start..start;
        self.before = start.checked_sub(1).map_or(0, |entry| self.common(entry));
        self.behind = if start < self.view.ends.len() {
            self.common(start)
        } else {
            0
        };
    }

    /// How much of the context's end an entry ends with, and how it is ordered to the context; `known` tokens are
    /// known to agree.
    fn compare(&self, entry: usize, known: usize) -> (usize, Ordering) {
        let end = self.view.ends[entry] as usize;
        let left = &self.view.text[..=end];
        let context = &self.context[..self.context.len() - known];
        let left = &left[..left.len().saturating_sub(known)];
        let (common, order) = compare(left.iter().rev(), context.iter().rev());
        (known + common, order)
    }

    fn common(&self, entry: usize) -> usize {
        self.compare(entry, 0).0
    }

    fn ends_with(&self, entry: usize, len: usize) -> bool {
        let end = self.view.ends[entry] as usize;
        self.view.text[..=end].ends_with(&self.context[self.context.len() - len..])
    }
}

/// Common beginning of two sequences, and the order of the first to the second; equal where it begins with it.
fn compare<'t>(
    one: impl IntoIterator<Item = &'t Token>,
    other: impl IntoIterator<Item = &'t Token>,
) -> (usize, Ordering) {
    let mut one = one.into_iter();
    let mut common = 0;
    for token in other {
        // A text always has a separator in front, which no context holds: it does not run out.
        let order = one.next().map_or(Ordering::Greater, |one| one.cmp(token));
        if order != Ordering::Equal {
            return (common, order);
        }
        common += 1;
    }
    (common, Ordering::Equal)
}

/// How many of a range, from its start on, hold; those that do stand before those that do not.
fn partition(range: Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let mut low = range.start;
    let mut high = range.end.max(low);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low - range.start
}
