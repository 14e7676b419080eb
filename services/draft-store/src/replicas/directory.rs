//! The directory: the replicas that this one has heard of (`announce.rs`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::shard::{ReplicaEntry, StoreDirectory};

/// A replica that was silent for this long is not listed.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Most replicas that are remembered. More than any mesh has, and a bound to what strangers may send.
const REPLICAS_MAX: usize = 1_024;

/// The replicas that this one has heard of.
#[derive(Default)]
pub(crate) struct Directory {
    heard: Mutex<BTreeMap<String, (ReplicaEntry, Instant)>>,
}

impl Directory {
    pub(crate) fn hear(&self, entry: ReplicaEntry, now: Instant) {
        let mut heard = self.heard.lock();
        heard.retain(|_, (_, at)| now.saturating_duration_since(*at) < SILENCE_MAX);
        if heard.len() < REPLICAS_MAX {
            heard.insert(entry.url.clone(), (entry, now));
        }
    }

    fn entries(&self, now: Instant) -> Vec<ReplicaEntry> {
        let heard = self.heard.lock();
        let lately = heard
            .values()
            .filter(|(_, at)| now.saturating_duration_since(*at) < SILENCE_MAX);
        lately.map(|(entry, _)| entry.clone()).collect()
    }

    /// The URLs of the replicas of a shard.
    pub(crate) fn urls(&self, shard: u32) -> Vec<String> {
        let mut entries = self.entries(Instant::now());
        entries.retain(|entry| entry.shard == shard);
        entries.into_iter().map(|entry| entry.url).collect()
    }

    /// The directory with this replica as it is now.
    pub(crate) fn list(&self, own: ReplicaEntry, shards: u32) -> StoreDirectory {
        let (shard, is_ready) = (own.shard, own.is_ready);
        let mut replicas = self.entries(Instant::now());
        replicas.retain(|entry| entry.url != own.url);
        if !own.url.is_empty() {
            replicas.push(own);
        }
        replicas.sort_by(|a, b| a.url.cmp(&b.url));
        StoreDirectory {
            shards,
            shard,
            is_ready,
            replicas,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(url: &str, sequence: u64) -> ReplicaEntry {
        ReplicaEntry {
            url: url.into(),
            shard: 0,
            is_ready: true,
            sequence,
            lag: 0,
        }
    }

    #[test]
    fn silent_replicas_are_not_listed_and_the_own_entry_is_fresh() {
        let directory = Directory::default();
        let now = Instant::now();
        directory.hear(entry("http://gone", 1), now - 2 * SILENCE_MAX);
        directory.hear(entry("http://b", 5), now);
        directory.hear(entry("http://a", 3), now);
        let list = directory.list(entry("http://a", 9), 2);
        let listed: Vec<_> = list
            .replicas
            .iter()
            .map(|entry| (entry.url.as_str(), entry.sequence))
            .collect();
        assert_eq!(listed, [("http://a", 9), ("http://b", 5)]);
        assert_eq!(directory.list(entry("", 9), 2).replicas.len(), 2);
        assert_eq!(directory.urls(0), ["http://a", "http://b"]);
        assert!(directory.urls(1).is_empty());
    }
}
