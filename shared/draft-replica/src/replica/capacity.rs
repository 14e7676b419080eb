//! The capacity of the replica: what namespaces hold and what is being fetched for them, within the limits of all.
//!
//! Its lock comes before those of indexes, which are taken while it is held. No thread takes it while it holds an
//! index.

use std::ops::{Add, AddAssign};
use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::segment::SegmentInfo;

use crate::config::ReplicaConfig;

/// Tokens, and the bytes that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct IndexSize {
    pub(super) tokens: u64,
    pub(super) bytes: u64,
}

/// The capacity that namespaces in use share with segments that are being fetched.
///
/// Namespaces without a running request do not count: they are evicted where another one needs their space.
#[derive(Default)]
pub(super) struct Capacity {
    usage: Mutex<Usage>,
}

#[derive(Default)]
struct Usage {
    /// Held by namespaces in use.
    held: IndexSize,
    /// Reserved for segments that are being fetched.
    reserved: IndexSize,
}

/// Capacity kept for segments that are being fetched. It is given back when this is dropped.
pub(super) struct Reservation {
    capacity: Arc<Capacity>,
    size: IndexSize,
}

impl IndexSize {
    /// The limits of all namespaces together.
    pub(super) fn limit(config: &ReplicaConfig) -> Self {
        IndexSize {
            tokens: config.tokens_max,
            bytes: config.bytes_max,
        }
    }

    /// The size of segments of the store.
    pub(super) fn of_segments(segments: &[SegmentInfo]) -> Self {
        segments.iter().fold(IndexSize::default(), |sum, info| {
            sum + IndexSize {
                tokens: info.tokens,
                bytes: info.words.saturating_mul(4),
            }
        })
    }

    /// The size of `tokens` further tokens, if they take as many bytes each as those of this size.
    pub(super) fn of_more(self, tokens: u64) -> Self {
        let bytes = u128::from(self.bytes) * u128::from(tokens) / u128::from(self.tokens.max(1));
        IndexSize {
            tokens,
            bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
        }
    }

    /// A tenth more. Mounted segments take more than their files, and grow before the next check.
    pub(super) fn with_slack(self) -> Self {
        self + IndexSize {
            tokens: self.tokens / 10,
            bytes: self.bytes / 10,
        }
    }

    pub(super) fn saturating_sub(self, other: IndexSize) -> Self {
        IndexSize {
            tokens: self.tokens.saturating_sub(other.tokens),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }

    /// Whether neither tokens nor bytes exceed those of `limit`.
    pub(super) fn is_within(self, limit: IndexSize) -> bool {
        self.tokens <= limit.tokens && self.bytes <= limit.bytes
    }

    /// How many tokens of an index of this size are within `limit`.
    pub(super) fn tokens_within(self, limit: IndexSize) -> u64 {
        let by_bytes =
            u128::from(self.tokens) * u128::from(limit.bytes) / u128::from(self.bytes.max(1));
        limit
            .tokens
            .min(u64::try_from(by_bytes).unwrap_or(u64::MAX))
    }
}

impl Add for IndexSize {
    type Output = IndexSize;

