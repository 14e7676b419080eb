//! The metrics of the pool.

use prometheus::IntCounter;
use refrain_service_kit::telemetry::Metrics;

use crate::pool::{BlockSource, KvPool};

refrain_service_kit::metric_families! {
    /// The families of an engine's pool of KV blocks.
    struct PoolFamilies {
        /// Blocks that the pool holds.
        blocks: IntGaugeVec = "refrain_engine_kv_pool_blocks" ["tier"],
        /// Bytes that these blocks take.
        bytes: IntGaugeVec = "refrain_engine_kv_pool_bytes" ["tier"],
        /// Blocks that wait to be written to the file.
        writes_waiting: IntGauge = "refrain_engine_kv_pool_writes_waiting",
        /// Blocks that sessions took, by where they came from.
        hits: IntCounterVec = "refrain_engine_kv_pool_hits_total" ["source"],
        /// Full blocks of new sessions that the pool did not have.
        misses: IntCounter = "refrain_engine_kv_pool_misses_total",
        /// Blocks that sessions handed in.
        stored: IntCounter = "refrain_engine_kv_pool_stored_total",
        /// Blocks that made room for others.
        evicted: IntCounterVec = "refrain_engine_kv_pool_evicted_total" ["tier"],
        /// Blocks that were damaged in the file or on their way, and were dropped.
        damaged: IntCounter = "refrain_engine_kv_pool_damaged_total",
        /// Blocks that other engines sent.
        fetched: IntCounter = "refrain_engine_kv_pool_fetched_total",
        /// Blocks that were sent to other engines.
        served: IntCounter = "refrain_engine_kv_pool_served_total",
        /// Failed calls to other engines, and failed writes to the file.
        failures: IntCounterVec = "refrain_engine_kv_pool_failures_total" ["of"],
        /// Blocks and calls that were refused at a limit of the pool.
        rejections: IntCounterVec = "refrain_engine_kv_pool_rejections_total" ["limit"],
    }
}

/// The families of a pool.
pub(in crate::service) struct PoolMetrics {
    families: PoolFamilies,
}

impl PoolMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Fails if a name is already registered.
    pub(in crate::service) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        Ok(PoolMetrics {
            families: PoolFamilies::register(metrics.registry())?,
        })
    }

    /// Publishes what the pool holds and has done.
    pub(in crate::service) fn publish(&self, pool: &KvPool) {
        let families = &self.families;
        let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        // The pool's counts only grow, and nothing else adds to the counters.
        let grow = |counter: &IntCounter, count: u64| {
            counter.inc_by(count.saturating_sub(counter.get()));
        };
        let sizes = pool.sizes();
        for (tier, blocks, bytes) in [
            ("memory", sizes.memory_blocks, sizes.memory_bytes),
            ("file", sizes.file_blocks, sizes.file_bytes),
        ] {
            families
                .blocks
                .with_label_values(&[tier])
                .set(gauge(blocks));
            families.bytes.with_label_values(&[tier]).set(gauge(bytes));
        }
        families.writes_waiting.set(gauge(sizes.writes_waiting));
        let counts = pool.counts();
        for source in BlockSource::ALL {
            let hits = families.hits.with_label_values(&[source.as_str()]);
            grow(&hits, counts.hits_of(source).get());
        }
        for (counter, count) in [
            (&families.misses, &counts.misses),
            (&families.stored, &counts.stored),
            (&families.damaged, &counts.damaged),
            (&families.fetched, &counts.fetched),
            (&families.served, &counts.served),
        ] {
            grow(counter, count.get());
        }
        for (family, label, count) in [
            (&families.evicted, "memory", &counts.evicted_from_memory),
            (&families.evicted, "file", &counts.evicted_from_file),
            (&families.failures, "peer", &counts.failed_fetches),
            (&families.failures, "file", &counts.failed_writes),
            (&families.rejections, "writes", &counts.refused_writes),
            (&families.rejections, "loads", &counts.refused_loads),
            (&families.rejections, "answers", &counts.refused_serves),
        ] {
            grow(&family.with_label_values(&[label]), count.get());
        }
    }
}
