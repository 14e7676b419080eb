//! Counts of what the pool did. They only grow.

use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::BlockSource;

/// A count that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds to the count, and returns what it was before.
    pub(crate) fn add(&self, number: u64) -> u64 {
        self.0.fetch_add(number, Ordering::Relaxed)
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts of the pool so far, in blocks.
#[derive(Debug, Default)]
pub(crate) struct PoolCounts {
    /// Blocks of this engine's sessions that were taken into the pool.
    pub(crate) stored: Count,
    /// Blocks that sessions took, by the place where they came from.
    hits: [Count; 3],
    /// Full blocks of opening sessions' texts that neither a session nor the pool had.
    pub(crate) misses: Count,
    pub(crate) evicted_from_memory: Count,
    pub(crate) evicted_from_file: Count,
    /// Blocks in the file, or from other engines, that were not what they should be.
    pub(crate) damaged: Count,
    /// Blocks that other engines sent.
    pub(crate) fetched: Count,
    /// Blocks that were sent to other engines.
    pub(crate) served: Count,
    /// Calls of other engines that failed.
    pub(crate) failed_fetches: Count,
    /// Blocks that could not be written.
    pub(crate) failed_writes: Count,
    /// Blocks that were not written because too many waited.
    pub(crate) refused_writes: Count,
    /// Loads that were not begun because too many ran.
    pub(crate) refused_loads: Count,
    /// Questions of other engines that found too many others.
    pub(crate) refused_serves: Count,
}

impl PoolCounts {
    pub(crate) fn hits_of(&self, source: BlockSource) -> &Count {
        &self.hits[source as usize]
    }
}

/// How much the pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolSizes {
    pub(crate) memory_blocks: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) file_blocks: u64,
    pub(crate) file_bytes: u64,
    /// Blocks that wait to be written to the file.
    pub(crate) writes_waiting: u64,
}