    fn add(self, other: IndexSize) -> IndexSize {
        IndexSize {
            tokens: self.tokens.saturating_add(other.tokens),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl AddAssign for IndexSize {
    fn add_assign(&mut self, other: IndexSize) {
        *self = *self + other;
    }
}

impl Usage {
    /// The capacity that is left for one namespace.
    fn left(&self, config: &ReplicaConfig) -> IndexSize {
        let left = IndexSize::limit(config).saturating_sub(self.held + self.reserved);
        IndexSize {
            tokens: left.tokens.min(config.namespace_tokens_max),
            ..left
        }
    }
}

impl Capacity {
    /// Replaces the held size by the one that `count` finds, and returns the reserved size. No segment arrives
    /// meanwhile.
    pub(super) fn recount(&self, count: impl FnOnce() -> IndexSize) -> IndexSize {
        let mut usage = self.usage.lock();
        usage.held = count();
        usage.reserved
    }

    /// Reserves capacity for the newest segments that fit. Returns these, oldest first. The older ones are left out:
    /// eviction would take them first.
    pub(super) fn reserve(
        self: &Arc<Self>,
        mut segments: Vec<SegmentInfo>,
        config: &ReplicaConfig,
    ) -> (Vec<SegmentInfo>, Reservation) {
        let mut usage = self.usage.lock();
        let left = usage.left(config);
        let mut taken = IndexSize::default();
        let fits = |info: &&SegmentInfo| {
            taken += IndexSize::of_segments(std::slice::from_ref(*info));
            taken.is_within(left)
        };
        let count = segments.iter().rev().take_while(fits).count();
        let fitting = segments.split_off(segments.len() - count);
        let size = IndexSize::of_segments(&fitting);
        usage.reserved += size;
        let capacity = self.clone();
        (fitting, Reservation { capacity, size })
    }

    /// Whether `all` of a namespace in use would fit, if the `own` part that it holds were gone.
    pub(super) fn would_fit(&self, all: IndexSize, own: IndexSize, config: &ReplicaConfig) -> bool {
        let usage = self.usage.lock();
        let others = Usage {
            held: usage.held.saturating_sub(own),
            reserved: usage.reserved,
        };
        all.is_within(others.left(config))
    }

    /// Gives back the `own` capacity of a namespace in use, which `empty` empties.
    pub(super) fn give_back(&self, own: IndexSize, empty: impl FnOnce()) {
        let mut usage = self.usage.lock();
        empty();
        usage.held = usage.held.saturating_sub(own);
    }
}

impl Reservation {
    /// Installs what the capacity was reserved for. Its size counts as held from now on.
    pub(super) fn fill(mut self, install: impl FnOnce()) {
        let capacity = self.capacity.clone();
        let mut usage = capacity.usage.lock();
        install();
        let size = std::mem::take(&mut self.size);
        usage.held += size;
        usage.reserved = usage.reserved.saturating_sub(size);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.size != IndexSize::default() {
            let mut usage = self.capacity.usage.lock();
            usage.reserved = usage.reserved.saturating_sub(self.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(tokens: u64) -> IndexSize {
        IndexSize {
            tokens,
            bytes: tokens * 8,
        }
    }

    fn info(segment: u64, tokens: u64) -> SegmentInfo {
        SegmentInfo {
            segment,
            words: tokens * 2,
            tokens,
            masked: Vec::new(),
        }
    }

    fn limited(namespace_tokens_max: u64, bytes_max: u64) -> ReplicaConfig {
        ReplicaConfig {
            namespace_tokens_max,
            bytes_max,
            ..ReplicaConfig::default()
        }
    }

    fn numbers(segments: &[SegmentInfo]) -> Vec<u64> {
        segments.iter().map(|info| info.segment).collect()
    }

    #[test]
    fn the_newest_segments_that_fit_are_reserved() {
        let segments = vec![info(1, 50), info(2, 400), info(3, 500)];
        let taken = |used: u64, config: &ReplicaConfig| {
            let capacity = Arc::new(Capacity::default());
            capacity.recount(|| size(used));
            numbers(&capacity.reserve(segments.clone(), config).0)
        };
        assert_eq!(taken(0, &limited(950, 950 * 8)), [1, 2, 3]);
        assert_eq!(taken(0, &limited(949, 950 * 8)), [2, 3]);
        assert_eq!(taken(0, &limited(950, 899 * 8)), [3]);
        assert_eq!(taken(0, &limited(499, 950 * 8)), [0u64; 0]);
        // Other namespaces hold a part.
        assert_eq!(taken(100, &limited(4_000, 1_000 * 8)), [2, 3]);
        assert_eq!(taken(10_000, &limited(4_000, 1_000 * 8)), [0u64; 0]);
    }

    #[test]
    fn a_reservation_counts_until_it_is_filled_or_dropped() {
        let (capacity, config) = (Arc::new(Capacity::default()), limited(4_000, 1_000 * 8));
        let take = || capacity.reserve(vec![info(1, 300), info(2, 400)], &config);
        let (first, reserved) = take();
        assert_eq!(numbers(&first), [1, 2]);
        // The second does not fit beside the first, which is still being fetched.
        let (second, none) = take();
        assert_eq!(numbers(&second), [0u64; 0]);
        drop(none);
        assert_eq!(capacity.recount(IndexSize::default), size(700));
        // A filled reservation is held, and no longer reserved.
        reserved.fill(|| {});
        assert_eq!(numbers(&take().0), [0u64; 0]);
        assert_eq!(capacity.recount(|| size(200)), IndexSize::default());
        // A dropped reservation is gone.
        drop(take());
        assert_eq!(numbers(&take().0), [1, 2]);
    }

    #[test]
    fn slack_is_a_tenth_and_further_tokens_take_the_same_bytes() {
        assert_eq!(size(1_000).with_slack(), size(1_100));
        assert_eq!(size(1_000).of_more(30), size(30));
        assert_eq!(IndexSize::default().of_more(30).bytes, 0);
    }

    #[test]
    fn a_namespace_fits_where_the_others_leave_capacity() {
        let (capacity, config) = (Arc::new(Capacity::default()), limited(4_000, 1_000 * 8));
        capacity.recount(|| size(900));
        assert!(!capacity.would_fit(size(700), size(500), &config));
        assert!(capacity.would_fit(size(600), size(500), &config));
        assert!(!capacity.would_fit(size(600), size(500), &limited(599, 1_000 * 8)));
        let (_, reserved) = capacity.reserve(vec![info(1, 50)], &config);
        assert!(!capacity.would_fit(size(600), size(500), &config));
        capacity.give_back(size(500), || {});
        drop(reserved);
        assert_eq!(
            numbers(&capacity.reserve(vec![info(1, 600)], &config).0),
            [1]
        );
    }
}
