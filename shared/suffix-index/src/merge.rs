//! Merging of segments, and the policy that chooses which ones to merge.
//!
//! A merge has three steps, like a rebuild. [`Index::begin_merge`], under the lock, takes references and no copies.
//! [`Merge::run`], on a thread of its own, builds one segment from several. [`Index::finish_merge`], under the lock,
//! swaps it in. So a search that needs the lock waits only for the swap.

use std::collections::HashSet;
use std::sync::Arc;

use crate::{
    DocumentKey, Index, IndexError, MountedSegment, Retired, Segment, SegmentBuilder, SegmentError,
    SegmentStats,
};

/// The conditions under which segments are merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergePolicy {
    /// Maximum number of segments before some are merged (at least 1).
    pub segments_max: usize,
    /// A segment is rewritten when more than this share of its tokens is masked.
    pub masked_share_max: f32,
}

/// The policy of indexes. Each search looks into every segment, so there are few.
const MERGE_POLICY: MergePolicy = MergePolicy {
    segments_max: 3,
    masked_share_max: 0.25,
};

impl MergePolicy {
    /// Chooses the segments to merge into one, as ascending positions in `segments`. A single position means that the
    /// segment is rewritten without its masked documents. `None` means that nothing needs to be done.
    ///
    /// The policy is size-tiered: while there are too many segments, small ones are merged. Sorted by size, the
    /// largest segment that is not larger than all smaller ones together is merged with those. So a merge at least
    /// doubles its largest input, or leaves it out. Therefore a token is rewritten about as often as the index
    /// doubles, and there are no more segments than doublings.
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
            // If each segment is larger than all smaller ones together, just enough of the smallest ones are merged.
            let too_many = segments.len() - self.segments_max.max(1);
            let from = dominated
                .unwrap_or(usize::MAX)
                .min(segments.len() - too_many - 1);
            order.split_off(from)
        } else {
            let mostly_masked = segments.iter().position(|stats| {
                stats.masked_tokens as f32 > self.masked_share_max * stats.tokens as f32
                    || stats.masked_documents == stats.documents
            });
            vec![mostly_masked?]
        };
        merged.sort_unstable();
        Some(merged)
    }
}

/// The segments to merge. See [`Index::begin_merge`].
pub struct Merge {
    inputs: Vec<MountedSegment>,
}

/// The result of a merge, to be passed to [`Index::finish_merge`].
pub struct Merged {
    inputs: Vec<MountedSegment>,
    /// `None` if no document is left.
    segment: Option<Arc<Segment>>,
}

impl Merge {
    /// Builds the new segment. The cost is linear in its tokens.
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
        Ok(Merged {
            inputs: self.inputs,
            segment: builder.build_unless_empty()?,
        })
    }
}

impl Merged {
    /// The new segment, for instance to be written to a file.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }

    /// The segments that it replaces.
    #[cfg(test)]
    pub(crate) fn inputs(&self) -> impl ExactSizeIterator<Item = &Arc<Segment>> {
        self.inputs.iter().map(|mounted| &mounted.segment)
    }
}

impl Index {
    /// Chooses the segments to merge, by the policy of indexes.
    pub fn plan_merge(&self) -> Option<Vec<usize>> {
        let stats: Vec<SegmentStats> = self.sealed.iter().map(MountedSegment::stats).collect();
        MERGE_POLICY.plan(&stats)
    }

    /// Takes references to the segments at these positions. Positions out of range are ignored.
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

    /// Replaces the inputs with the merged segment. Documents that were removed from the inputs meanwhile are masked
    /// in it. The cost is a look at the mask of each input.
    ///
    /// # Errors
    /// Another merge has replaced an input. The index is left as it was.
    pub fn finish_merge(&mut self, merged: Merged) -> Result<Retired, IndexError> {
        let is_input = |mounted: &MountedSegment| {
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
        let mut removed: Vec<DocumentKey> = Vec::new();
        for mounted in &self.sealed {
            if let Some(input) = is_input(mounted)
                && input.stats() != mounted.stats()
            {
                removed.extend(mounted.keys(true).filter(|&key| input.find(key).is_some()));
            }
        }
        let (mut retired, kept): (Vec<MountedSegment>, Vec<MountedSegment>) =
            std::mem::take(&mut self.sealed)
                .into_iter()
                .partition(|mounted| is_input(mounted).is_some());
        self.sealed = kept;
        if let Some(segment) = merged.segment {
            let mut output = MountedSegment::new(segment);
            for key in removed {
                output.mask(key);
            }
            self.sealed.push(output);
        }
        retired.extend(merged.inputs);
        Ok(Retired::segments(retired))
    }

    /// Merges in place until the policy finds nothing to do.
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
