//! Which documents are sealed and which segments are merged, as pure functions.
//!
//! When enough documents of a namespace have ended, the ones unchanged for longest become one segment. So segments
//! start with similar sizes, and merges make them larger step by step (`refrain_suffix_index::MergePolicy`). A
//! segment that is too large to be rebuilt together with others is not merged any more. Segments that lost many
//! documents are rewritten before others are merged.
//!
//! A namespace with little to seal stays in the log until its oldest document is a day old, or until the log as a
//! whole holds too much. An amount that would not fill a file stays in the log for good.

use refrain_protocol::DocumentId;
use refrain_suffix_index::{MergePolicy, SegmentStats};

use crate::record::SegmentId;

/// A segment is rewritten once more than this share of its tokens is removed.
const MASKED_SHARE_MAX: f32 = 0.25;

/// When sealing lags, one segment may hold up to this many times the usual size, to catch up faster.
const SEAL_FACTOR: u64 = 8;

/// Fewer tokens than this take less space in the log than in a file of their own.
const SEAL_TOKENS_MIN: u64 = 1_024;

/// The limits; see [`crate::DraftStoreConfig`] and [`crate::StoreTuning`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentPolicy {
    pub(crate) seal_tokens: u64,
    pub(crate) seal_documents: usize,
    pub(crate) segments_max: usize,
    pub(crate) segment_tokens_max: u64,
}

/// The documents of a namespace that may be sealed: sequence of the last change, id, tokens.
pub(crate) struct SealCandidates {
    pub(crate) documents: Vec<(u64, DocumentId, u32)>,
    /// When the first of them was stored, in Unix milliseconds.
    pub(crate) oldest_ms: u64,
}

/// How many documents of a namespace must have ended before it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Enough for a segment of the usual size.
    Usual,
    /// Enough to be worth a file, if some of it was stored before this time.
    Aged { before_ms: u64 },
    /// Enough to be worth a file: there is too much in the log, or an operator wants it small.
    Crowded,
}

/// The documents or segments that a new segment is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SegmentSource {
    /// Documents in the log, which are sealed.
    Log(Vec<DocumentId>),
    /// Segments, which are merged.
    Segments(Vec<SegmentId>),
}

impl SegmentPolicy {
    /// Whether a namespace has enough in the log to look at its documents one by one.
    pub(crate) fn may_seal(&self, tokens: u64, documents: usize, urgency: Urgency) -> bool {
        self.is_enough(tokens, documents) || urgency != Urgency::Usual && tokens >= SEAL_TOKENS_MIN
    }

    fn is_enough(&self, tokens: u64, documents: usize) -> bool {
        tokens >= self.seal_tokens || documents >= self.seal_documents
    }

    /// The documents of a namespace to seal, if they are enough.
    pub(crate) fn seal(
        &self,
        candidates: SealCandidates,
        urgency: Urgency,
    ) -> Option<Vec<DocumentId>> {
        let SealCandidates {
            mut documents,
            oldest_ms,
        } = candidates;
        let urgency = match urgency {
            Urgency::Aged { before_ms } if oldest_ms >= before_ms => Urgency::Usual,
            urgency => urgency,
        };
        documents.sort_unstable();
        let tokens_max = self.segment_tokens_max.min(self.seal_tokens * SEAL_FACTOR);
        let mut tokens = 0;
        let mut taken = Vec::new();
        for (_, document, len) in documents {
            if tokens >= tokens_max || taken.len() >= self.seal_documents {
                break;
            }
            tokens += u64::from(len);
            taken.push(document);
        }
        self.may_seal(tokens, taken.len(), urgency).then_some(taken)
    }

    /// The segments of a namespace to merge, if there are any.
    pub(crate) fn merge(&self, segments: &[(SegmentId, SegmentStats)]) -> Option<Vec<SegmentId>> {
        // The segment that frees most for what its rewrite costs comes first.
        let mut worn: Vec<_> = segments
            .iter()
            .filter(|(_, stats)| is_worn(stats))
            .collect();
        if !worn.is_empty() {
            worn.sort_by(|(_, a), (_, b)| masked_share(b).total_cmp(&masked_share(a)));
            return Some(self.merged(&worn));
        }
        // Two segments that are each at most half of the limit fit into one.
        let small: Vec<_> = segments
            .iter()
            .filter(|(_, stats)| live(stats) <= self.segment_tokens_max / 2)
            .collect();
        let stats: Vec<SegmentStats> = small.iter().map(|(_, stats)| *stats).collect();
        let policy = MergePolicy {
            segments_max: self.segments_max,
            masked_share_max: MASKED_SHARE_MAX,
        };
        let mut plan: Vec<_> = policy
            .plan(&stats)?
            .into_iter()
            .map(|at| small[at])
            .collect();
        plan.sort_by_key(|(id, stats)| (live(stats), *id));
        Some(self.merged(&plan))
    }

    /// As many of the first segments as fit into one.
    fn merged(&self, plan: &[&(SegmentId, SegmentStats)]) -> Vec<SegmentId> {
        let mut tokens = 0;
        let fitting = plan
            .iter()
            .take_while(|(_, stats)| {
                tokens += live(stats);
                tokens <= self.segment_tokens_max
            })
            .count();
        let fitting = &plan[..fitting.max(1)];
        let mut segments: Vec<SegmentId> = fitting.iter().map(|(id, _)| *id).collect();
        segments.sort_unstable();
        segments
    }
}

