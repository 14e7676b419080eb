//! What there is room for: what namespaces hold, and what is on its way to them, within the limits of all together.
//!
//! Its lock comes before those of drafts, which are taken while it is held; nobody asks it for anything while drafts are
//! locked.

use std::ops::{Add, AddAssign};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use refrain_protocol::segment::SegmentInfo;

use crate::config::MemoryConfig;

/// Tokens, and the bytes that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) tokens: u64,
    pub(super) bytes: u64,
}

/// What the namespaces that are in use hold together, and what is being fetched for any. The others go where a new one
/// wants their place.
#[derive(Default)]
pub(super) struct Room {
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    used: Size,
    coming: Size,
}

/// When a namespace that is left out in part is looked at again. Each time that taking it over ended in its being let go
/// once more, twice as late: a limit that is met only while nobody runs anything is met again and again.
#[derive(Debug)]
pub(super) struct Retry {
    since: Instant,
    /// In a row that did not last.
    times: u32,
}

/// A pause is at most so many times doubled.
const DOUBLED_MAX: u32 = 6;

impl Retry {
    pub(super) fn new(now: Instant) -> Self {
        Retry {
            since: now,
            times: 0,
        }
    }

    /// Whether it is time to look.
    pub(super) fn is_due(&mut self, lacks_room: bool, pause: Duration, now: Instant) -> bool {
        let pause = pause.saturating_mul(1 << self.times.min(DOUBLED_MAX));
        if now.saturating_duration_since(self.since) < pause {
            return false;
        }
        if !lacks_room {
            self.times = 0;
        }
        lacks_room
    }

    /// It was looked at in vain.
    pub(super) fn looked(&mut self, now: Instant) {
        self.since = now;
    }

    /// All of it was taken over again.
    pub(super) fn taken(&mut self, now: Instant) {
        self.since = now;
        self.times = self.times.saturating_add(1);
    }
}

/// Room that is kept for what is being fetched, until it is here or given up.
pub(super) struct Reservation {
    room: Arc<Room>,
    size: Size,
}

impl Size {
    /// What the limits allow all namespaces together.
    pub(super) fn limit(config: &MemoryConfig) -> Self {
        Size {
            tokens: config.tokens_max,
            bytes: config.bytes_max,
        }
    }

    /// Of segments of the store.
    pub(super) fn of_segments(segments: &[SegmentInfo]) -> Self {
        segments.iter().fold(Size::default(), |sum, info| {
            sum + Size {
                tokens: info.tokens,
                bytes: info.words.saturating_mul(4),
            }
        })
    }

    /// What so many tokens more take, if they are as those of this.
    pub(super) fn of_more(self, tokens: u64) -> Self {
        let bytes = u128::from(self.bytes) * u128::from(tokens) / u128::from(self.tokens.max(1));
        Size {
            tokens,
            bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
        }
    }

    /// A tenth more: what is mounted takes more than its files, and grows before anybody looks again.
    pub(super) fn with_slack(self) -> Self {
        self + Size {
            tokens: self.tokens / 10,
            bytes: self.bytes / 10,
        }
    }

    /// What is left of it.
    pub(super) fn less(self, other: Size) -> Self {
        Size {
            tokens: self.tokens.saturating_sub(other.tokens),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }

    /// Whether it is no more than the other in either.
    pub(super) fn is_within(self, other: Size) -> bool {
        self.tokens <= other.tokens && self.bytes <= other.bytes
    }
}

impl Add for Size {
    type Output = Size;

