//! A segment and a context, compared; and searching its entries for where a pattern begins or ends.

use std::cmp::Ordering;
use std::ops::Range;

use super::{FENCE_ENTRIES, FENCE_TOKENS, SUMMARY_FENCES, View, summary};
use crate::Token;

/// Tokens that are compared in one go.
const BLOCK: usize = 8;

/// Entries that a step looks at: two steps get from between two fences to the edge, and the loads of one are few enough
/// to be under way together.
const STEP_ENTRIES: usize = 12;

/// A segment and a context.
#[derive(Clone, Copy)]
pub(super) struct Look<'a> {
    pub(super) view: View<'a>,
    /// The end of the context, to the longest pattern of interest; no separator in it.
    pub(super) context: &'a [Token],
}

impl<'a> Look<'a> {
    /// Loads some places of the text at once. Whoever reads them after that waits for one of them and not for each.
    pub(super) fn touch(&self, ends: &[u32]) {
        let loaded = ends
            .iter()
            .fold(0, |all, &end| all ^ self.view.text[end as usize]);
        std::hint::black_box(loaded);
    }

    /// How much of the context's end what ends at a position has in common with it.
    pub(super) fn common(&self, end: u32) -> usize {
        self.compare(end, self.context, 0).0
    }

    /// Whether what ends at a position ends with so much of the context.
    pub(super) fn ends_with(&self, end: u32, len: usize) -> bool {
        self.view.text[..=end as usize].ends_with(self.pattern(len))
    }

    /// How much of a pattern what ends at a position has in common with it, and how it is ordered to it; equal where it
    /// has all of it. `known` tokens are known to agree.
    fn compare(&self, end: u32, pattern: &[Token], known: usize) -> (usize, Ordering) {
        let pattern = &pattern[..pattern.len() - known];
        let text = &self.view.text[..(end as usize + 1).saturating_sub(known)];
        // Blocks of a size that is compared in one go.
        let same = text
            .rchunks_exact(BLOCK)
            .zip(pattern.rchunks_exact(BLOCK))
            .take_while(|(one, other)| one == other)
            .count()
            * BLOCK;
        let text = &text[..text.len() - same];
        let pattern = &pattern[..pattern.len() - same];
        let (common, order) = compare(text.iter().rev(), pattern.iter().rev());
        (known + same + common, order)
    }

    /// The end of the context.
    fn pattern(&self, len: usize) -> &'a [Token] {
        &self.context[self.context.len() - len..]
    }

    /// The first entry that is not less than the context.
    pub(super) fn find(&self) -> Narrow {
        let fences = self.view.fences;
        let len = self.context.len().min(FENCE_TOKENS);
        let pattern = self.pattern(len);
        let order = |fence: &[Token; FENCE_TOKENS]| compare(fence.iter(), pattern.iter().rev());
        let near = self.near(pattern);
        let low =
            near.start + fences[near].partition_point(|fence| order(fence).1 == Ordering::Less);
        // Between the last fence below the context and the first above it.
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
        // What both ends have in common with the context, all between them have as well.
        let common = |at: Option<usize>| {
            let fence = at.and_then(|at| fences.get(at));
            fence.map_or(0, |fence| order(fence).0)
        };
        Narrow {
            below: common(below),
            above: common(Some(high)),
            ..Narrow::new(range, self.context.len(), Edge::Start)
        }
    }

    /// The fences among which the first is that is not less than the pattern, or the one behind them.
    fn near(&self, pattern: &[Token]) -> Range<usize> {
        let (last, rest) = pattern.split_last().unwrap_or((&0, &[]));
        let key = summary(*last, rest.last().copied().unwrap_or(0));
        let behind = self.view.summary.partition_point(|&other| other < key);
        let equal = self.view.summary[behind..].partition_point(|&other| other == key);
        let end = ((behind + equal) * SUMMARY_FENCES).min(self.view.fences.len());
        behind.saturating_sub(1) * SUMMARY_FENCES..end
    }

    /// Where the interval of a pattern starts, which is known to be before `end`.
    pub(super) fn start(&self, len: usize, end: usize) -> Narrow {
        let fences = &self.view.fences[..end.div_ceil(FENCE_ENTRIES)];
        let nearest = |at: usize| fences.len() - 1 - at;
        let within = gallop(fences.len(), |at| self.has_fence(&fences[nearest(at)], len));
        let start = match fences.len() - within {
            0 => 0,
            outside => (outside - 1) * FENCE_ENTRIES + 1,
        };
        let end = if len <= FENCE_TOKENS && within > 0 {
            nearest(within - 1) * FENCE_ENTRIES
        } else {
            end
        };
        Narrow::new(start..end, len, Edge::Start)
    }

    /// Where the interval of a pattern ends, which is known to be at `start` or behind it.
    pub(super) fn end(&self, len: usize, start: usize) -> Narrow {
        let first = start.div_ceil(FENCE_ENTRIES);
        let fences = self.view.fences.get(first..).unwrap_or_default();
        let within = gallop(fences.len(), |at| self.has_fence(&fences[at], len));
        let end = ((first + within) * FENCE_ENTRIES).min(self.view.ends.len());
        let start = if len <= FENCE_TOKENS && within > 0 {
            (first + within - 1) * FENCE_ENTRIES + 1
        } else {
            start
        };
        Narrow::new(start..end, len, Edge::End)
    }

    /// Whether a fence has the pattern, or as much of it as a fence can have.
    fn has_fence(&self, fence: &[Token; FENCE_TOKENS], len: usize) -> bool {
        let pattern = self.pattern(len).iter().rev();
        fence.iter().zip(pattern).all(|(one, other)| one == other)
    }
}

