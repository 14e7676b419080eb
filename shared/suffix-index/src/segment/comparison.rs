//! A segment and a context, compared; and searching its entries for where a pattern begins or ends.

use std::cmp::Ordering;
use std::ops::Range;

use super::narrow::{Edge, Narrow};
use super::{FENCE_ENTRIES, FENCE_TOKENS, SUMMARY_FENCES, View, summary};
use crate::Token;
use crate::memory::fetch;

/// Entries between two of the summary.
const BLOCK_ENTRIES: usize = SUMMARY_FENCES * FENCE_ENTRIES;

/// Tokens that are compared in one go.
const BLOCK: usize = 8;

/// A segment and a context.
#[derive(Clone, Copy)]
pub(super) struct Look<'a> {
    pub(super) view: View<'a>,
    /// The end of the context, to the longest pattern of interest; no separator in it.
    pub(super) context: &'a [Token],
}

impl<'a> Look<'a> {
    /// Asks for what stands `known` tokens before some places of the text.
    pub(super) fn fetch(&self, ends: &[u32], known: usize) {
        for &end in ends {
            fetch(self.view.text, (end as usize).saturating_sub(known));
        }
    }

    /// Asks for what is known of the last tokens without a search.
    pub(super) fn fetch_grams(&self) {
        self.view.fetch_grams(self.context);
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
    pub(super) fn compare(&self, end: u32, pattern: &[Token], known: usize) -> (usize, Ordering) {
        let pattern = &pattern[..pattern.len() - known];
        let text = &self.view.text[..(end as usize + 1).saturating_sub(known)];
        // Most often the next token tells, and the block around it would begin in another line of the cache.
        if let (Some(one), Some(other)) = (text.last(), pattern.last())
            && one != other
        {
            return (known, one.cmp(other));
        }
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
    pub(super) fn pattern(&self, len: usize) -> &'a [Token] {
        &self.context[self.context.len() - len..]
    }

    /// The first entry that is not less than the context, which is [near](Self::near) these fences.
    pub(super) fn find(&self, near: Range<usize>) -> Narrow {
        let fences = self.view.fences;
        let len = self.context.len().min(FENCE_TOKENS);
        let pattern = self.pattern(len);
        let order = |fence: &[Token; FENCE_TOKENS]| compare(fence.iter(), pattern.iter().rev());
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
        Narrow::new(range, self.context.len(), Edge::Start)
            .between(common(below), common(Some(high)))
    }

    /// The fences among which the first is that is not less than the context, or the one behind them. Asks for them.
    pub(super) fn near(&self) -> Range<usize> {
        let (last, rest) = self.context.split_last().unwrap_or((&0, &[]));
        let key = summary(*last, rest.last().copied().unwrap_or(0));
        let behind = self.view.summary.partition_point(|&other| other < key);
        let rest = &self.view.summary[behind..];
        let equal = gallop(rest.len(), |at| rest[at] == key);
        let end = ((behind + equal) * SUMMARY_FENCES).min(self.view.fences.len());
        let near = behind.saturating_sub(1) * SUMMARY_FENCES..end;
        // Two fences are a line of the cache.
        if near.len() <= SUMMARY_FENCES {
            near.clone()
                .step_by(2)
                .for_each(|at| fetch(self.view.fences, at));
        }
        near
    }

    /// Where the interval of a pattern starts, from which on all entries up to the context's `place` are known to belong
    /// to it.
    pub(super) fn start(&self, len: usize, known: usize, place: usize, exact_max: usize) -> Narrow {
        if let Some(interval) = self.interval(len) {
            let start = interval.start.min(known);
            return Narrow::new(start..start, len, Edge::Start);
        }
        let mut range = 0..known;
        if let Some(blocks) = self.blocks(len) {
            let before = blocks.start.checked_sub(1);
            range.start = before.map_or(0, |block| block * BLOCK_ENTRIES + 1);
            if !blocks.is_empty() {
                range.end = known.min(blocks.start * BLOCK_ENTRIES);
            }
        }
        let narrow = Narrow::new(range.clone(), len, Edge::Start);
        if narrow.found(place, exact_max).is_some() {
            return narrow;
        }
        let fences = range.start.div_ceil(FENCE_ENTRIES)..range.end.div_ceil(FENCE_ENTRIES);
        let within = gallop(fences.len(), |at| self.has_fence(fences.end - 1 - at, len));
        if within < fences.len() {
            range.start = (fences.end - within - 1) * FENCE_ENTRIES + 1;
        }
        if within > 0 && len <= FENCE_TOKENS {
            range.end = (fences.end - within) * FENCE_ENTRIES;
        }
        Narrow::new(range, len, Edge::Start)
    }

    /// Where the interval of a pattern ends, before which all entries from the context's `place` on are known to belong
    /// to it.
    pub(super) fn end(&self, len: usize, known: usize, place: usize, exact_max: usize) -> Narrow {
        if let Some(interval) = self.interval(len) {
            let end = interval.end.max(known);
            return Narrow::new(end..end, len, Edge::End);
        }
        let mut range = known..self.view.ends.len();
        if let Some(blocks) = self.blocks(len) {
            range.end = range.end.min(blocks.end * BLOCK_ENTRIES);
            if !blocks.is_empty() {
                range.start = known.max((blocks.end - 1) * BLOCK_ENTRIES + 1);
            }
        }
        let narrow = Narrow::new(range.clone(), len, Edge::End);
        if narrow.found(place, exact_max).is_some() {
            return narrow;
        }
        let fences = range.start.div_ceil(FENCE_ENTRIES)..range.end.div_ceil(FENCE_ENTRIES);
        let within = gallop(fences.len(), |at| self.has_fence(fences.start + at, len));
        if within < fences.len() {
            range.end = (fences.start + within) * FENCE_ENTRIES;
        }
        if within > 0 && len <= FENCE_TOKENS {
            range.start = (fences.start + within - 1) * FENCE_ENTRIES + 1;
        }
        Narrow::new(range, len, Edge::End)
    }

    /// The interval of a pattern, if that is known without a search.
    pub(super) fn interval(&self, len: usize) -> Option<Range<usize>> {
        let last = *self.context.last()?;
        (len == 1).then(|| self.view.interval(last)).flatten()
    }

    /// The blocks of fences of which the first has the pattern, if it is short enough for the summary to tell.
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

    /// Whether a fence has the pattern, or as much of it as a fence can have.
    fn has_fence(&self, at: usize, len: usize) -> bool {
        let fence: &[Token; FENCE_TOKENS] = &self.view.fences[at];
        let pattern = self.pattern(len).iter().rev();
        fence.iter().zip(pattern).all(|(one, other)| one == other)
    }
}

/// Common beginning of two sequences, and the order of the first to the second; equal where it begins with it.
pub(super) fn compare<'t>(
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