    fn add(self, other: Size) -> Size {
        Size {
            tokens: self.tokens.saturating_add(other.tokens),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl AddAssign for Size {
    fn add_assign(&mut self, other: Size) {
        *self = *self + other;
    }
}

impl Held {
    /// What one namespace may take.
    fn left(&self, config: &MemoryConfig) -> Size {
        let left = Size::limit(config).less(self.used + self.coming);
        Size {
            tokens: left.tokens.min(config.namespace_tokens_max),
            ..left
        }
    }
}

impl Room {
    /// Counts anew what is used; answers what is coming. Nothing arrives meanwhile.
    pub(super) fn recount(&self, count: impl FnOnce() -> Size) -> Size {
        let mut held = self.lock();
        held.used = count();
        held.coming
    }

    /// The newest segments that there is room for, oldest first, and that room. What is left out, eviction would take
    /// first.
    pub(super) fn reserve(
        self: &Arc<Self>,
        mut segments: Vec<SegmentInfo>,
        config: &MemoryConfig,
    ) -> (Vec<SegmentInfo>, Reservation) {
        let mut held = self.lock();
        let left = held.left(config);
        let mut taken = Size::default();
        let fits = |info: &&SegmentInfo| {
            taken += Size::of_segments(std::slice::from_ref(*info));
            taken.is_within(left)
        };
        let count = segments.iter().rev().take_while(fits).count();
        let wanted = segments.split_off(segments.len() - count);
        let size = Size::of_segments(&wanted);
        held.coming += size;
        let room = self.clone();
        (wanted, Reservation { room, size })
    }

    /// Whether a namespace in use would have room for so much, if what it holds were gone.
    pub(super) fn would_fit(&self, all: Size, own: Size, config: &MemoryConfig) -> bool {
        let held = self.lock();
        let others = Held {
            used: held.used.less(own),
            coming: held.coming,
        };
        all.is_within(others.left(config))
    }

    /// A namespace in use lets go of what it holds.
    pub(super) fn leave(&self, own: Size, forget: impl FnOnce()) {
        let mut held = self.lock();
        forget();
        held.used = held.used.less(own);
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Reservation {
    /// It is here from now on: what is installed counts as used until it is counted anew.
    pub(super) fn arrive(mut self, install: impl FnOnce()) {
        let room = self.room.clone();
        let mut held = room.lock();
        install();
        let size = std::mem::take(&mut self.size);
        held.used += size;
        held.coming = held.coming.less(size);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.size != Size::default() {
            let mut held = self.room.lock();
            held.coming = held.coming.less(self.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(tokens: u64) -> Size {
        Size {
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

    fn limited(namespace_tokens_max: u64, bytes_max: u64) -> MemoryConfig {
        MemoryConfig {
            namespace_tokens_max,
            bytes_max,
            ..MemoryConfig::default()
        }
    }

    fn numbers(wanted: &[SegmentInfo]) -> Vec<u64> {
        wanted.iter().map(|info| info.segment).collect()
    }

    #[test]
    fn the_newest_segments_that_fit_are_taken() {
        let segments = vec![info(1, 50), info(2, 400), info(3, 500)];
        let taken = |used: u64, config: &MemoryConfig| {
            let room = Arc::new(Room::default());
            room.recount(|| size(used));
            numbers(&room.reserve(segments.clone(), config).0)
        };
        assert_eq!(taken(0, &limited(950, 950 * 8)), [1, 2, 3]);
        assert_eq!(taken(0, &limited(949, 950 * 8)), [2, 3]);
        assert_eq!(taken(0, &limited(950, 899 * 8)), [3]);
        assert_eq!(taken(0, &limited(499, 950 * 8)), [0u64; 0]);
        // What others hold is not there to be taken.
        assert_eq!(taken(100, &limited(4_000, 1_000 * 8)), [2, 3]);
        assert_eq!(taken(10_000, &limited(4_000, 1_000 * 8)), [0u64; 0]);
    }

    #[test]
    fn what_is_coming_counts_from_when_it_is_wanted() {
        let (room, config) = (Arc::new(Room::default()), limited(4_000, 1_000 * 8));
        let take = || room.reserve(vec![info(1, 300), info(2, 400)], &config);
        let (first, reserved) = take();
        assert_eq!(numbers(&first), [1, 2]);
        // The second has no room beside the first, which is still on its way.
        let (second, none) = take();
        assert_eq!(numbers(&second), [0u64; 0]);
        drop(none);
        assert_eq!(room.recount(Size::default), size(700));
        // Once it is here it is used, and no longer coming.
        reserved.arrive(|| {});
        assert_eq!(numbers(&take().0), [0u64; 0]);
        assert_eq!(room.recount(|| size(200)), Size::default());
        // What is given up is no longer coming, either.
        drop(take());
        assert_eq!(numbers(&take().0), [1, 2]);
    }

    #[test]
    fn what_is_let_go_again_and_again_is_taken_over_ever_more_seldom() {
        let (start, pause) = (Instant::now(), Duration::from_secs(60));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut retry = Retry::new(start);
        assert!(!retry.is_due(true, pause, at(59)) && !retry.is_due(false, pause, at(60)));
        assert!(retry.is_due(true, pause, at(60)));
        // Looking alone makes it no rarer.
        retry.looked(at(60));
        assert!(!retry.is_due(true, pause, at(119)) && retry.is_due(true, pause, at(120)));
        let mut now = 120;
        for factor in [2, 4, 8, 16, 32, 64, 64] {
            retry.taken(at(now));
            assert!(!retry.is_due(true, pause, at(now + 60 * factor - 1)));
            now += 60 * factor;
            assert!(retry.is_due(true, pause, at(now)), "{factor}");
        }
        // Once it stayed for as long, it is as at first.
        retry.taken(at(now));
        assert!(!retry.is_due(false, pause, at(now + 60 * 64)));
        assert!(retry.is_due(true, pause, at(now + 60 * 64)));
    }

    #[test]
    fn slack_is_a_tenth_and_more_tokens_are_as_those_that_are_there() {
        assert_eq!(size(1_000).with_slack(), size(1_100));
        assert_eq!(size(1_000).of_more(30), size(30));
        assert_eq!(Size::default().of_more(30).bytes, 0);
    }

    #[test]
    fn a_namespace_fits_where_the_others_leave_room() {
        let (room, config) = (Arc::new(Room::default()), limited(4_000, 1_000 * 8));
        room.recount(|| size(900));
        assert!(!room.would_fit(size(700), size(500), &config));
        assert!(room.would_fit(size(600), size(500), &config));
        assert!(!room.would_fit(size(600), size(500), &limited(599, 1_000 * 8)));
        let (_, reserved) = room.reserve(vec![info(1, 50)], &config);
        assert!(!room.would_fit(size(600), size(500), &config));
        room.leave(size(500), || {});
        drop(reserved);
        assert_eq!(numbers(&room.reserve(vec![info(1, 600)], &config).0), [1]);
    }
}
