//! Shards of the draft store, and the directory of their replicas.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::NamespaceId;

/// The shard of a namespace among `shards`, by rendezvous hashing: the shard with the highest hash has it. One shard
/// more takes an equal part of each other shard's namespaces, and moves no others.
pub fn shard_of(namespace: NamespaceId, shards: u32) -> u32 {
    let bytes = namespace.0.to_be_bytes();
    let by_weight = |shard: &u32| xxh3_64_with_seed(&bytes, u64::from(*shard));
    (0..shards).max_by_key(by_weight).unwrap_or(0)
}

/// A replica of a shard, as it last said of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaEntry {
    /// Base URL of its listener.
    pub url: String,
    /// Number of its shard.
    pub shard: u32,
    /// Whether it may serve: it has caught up with its stream.
    pub is_ready: bool,
    /// Sequence of the last message of the stream that it has applied.
    pub sequence: u64,
    /// Messages of the stream that it has not applied.
    pub lag: u64,
}

/// The replicas that a replica has heard of lately, and itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreDirectory {
    /// Number of shards.
    pub shards: u32,
    /// Number of the shard of the replica that answers.
    pub shard: u32,
    /// Whether the replica that answers may serve.
    pub is_ready: bool,
    /// The replicas, in the order of their URLs.
    pub replicas: Vec<ReplicaEntry>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_shard_more_takes_namespaces_only_for_itself() {
        let namespaces = (0..3_000u128).map(|number| NamespaceId(number << 64 | number));
        let mut counts = [0; 4];
        for namespace in namespaces {
            let (three, four) = (shard_of(namespace, 3), shard_of(namespace, 4));
            assert!(four == three || four == 3);
            counts[four as usize] += 1;
        }
        assert!(
            counts.iter().all(|count| (650..850).contains(count)),
            "{counts:?}"
        );
        assert_eq!(shard_of(NamespaceId(7), 1), 0);
    }
}
