//! The replicas as a caller sees them, and its choice among those of a shard. No I/O, and the time is a parameter.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use refrain_protocol::shard::StoreDirectory;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Pause after the first failure, and the longest one.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_LONGEST: Duration = Duration::from_secs(15);

/// How long a nearer replica has to be well before the caller goes back to it.
const STEADY: Duration = Duration::from_secs(30);

/// A replica that no directory has named for so long is forgotten, unless the configuration names it.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Replicas count as equally near whose calls take at most this many times as long as those of the nearest one,
const NEAR_FACTOR: f64 = 2.0;
/// and this much longer.
const NEAR_SLACK: Duration = Duration::from_millis(1);

/// Most replicas that are remembered.
const REPLICAS_MAX: usize = 1_024;

/// The share of a new round trip in the mean.
const ROUND_TRIP_WEIGHT: f64 = 0.2;

/// A replica as its caller sees it.
#[derive(Clone, Debug)]
struct Seen {
    is_configured: bool,
    named_at: Instant,
    /// Its shard; `None` until it is known.
    shard: Option<u32>,
    /// Since when it has answered that it may serve.
    well_since: Option<Instant>,
    /// Mean time of a call, in seconds.
    round_trip_s: Option<f64>,
    failures: u32,
    /// Nobody calls it before this time, unless there is no other.
    away_until: Option<Instant>,
}

impl Seen {
    fn new(is_configured: bool, now: Instant) -> Self {
        Seen {
            is_configured,
            named_at: now,
            shard: None,
            well_since: None,
            round_trip_s: None,
            failures: 0,
            away_until: None,
        }
    }

    fn is_well(&self, now: Instant) -> bool {
        self.well_since.is_some() && self.away_until.is_none_or(|until| until <= now)
    }
}

/// All replicas that a caller knows.
#[derive(Debug)]
pub(super) struct View {
    /// A number of the caller. It spreads callers over replicas that are equally near.
    caller: u64,
    shards: Option<u32>,
    replicas: BTreeMap<String, Seen>,
    /// The replica that each shard's calls go to.
    current: HashMap<u32, String>,
}

impl View {
    pub(super) fn new(caller: u64, configured: &[String], now: Instant) -> Self {
        let configured = configured
            .iter()
            .map(|url| (url.clone(), Seen::new(true, now)));
        View {
            caller,
            shards: None,
            replicas: configured.collect(),
            current: HashMap::new(),
        }
    }

    /// Number of shards; `None` until a replica has answered.
    pub(super) fn shards(&self) -> Option<u32> {
        self.shards
    }

    /// URLs of all known replicas.
    pub(super) fn urls(&self) -> Vec<String> {
        self.replicas.keys().cloned().collect()
    }

    /// Notes that `url` has answered with its directory, after `round_trip`.
    pub(super) fn answered(
        &mut self,
        url: &str,
        directory: &StoreDirectory,
        round_trip: Duration,
        now: Instant,
    ) {
        self.shards = Some(directory.shards.max(1));
        for entry in &directory.replicas {
            let is_new = !self.replicas.contains_key(&entry.url);
            if is_new && self.replicas.len() >= REPLICAS_MAX {
                continue;
            }
            let seen = self.replicas.entry(entry.url.clone());
            let seen = seen.or_insert_with(|| Seen::new(false, now));
            seen.named_at = now;
            seen.shard = Some(entry.shard);
        }
        if let Some(seen) = self.replicas.get_mut(url) {
            seen.named_at = now;
            seen.shard = Some(directory.shard);
            seen.failures = 0;
            seen.away_until = None;
            seen.well_since = match directory.is_ready {
                true => seen.well_since.or(Some(now)),
                false => None,
            };
            let seconds = round_trip.as_secs_f64();
            let mean = seen.round_trip_s.unwrap_or(seconds);
            seen.round_trip_s = Some(mean + ROUND_TRIP_WEIGHT * (seconds - mean));
        }
        self.replicas.retain(|_, seen| {
            seen.is_configured || now.saturating_duration_since(seen.named_at) < FORGET_AFTER
        });
    }

    /// Notes that a call of `url` failed in a way that another replica may do better.
    pub(super) fn failed(&mut self, url: &str, now: Instant) {
        if let Some(seen) = self.replicas.get_mut(url) {
            let pause = PAUSE_FIRST.saturating_mul(1 << seen.failures.min(10));
            seen.failures = seen.failures.saturating_add(1);
            seen.away_until = Some(now + pause.min(PAUSE_LONGEST));
            seen.well_since = None;
        }
    }

