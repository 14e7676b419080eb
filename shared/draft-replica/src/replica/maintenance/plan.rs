//! The choice of the next maintenance job: a pure function of the sizes of the indexes.

use std::time::{Duration, Instant};

use crate::config::ReplicaConfig;

/// The properties of an index that the choice depends on.
#[derive(Clone, Debug, Default)]
pub(super) struct IndexView {
    pub(super) live_tokens: u64,
    /// Tokens of live outputs that ended.
    pub(super) sealable_tokens: u64,
    /// When it was sealed last.
    pub(super) sealed_at: Option<Instant>,
    pub(super) needs_rebuild: bool,
    pub(super) segments: usize,
    /// Positions of the segments that the index's merge policy wants merged.
    pub(super) merge: Option<Vec<usize>>,
}

/// A job on one index, which runs off the lock on a blocking thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Moves ended outputs from the live part to a segment.
    Seal,
    /// Frees the memory of documents that were removed from the live part.
    Rebuild,
    /// Makes one segment of those at these positions.
    Merge(Vec<usize>),
}

impl Job {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Job::Seal => "seal",
            Job::Rebuild => "rebuild",
            Job::Merge(_) => "merge",
        }
    }
}

/// Segments of one index from which on merging comes before sealing. A search looks into each segment, and while
/// outputs arrive faster than segments are built there is always something to seal.
const SEGMENTS_PRESSING: usize = 8;

/// The next job and the position of its index, if anything is due.
///
/// Sealing comes before the rest, since the live part takes several times the memory of a segment. A seal rebuilds
/// the live part as well.
pub(super) fn next_job(
    views: &[IndexView],
    config: &ReplicaConfig,
    now: Instant,
) -> Option<(usize, Job)> {
    let is_pressing = |view: &IndexView| view.segments >= SEGMENTS_PRESSING;
    next_merge(views, is_pressing)
        .or_else(|| next_seal(views, config, now).map(|at| (at, Job::Seal)))
        .or_else(|| {
            let at = views.iter().position(|view| view.needs_rebuild)?;
            Some((at, Job::Rebuild))
        })
        .or_else(|| next_merge(views, |_| true))
}

/// A merge in the index that has most segments.
fn next_merge(views: &[IndexView], is_wanted: impl Fn(&IndexView) -> bool) -> Option<(usize, Job)> {
    let candidates = views.iter().enumerate().filter(|(_, view)| is_wanted(view));
    let (at, positions) = candidates
        .filter_map(|(at, view)| Some((at, view.merge.as_ref()?)))
        .max_by_key(|(at, _)| views[*at].segments)?;
    Some((at, Job::Merge(positions.clone())))
}

/// The index with most to seal, if that is enough for a segment.
///
/// Less is enough where all live parts together are too large, unless the index was sealed a moment ago: segments of
/// a few tokens each would have to be merged again and again.
fn next_seal(views: &[IndexView], config: &ReplicaConfig, now: Instant) -> Option<usize> {
    let live: u64 = views.iter().map(|view| view.live_tokens).sum();
    let is_crowded = live > config.live_tokens_max;
    let rest = Duration::from_millis(config.seal_after_ms);
    let is_due = |view: &IndexView| {
        let has_rested = view
            .sealed_at
            .is_none_or(|at| now.saturating_duration_since(at) >= rest);
        view.sealable_tokens >= config.seal_tokens || is_crowded && has_rested
    };
    views
        .iter()
        .enumerate()
        .filter(|(_, view)| view.sealable_tokens > 0 && is_due(view))
        .max_by_key(|(_, view)| view.sealable_tokens)
        .map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ReplicaConfig {
        ReplicaConfig {
            seal_tokens: 100,
            live_tokens_max: 150,
            seal_after_ms: 1000,
            ..ReplicaConfig::default()
        }
    }

    fn live(live_tokens: u64, sealable_tokens: u64) -> IndexView {
        IndexView {
            live_tokens,
            sealable_tokens,
            ..IndexView::default()
        }
    }

    fn segments(segments: usize) -> IndexView {
        IndexView {
            segments,
            merge: Some((0..segments).collect()),
            ..IndexView::default()
        }
    }

    #[test]
    fn nothing_is_due_below_the_limits() {
        let views = [live(99, 99), live(51, 0)];
        assert_eq!(next_job(&views, &config(), Instant::now()), None);
    }

    #[test]
    fn the_index_with_most_that_ended_is_sealed_first() {
        let now = Instant::now();
        // Tokens of running outputs do not count, however many they are.
        let views = [live(100, 100), live(500, 120), live(900, 99)];
        assert_eq!(next_job(&views, &config(), now), Some((1, Job::Seal)));
    }

    #[test]
    fn small_ones_are_sealed_for_capacity_but_not_again_and_again() {
        let now = Instant::now();
        let mut views = [live(60, 40), live(60, 50), live(60, 0)];
        assert_eq!(next_job(&views, &config(), now), Some((1, Job::Seal)));
        views[1].sealed_at = Some(now);
        assert_eq!(next_job(&views, &config(), now), Some((0, Job::Seal)));
        views[0].sealed_at = Some(now);
        assert_eq!(next_job(&views, &config(), now), None);
        let later = now + Duration::from_millis(1000);
        assert_eq!(next_job(&views, &config(), later), Some((1, Job::Seal)));
    }

    #[test]
    fn merges_wait_for_seals_unless_they_press() {
        let now = Instant::now();
        let worn = IndexView {
            needs_rebuild: true,
            ..IndexView::default()
        };
        let merge = |at, segments| Some((at, Job::Merge((0..segments).collect())));
        let mut views = vec![segments(4), segments(5), worn, live(100, 100)];
        assert_eq!(next_job(&views, &config(), now), Some((3, Job::Seal)));
        views.pop();
        assert_eq!(next_job(&views, &config(), now), Some((2, Job::Rebuild)));
        views.pop();
        assert_eq!(next_job(&views, &config(), now), merge(1, 5));
        views.extend([live(100, 100), segments(SEGMENTS_PRESSING)]);
        assert_eq!(
            next_job(&views, &config(), now),
            merge(3, SEGMENTS_PRESSING)
        );
    }
}
