//! Metrics of the replica and of the upload.

use refrain_suffix_index::IndexSizes;

/// Values of the label `unit` of evictions.
pub(crate) const NAMESPACE: &str = "namespace";
pub(crate) const GROUP: &str = "group";
pub(crate) const DOCUMENT: &str = "document";

/// Values of the label `limit` of what is left out of groups.
pub(crate) const GROUPS_MAX: &str = "groups_max";
pub(crate) const GROUP_TOKENS_MAX: &str = "group_tokens_max";
pub(crate) const GROUPS_TOKENS_MAX: &str = "groups_tokens_max";

/// Values of the label `outcome` of pulls.
pub(crate) const DONE: &str = "done";
pub(crate) const FAILED: &str = "failed";

/// Buckets of the lag of groups, from 10 milliseconds to 10 seconds.
const LAG_BUCKETS: &[f64] = &[0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0];

/// Buckets of the times for which an index is locked, from 10 microseconds to a tenth of a second.
const LOCK_BUCKETS: &[f64] = &[
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1,
];

refrain_service_kit::metric_families! {
    /// Collectors of namespaces and groups. A clone shares them.
    #[derive(Clone)]
    pub struct ReplicaMetrics {
        /// Tokens that requests can draft from.
        tokens: IntGauge = "refrain_replica_tokens",
        /// Memory of all indexes, live parts and segments together.
        bytes: IntGauge = "refrain_replica_bytes",
        /// Documents that requests can draft from.
        documents: IntGauge = "refrain_replica_documents",
        /// Tokens of live parts: of outputs that run, and of outputs not sealed yet.
        live_tokens: IntGauge = "refrain_replica_live_tokens",
        /// Memory of the live parts of indexes.
        live_bytes: IntGauge = "refrain_replica_live_bytes",
        /// Tokens of segments that requests can draft from.
        sealed_tokens: IntGauge = "refrain_replica_sealed_tokens",
        /// Memory of the segments of indexes.
        segment_bytes: IntGauge = "refrain_replica_segment_bytes",
        /// Segments of all indexes.
        segments: IntGauge = "refrain_replica_segments",
        /// Namespaces that are followed.
        pub(crate) namespaces: IntGauge = "refrain_replica_namespaces",
        /// Evictions for want of capacity: of whole namespaces, or of documents of a namespace that stays.
        pub(crate) evictions: IntCounterVec =
            "refrain_replica_evictions_total" ["unit"] with [NAMESPACE, DOCUMENT],
        /// Seals, merges and rebuilds of indexes.
        pub(crate) jobs: IntCounterVec = "refrain_replica_jobs_total" ["job"] with ["seal", "merge", "rebuild"],
        /// Time that an index was locked at the beginning or the end of a job.
        pub(crate) lock_seconds: HistogramVec = "refrain_replica_lock_seconds" ["job"] in LOCK_BUCKETS,
        /// Calls for the news of all namespaces and of the groups that run here.
        pub(crate) pulls: IntCounterVec =
            "refrain_replica_pulls_total" ["outcome"] with [DONE, FAILED],
        /// Calls for the draft store's news or segments that failed.
        pub(crate) follow_failures: IntCounter = "refrain_replica_follow_failures_total",
        /// Times that a namespace is followed at another replica of the draft store.
        pub(crate) moves: IntCounter = "refrain_replica_moves_total",
        /// Attempts to take over the draft store's segments of a namespace, by outcome.
        pub(crate) take_overs: IntCounterVec =
            "refrain_replica_take_overs_total" ["outcome"] with ["done", "nothing", "failed"],
        /// Bytes of segments that were taken over from the draft store.
        pub(crate) take_over_bytes: IntCounter = "refrain_replica_take_over_bytes_total",
        /// Groups of samples with a tree of their own.
        pub(crate) groups: IntGauge = "refrain_replica_groups",
        /// Tokens of groups' trees.
        pub(crate) group_tokens: IntGauge = "refrain_replica_group_tokens",
        /// Memory of groups' trees.
        pub(crate) group_bytes: IntGauge = "refrain_replica_group_bytes",
        /// Evictions of groups for want of capacity: of whole groups, or of documents of a group that stays.
        pub(crate) group_evictions: IntCounterVec =
            "refrain_replica_group_evictions_total" ["unit"] with [GROUP, DOCUMENT],
        /// Requests that drafted without their group, and updates of outputs that were left out of it.
        pub(crate) group_rejections: IntCounterVec =
            "refrain_replica_group_rejections_total" ["limit"] with [GROUPS_MAX, GROUP_TOKENS_MAX, GROUPS_TOKENS_MAX],
        /// Groups whose logs are read, since requests of them run here.
        pub(crate) groups_followed: IntGauge = "refrain_replica_groups_followed",
        /// Tokens of samples on other workers that the logs of groups brought.
        pub(crate) group_tokens_received: IntCounter = "refrain_replica_group_tokens_received_total",
        /// Time from when another worker emitted the oldest token of a log's newest ones until requests here could
        /// draft from it.
        pub(crate) group_lag_seconds: Histogram = "refrain_replica_group_lag_seconds" in LAG_BUCKETS,
    }
}

refrain_service_kit::metric_families! {
    /// Collectors of the upload. A clone shares them.
    #[derive(Clone)]
    pub struct UploaderMetrics {
        /// Output tokens held for the draft store: not acknowledged yet, or of outputs that still run.
        pub(crate) pending_tokens: IntGauge = "refrain_upload_pending_tokens",
        /// Output tokens that never reached the draft store.
        pub(crate) dropped_tokens: IntCounter = "refrain_upload_dropped_tokens_total",
        /// Output tokens that the draft store dropped, since a newer attempt at their output had been stored.
        pub(crate) fenced_tokens: IntCounter = "refrain_upload_fenced_tokens_total",
        /// Messages that the draft store did not accept.
        pub(crate) failures: IntCounter = "refrain_upload_failures_total",
    }
}

impl ReplicaMetrics {
    /// Sets the sizes of all namespaces together.
    pub(crate) fn set_index_sizes(&self, sizes: &IndexSizes) {
        let tokens = sizes.live_tokens + sizes.segment_tokens;
        self.tokens.set(tokens as i64);
        self.bytes
            .set((sizes.live_bytes + sizes.segment_bytes) as i64);
        self.documents
            .set((sizes.live_documents + sizes.segment_documents) as i64);
        self.live_tokens.set(sizes.live_tokens as i64);
        self.live_bytes.set(sizes.live_bytes as i64);
        self.sealed_tokens.set(sizes.segment_tokens as i64);
        self.segment_bytes.set(sizes.segment_bytes as i64);
        self.segments.set(sizes.segments as i64);
    }
}
