//! Segments become fewer: which ones to merge, and merging them.
//!
//! As a rebuild, a merge has three steps: [`Index::begin_merge`] under the lock takes references, no copies;
//! [`Merge::run`] on a thread of its own makes one segment of several; [`Index::finish_merge`] under the lock swaps it
//! in. A search that runs under the lock waits for nothing but the swap.

use std::collections::HashSet;
use std::sync::Arc;

use crate::sealed::Mounted;
use crate::{
    DocumentKey, Index, IndexError, Retired, Segment, SegmentBuilder, SegmentError, SegmentStats,
};

/// When segments are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergePolicy {
    /// Segments that are put up with (at least 1).
    pub segments_max: usize,
    /// A segment is rewritten once more than this share of its tokens is masked.
    pub masked_share_max: f32,
}

impl MergePolicy {
    /// Which segments to merge into one, as ascending positions in `segments`; one alone is rewritten without its
    /// masked documents; `None` if all is well. A pure function: whoever asks decides when.
    ///
    /// Size-tiered: while there are too many, those are merged that are small beside the others. In the order of
    /// size, from the largest, the first segment that is not larger than all smaller ones together goes with
    /// these. So a merge at least doubles its largest input or leaves it alone, and a token is rewritten about as often
    /// as the index doubles; and no more segments remain than doublings either.
    pub fn plan(&self, segments: &[SegmentStats]) -> Option<Vec<usize>> {
        let remaining = |stats: &SegmentStats| stats.tokens - stats.masked_tokens;
        let mut merged = if segments.len() > self.segments_max.max(1) {
            let mut order: Vec<usize> = (0..segments.len()).collect();
            order.sort_by_key(|&at| std::cmp::Reverse(remaining(&segments[at])));
            let mut smaller: u64 = segments.iter().map(remaining).sum();
            let dominated = order.iter().position(|&at| {
                smaller -= remaining(&segments[at]);
                remaining(&segments[at]) <= smaller
            });
            // Where each dwarfs what follows, the smallest two make room.
            let too_many = segments.len() - self.segments_max.max(1);
            let from = dominated
                .unwrap_or(usize::MAX)
                .min(segments.len() - too_many - 1);
            order.split_off(from)
        } else {
            let worn = segments.iter().position(|stats| {
                stats.masked_tokens as f32 > self.masked_share_max * stats.tokens as f32
                    || stats.masked_documents == stats.documents
            });
            vec![worn?]
        };
        merged.sort_unstable();
        Some(merged)
    }
}

/// Segments to be made one. See [`Index::begin_merge`].
pub struct Merge {
    inputs: Vec<Mounted>,
}

/// The segment they became, to be handed to [`Index::finish_merge`].
pub struct Merged {
    inputs: Vec<Mounted>,
    /// `None` if no document was left.
    segment: Option<Arc<Segment>>,
}

impl Merge {
    /// Builds the new segment. Linear in its tokens.
    ///
    /// # Errors
    /// The inputs have more tokens than one segment can number.
    pub fn run(self) -> Result<Merged, SegmentError> {
        let mut builder = SegmentBuilder::new();
        for mounted in &self.inputs {
            for (number, document) in mounted.segment.iter().enumerate() {
                if !mounted.is_masked(number) {
                    builder.add(
                        document.key,
                        document.left_context.iter().copied(),
                        document.output.iter().copied(),
                    );
                }
            }
        }
        let segment = match builder.documents() {
            0 => None,
            _ => Some(Arc::new(builder.build()?)),
        };
        Ok(Merged {
            inputs: self.inputs,
            segment,
        })
    }
}

impl Merged {
    /// The new segment, for instance to be written to a file.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    /// The segments that it replaces.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = &Arc<Segment>> {
        self.inputs.iter().map(|mounted| &mounted.segment)
    }
}

impl Index {
    /// Which segments to merge, by the configured policy.
    pub fn plan_merge(&self) -> Option<Vec<usize>> {
        let policy = MergePolicy {
            segments_max: self.config.segments_max,
            masked_share_max: self.config.masked_share_max,
        };
        let stats: Vec<SegmentStats> = self.sealed.iter().map(Mounted::stats).collect();
        policy.plan(&stats)
    }

    /// Takes hold of the segments at these positions; others are ignored.
    pub fn begin_merge(&self, positions: &[usize]) -> Merge {
        let distinct: HashSet<usize> = positions.iter().copied().collect();
        let inputs = self
            .sealed
            .iter()
            .enumerate()
            .filter(|(at, _)| distinct.contains(at))
            .map(|(_, mounted)| mounted.clone());
        Merge {
            inputs: inputs.collect(),
        }
    }

    /// Puts the merged segment in the place of its inputs. Documents that were removed from those meanwhile are masked
    /// in it: a look at the mask of each input.
    ///
    /// # Errors
    /// An input is no longer there: it was merged by somebody else. The index is as it was.
    pub fn finish_merge(&mut self, merged: Merged) -> Result<Retired, IndexError> {
        let is_input = |mounted: &Mounted| {
            merged
                .inputs
                .iter()
                .find(|input| Arc::ptr_eq(&input.segment, &mounted.segment))
        };
        let found = self
            .sealed
            .iter()
            .filter(|mounted| is_input(mounted).is_some())
            .count();
        if found != merged.inputs.len() {
            return Err(IndexError::OutdatedMerge);
        }
        let mut gone: Vec<DocumentKey> = Vec::new();
        for mounted in &self.sealed {
            if let Some(input) = is_input(mounted)
                && input.stats() != mounted.stats()
            {
                gone.extend(mounted.keys(true).filter(|&key| input.find(key).is_some()));
            }
        }
        let (mut retired, kept): (Vec<Mounted>, Vec<Mounted>) = std::mem::take(&mut self.sealed)
            .into_iter()
            .partition(|mounted| is_input(mounted).is_some());
        self.sealed = kept;
        if let Some(segment) = merged.segment {
            let mut output = Mounted::new(segment);
            for key in gone {
                output.mask(key);
            }
            self.sealed.push(output);
        }
        retired.extend(merged.inputs);
        Ok(Retired::segments(retired))
    }

    /// Merges here and now until the policy is content.
    ///
    /// # Errors
    /// As [`Merge::run`].
    pub fn merge(&mut self) -> Result<(), IndexError> {
        while let Some(positions) = self.plan_merge() {
            let merged = self.begin_merge(&positions).run()?;
            self.finish_merge(merged)?;
        }
        Ok(())
    }
}