fn live(stats: &SegmentStats) -> u64 {
    stats.tokens - stats.masked_tokens
}

fn masked_share(stats: &SegmentStats) -> f32 {
    stats.masked_tokens as f32 / stats.tokens.max(1) as f32
}

/// Whether so much of a segment is removed that it should be rewritten.
fn is_worn(stats: &SegmentStats) -> bool {
    masked_share(stats) > MASKED_SHARE_MAX || stats.masked_documents == stats.documents
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POLICY: SegmentPolicy = SegmentPolicy {
        seal_tokens: 100,
        seal_documents: 10,
        segments_max: 3,
        segment_tokens_max: 1_000,
    };

    fn stats(tokens: u64, masked_tokens: u64) -> SegmentStats {
        SegmentStats {
            tokens,
            masked_tokens,
            documents: 10,
            masked_documents: usize::from(masked_tokens > 0),
        }
    }

    fn candidates(documents: &[(u64, u128, u32)]) -> SealCandidates {
        let documents = documents
            .iter()
            .map(|(at, id, len)| (*at, DocumentId(*id), *len));
        SealCandidates {
            documents: documents.collect(),
            oldest_ms: 7,
        }
    }

    fn merged(segments: &[(u64, u64)]) -> Vec<SegmentId> {
        let segments: Vec<_> = (1..)
            .zip(segments)
            .map(|(id, (tokens, masked))| (id, stats(*tokens, *masked)))
            .collect();
        POLICY.merge(&segments).unwrap_or_default()
    }

    #[test]
    fn enough_ended_documents_are_sealed_the_longest_unchanged_first() {
        let sealed = |documents| POLICY.seal(candidates(documents), Urgency::Usual);
        assert_eq!(sealed(&[(1, 1, 50), (2, 2, 49)]), None);
        let enough = sealed(&[(9, 1, 80), (5, 2, 60), (7, 3, 60)]);
        let expected = vec![DocumentId(2), DocumentId(3), DocumentId(1)];
        assert_eq!(enough, Some(expected));
        let short: Vec<_> = (0..12).map(|id| (id, u128::from(id), 1)).collect();
        assert_eq!(sealed(&short).unwrap().len(), 10);
        let behind = SegmentPolicy {
            seal_documents: 100,
            ..POLICY
        };
        let many: Vec<_> = (0..40).map(|id| (id, u128::from(id), 60)).collect();
        let taken = behind.seal(candidates(&many), Urgency::Usual);
        assert_eq!(taken.unwrap().len(), 14, "eight times the usual size");
    }

    #[test]
    fn little_is_sealed_if_it_is_old_or_the_log_is_crowded() {
        let policy = SegmentPolicy {
            seal_tokens: 10_000,
            segment_tokens_max: 10_000,
            ..POLICY
        };
        let all = |documents: &[(u64, u128, u32)], urgency| {
            policy.seal(candidates(documents), urgency).is_some()
        };
        let little = [(1, 1, 1_000), (2, 2, 24)];
        let aged = |before_ms| Urgency::Aged { before_ms };
        assert!(all(&little, Urgency::Crowded) && all(&little, aged(8)));
        assert!(!all(&little, Urgency::Usual) && !all(&little, aged(7)));
        let less = [(1, 1, 1_000), (2, 2, 23)];
        assert!(!all(&less, Urgency::Crowded) && !all(&less, aged(8)));
    }

    #[test]
    fn too_many_and_worn_segments_are_merged_and_large_ones_are_not() {
        assert_eq!(merged(&[(100, 0), (100, 0), (100, 0)]), [0; 0]);
        assert_eq!(merged(&[(100, 0); 4]), [1, 2, 3, 4]);
        assert_eq!(merged(&[(100, 30), (100, 0)]), [1]);
        assert_eq!(merged(&[(900, 0), (900, 0), (900, 0), (900, 0)]), [0; 0]);
        assert_eq!(merged(&[(900, 0), (900, 300)]), [2]);
        // Worn segments go first, the most worn before the others, as many as fit.
        assert_eq!(merged(&[(100, 30), (100, 0), (100, 0), (100, 90)]), [1, 4]);
        assert_eq!(merged(&[(900, 300), (900, 500), (900, 0)]), [1, 2]);
        assert_eq!(merged(&[(900, 300), (990, 400), (900, 800)]), [2, 3]);
    }

    proptest! {
        #[test]
        fn merging_ends_and_never_makes_a_segment_too_large(
            sizes in proptest::collection::vec((1u64..900, 0u64..100), 0..40)
        ) {
            let mut segments: Vec<(SegmentId, SegmentStats)> = (1..)
                .zip(&sizes)
                .map(|(id, (tokens, share))| (id, stats(*tokens, tokens * share / 100)))
                .collect();
            let mut steps = 0;
            while let Some(chosen) = POLICY.merge(&segments) {
                let (gone, mut left): (Vec<_>, Vec<_>) =
                    segments.into_iter().partition(|(id, _)| chosen.contains(id));
                let tokens: u64 = gone.iter().map(|(_, one)| one.tokens - one.masked_tokens).sum();
                prop_assert!(gone.len() == chosen.len() && tokens <= 1_000);
                left.push((1_000 + steps, stats(tokens, 0)));
                segments = left;
                steps += 1;
                prop_assert!(steps <= 2 * sizes.len() as u64, "endless");
            }
            let small = segments.iter().filter(|(_, one)| one.tokens - one.masked_tokens <= 500);
            prop_assert!(small.count() <= 3);
        }
    }
}