/// A search for an edge of a pattern's interval, in steps: [`load`](Self::load) and [`step`](Self::step) in turns,
/// so that the loads of several searches are waited for together.
pub(super) struct Narrow {
    /// The edge is at one of these or at their end.
    range: Range<usize>,
    /// Length of the pattern.
    len: usize,
    edge: Edge,
    /// How much of the pattern the entries around the range end with: at least so much all of it does as well.
    below: usize,
    above: usize,
    /// The entries looked at.
    ends: [u32; STEP_ENTRIES],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Edge {
    /// The first entry that is not less than the pattern.
    Start,
    /// The first entry that is greater.
    End,
}

impl Narrow {
    fn new(range: Range<usize>, len: usize, edge: Edge) -> Self {
        Narrow {
            range: range.start..range.end.max(range.start),
            len,
            edge,
            below: 0,
            above: 0,
            ends: [0; STEP_ENTRIES],
        }
    }

    /// The edge, once it is known: exactly, or, beyond `exact_max` entries that are `inside`, when these are much against
    /// what is left of the range. The interval is then short by at most a fifth.
    pub(super) fn found(&self, inside: usize, exact_max: usize) -> Option<usize> {
        let left = self.range.len();
        if left > 0 && (inside < exact_max || left * 4 > inside) {
            return None;
        }
        Some(match self.edge {
            Edge::Start => self.range.end,
            Edge::End => self.range.start,
        })
    }

    /// Common length with the context of the entry on the far side of the range, which is not in the interval; 0 if
    /// there is none.
    pub(super) fn beyond(&self, look: &Look<'_>) -> usize {
        let entry = match self.edge {
            Edge::Start => self.range.start.checked_sub(1),
            Edge::End => Some(self.range.end),
        };
        let end = entry.and_then(|entry| look.view.ends.get(entry));
        end.map_or(0, |&end| look.common(end))
    }

    /// The end of the range that the interval begins from.
    pub(super) fn nearest(&self) -> usize {
        match self.edge {
            Edge::Start => self.range.end,
            Edge::End => self.range.start,
        }
    }

    /// Has the entries of the next step loaded; returns their number.
    pub(super) fn load(&mut self, look: &Look<'_>) -> usize {
        let count = self.count();
        for (at, slot) in (0..count).zip(&mut self.ends) {
            *slot = look.view.ends[entry(&self.range, at)];
        }
        look.touch(&self.ends[..count]);
        count
    }

    /// Looks at them and keeps the range between two of them.
    pub(super) fn step(&mut self, look: &Look<'_>) {
        let pattern = look.pattern(self.len);
        let count = self.count();
        let known = self.below.min(self.above);
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

    fn count(&self) -> usize {
        self.range.len().min(STEP_ENTRIES)
    }
}

/// The entries looked at divide the range evenly, or are all of it.
fn entry(range: &Range<usize>, at: usize) -> usize {
    match range.len() <= STEP_ENTRIES {
        true => range.start + at,
        false => range.start + range.len() * (at + 1) / (STEP_ENTRIES + 1),
    }
}

/// Common beginning of two sequences, and the order of the first to the second; equal where it begins with it.
fn compare<'t>(
    mut one: impl Iterator<Item = &'t Token>,
    other: impl Iterator<Item = &'t Token>,
) -> (usize, Ordering) {
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

/// How many from 0 on hold, where those that do stand first: in the logarithm of that number.
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