    /// The replicas of a shard in the order in which to call them. The first stays the same while it is well.
    pub(super) fn order(&mut self, shard: u32, now: Instant) -> Vec<String> {
        let of_shard = self.replicas.iter();
        let of_shard = of_shard.filter(|(_, seen)| seen.shard == Some(shard));
        let mut order: Vec<(&String, &Seen)> = of_shard.collect();
        let trips = order.iter().filter(|(_, seen)| seen.is_well(now));
        let nearest = trips
            .filter_map(|(_, seen)| seen.round_trip_s)
            .fold(f64::INFINITY, f64::min);
        let near_s = (nearest * NEAR_FACTOR).max(nearest + NEAR_SLACK.as_secs_f64());
        let rank = |url: &str, seen: &Seen| {
            let is_far = seen.round_trip_s.is_none_or(|seconds| seconds > near_s);
            let weight = xxh3_64_with_seed(url.as_bytes(), self.caller);
            (!seen.is_well(now), is_far, u64::MAX - weight)
        };
        order.sort_by_key(|(url, seen)| rank(url, seen));
        let first = order
            .first()
            .map(|(url, seen)| ((*url).clone(), (*seen).clone()));
        let mut urls: Vec<String> = order.iter().map(|(url, _)| (*url).clone()).collect();
        let Some((first, seen)) = first else {
            return urls;
        };
        let is_steady = seen
            .well_since
            .is_some_and(|since| now.saturating_duration_since(since) >= STEADY);
        let current = self.current.get(&shard).filter(|current| {
            let known = self.replicas.get(*current);
            known.is_some_and(|known| known.is_well(now) && known.shard == Some(shard))
        });
        match current {
            Some(current) if !is_steady && *current != first => {
                urls.retain(|url| url != current);
                urls.insert(0, current.clone());
            }
            _ => {
                self.current.insert(shard, first);
            }
        }
        urls
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::shard::ReplicaEntry;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn directory(urls: &[&str], is_ready: bool) -> StoreDirectory {
        let replicas = urls.iter().map(|url| ReplicaEntry {
            url: (*url).into(),
            shard: 0,
            is_ready,
            sequence: 1,
            lag: 0,
        });
        StoreDirectory {
            shards: 1,
            shard: 0,
            is_ready,
            replicas: replicas.collect(),
        }
    }

    /// A caller of two replicas that have answered after these times.
    fn view(caller: u64, trips: [Duration; 2], now: Instant) -> View {
        let mut view = View::new(caller, &["a".into()], now);
        let both = directory(&["a", "b"], true);
        view.answered("a", &both, trips[0], now);
        view.answered("b", &both, trips[1], now);
        view
    }

    #[test]
    fn callers_prefer_the_near_replica_and_spread_over_equal_ones() {
        let now = Instant::now();
        assert_eq!(view(1, [9 * MS, 2 * MS], now).order(0, now), ["b", "a"]);
        assert_eq!(view(1, [2 * MS, 9 * MS], now).order(0, now), ["a", "b"]);
        let on_a = (0..100).filter(|caller| {
            let order = view(*caller, [2 * MS, 3 * MS], now).order(0, now);
            order[0] == "a"
        });
        assert!((30..70).contains(&on_a.count()));
        assert_eq!(
            view(1, [MS, MS], now).order(1, now),
            [""; 0],
            "another shard"
        );
    }

    #[test]
    fn a_replica_that_fails_is_left_and_taken_again_once_it_is_steady() {
        let start = Instant::now();
        let mut view = view(1, [9 * MS, 2 * MS], start);
        assert_eq!(view.order(0, start)[0], "b");
        view.failed("b", start);
        assert_eq!(view.order(0, start), ["a", "b"]);
        let back = start + 5 * PAUSE_FIRST;
        view.answered("b", &directory(&["a", "b"], false), 2 * MS, back);
        assert_eq!(view.order(0, back)[0], "a", "it may not serve yet");
        view.answered("b", &directory(&["a", "b"], true), 2 * MS, back);
        assert_eq!(view.order(0, back)[0], "a", "it is back for a moment only");
        assert_eq!(view.order(0, back + STEADY)[0], "b");
    }

    #[test]
    fn replicas_that_nobody_names_are_forgotten_and_configured_ones_stay() {
        let start = Instant::now();
        let mut view = view(1, [MS, MS], start);
        let later = start + FORGET_AFTER;
        view.answered("a", &directory(&["a"], true), MS, later);
        assert_eq!(view.urls(), ["a"]);
        view.failed("a", later);
        assert_eq!(view.order(0, later), ["a"], "there is no other");
    }
}
