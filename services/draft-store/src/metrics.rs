//! The metrics of the store.

mod labels;

pub(crate) use labels::{Limit, RemovalReason};

use refrain_service_kit::telemetry::Metrics;

/// Bucket bounds from 0.5 ms to 10 s.
const COMMIT_SECONDS_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// How a background job ended.
const JOB_OUTCOMES: [&str; 2] = ["done", "failed"];

refrain_service_kit::metric_families! {
    /// Metrics of the store.
    #[derive(Clone)]
    pub(crate) struct StoreMetrics {
        /// Documents stored.
        pub(crate) documents: IntGauge = "refrain_draft_store_documents",
        /// Output tokens stored.
        pub(crate) tokens: IntGauge = "refrain_draft_store_tokens",
        /// Bytes as stored, without sled's overhead.
        pub(crate) logical_bytes: IntGauge = "refrain_draft_store_logical_bytes",
        /// Bytes of the data directory.
        pub(crate) disk_bytes: IntGauge = "refrain_draft_store_disk_bytes",
        /// Free bytes on the disk of the data directory.
        pub(crate) disk_free_bytes: IntGauge = "refrain_draft_store_disk_free_bytes",
        /// Values too large for the pages of the log's catalogue. Alert unless 0.
        pub(crate) blob_files: IntGauge = "refrain_draft_store_blob_files",
        /// Bytes of the log on disk.
        pub(crate) log_bytes: IntGauge = "refrain_draft_store_log_bytes",
        /// Bytes of live records in the log, per byte of the log on disk.
        pub(crate) live_ratio: Gauge = "refrain_draft_store_live_ratio",
        /// Rewrites of the log that give space back, by outcome.
        pub(crate) rewrites: IntCounterVec =
            "refrain_draft_store_rewrites_total" ["outcome"] with JOB_OUTCOMES,
        /// Bytes on disk given back by rewrites.
        pub(crate) reclaimed_bytes: IntCounter = "refrain_draft_store_reclaimed_bytes_total",
        /// Tokens in the log that are not sealed yet.
        pub(crate) unsealed_tokens: IntGauge = "refrain_draft_store_unsealed_tokens",
        /// Segments in use.
        pub(crate) segments: IntGauge = "refrain_draft_store_segments",
        /// Bytes of the segments in use.
        pub(crate) segment_bytes: IntGauge = "refrain_draft_store_segment_bytes",
        /// Exports in progress.
        pub(crate) exports: IntGauge = "refrain_draft_store_exports",
        /// Bytes of memory held for exports: their lists, and documents put aside for them.
        pub(crate) export_held_bytes: IntGauge = "refrain_draft_store_export_held_bytes",
        /// Bytes of deleted segments whose files are kept for exports.
        pub(crate) export_disk_bytes: IntGauge = "refrain_draft_store_export_disk_bytes",
        /// Segments made, by source (log: sealed, segments: merged) and outcome.
        pub(crate) segments_made: IntCounterVec =
            "refrain_draft_store_segments_made_total" ["from", "outcome"],
        /// Segments whose file was missing or damaged at start.
        pub(crate) segments_lost: IntCounter = "refrain_draft_store_segments_lost_total",
        /// Bytes of segments sent to workers that took them over.
        pub(crate) sent_segment_bytes: IntCounter = "refrain_draft_store_sent_segment_bytes_total",
        /// Seconds from the arrival of an append at the writer until it is durable.
        pub(crate) append_seconds: Histogram =
            "refrain_draft_store_append_seconds" in COMMIT_SECONDS_BUCKETS,
        /// Tokens made durable.
        pub(crate) appended_tokens: IntCounter = "refrain_draft_store_appended_tokens_total",
        /// Tokens of updates that were dropped, since a newer attempt at their document had been stored.
        pub(crate) fenced_tokens: IntCounter = "refrain_draft_store_fenced_tokens_total",
        /// Documents removed, by reason.
        pub(crate) evictions: IntCounterVec = "refrain_draft_store_evictions_total" ["reason"]
            with RemovalReason::LABELS,
        /// Calls refused because a limit was reached, by limit.
        pub(crate) rejections: IntCounterVec = "refrain_draft_store_rejections_total" ["limit"]
            with Limit::LABELS,
        /// Logs moved to quarantine because they could not be read in full.
        pub(crate) quarantines: IntCounter = "refrain_draft_store_quarantines_total",
        /// Quarantine directories with unreadable content. Alert unless 0.
        pub(crate) quarantines_held: IntGauge = "refrain_draft_store_quarantines_held",
        /// Documents lost before the last start, until an operator confirms the loss. Alert unless 0.
        pub(crate) missing_documents: IntGauge = "refrain_draft_store_missing_documents",
        /// Seconds that the wall clock is ahead of the store's time after a jump. Alert unless 0.
        pub(crate) clock_offset_seconds: IntGauge = "refrain_draft_store_clock_offset_seconds",
        /// Damaged records found.
        pub(crate) damaged_records: IntCounter = "refrain_draft_store_damaged_records_total",
        /// Pulls that wait for a change.
        pub(crate) feed_waiters: IntGauge = "refrain_draft_store_feed_waiters",
        /// Groups of samples that are registered.
        pub(crate) groups: IntGauge = "refrain_draft_store_groups",
        /// Tenants that gateways keep here.
        pub(crate) tenant_records: IntGauge = "refrain_draft_store_tenant_records",
        /// Documents of these groups.
        pub(crate) group_documents: IntGauge = "refrain_draft_store_group_documents",
        /// Scopes with news in the answers to pulls: namespaces and groups.
        pub(crate) pull_scopes: IntCounter = "refrain_draft_store_pull_scopes_total",
        /// Pulls whose answer had no room for all news. The reader asks for the rest at once.
        pub(crate) full_pulls: IntCounter = "refrain_draft_store_full_pulls_total",
        /// Tokens sent to workers in logs of groups.
        pub(crate) group_tokens: IntCounter = "refrain_draft_store_group_tokens_total",
        /// Rows of usage.
        pub(crate) usage_rows: IntGauge = "refrain_draft_store_usage_rows",
        /// Erasures remembered.
        pub(crate) erasures: IntGauge = "refrain_draft_store_erasures",
        /// Erased documents remembered.
        pub(crate) erased_documents: IntGauge = "refrain_draft_store_erased_documents",
        /// Tokens that wait for a commit.
        pub(crate) pending_tokens: IntGauge = "refrain_draft_store_pending_tokens",
        /// Changes that other replicas do not have yet.
        pub(crate) outbox_entries: IntGauge = "refrain_draft_store_outbox_entries",
        /// 1, with the number of the store's shard and whether it has a feed, for joins with other metrics.
        pub(crate) info: IntGaugeVec = "refrain_draft_store_info" ["feed", "shard"],
        /// Whether there is a connection to the broker of the feed: 1 or 0.
        pub(crate) feed_connected: IntGauge = "refrain_draft_store_feed_connected",
        /// Sessions with the broker that ended.
        pub(crate) feed_sessions: IntCounter = "refrain_draft_store_feed_sessions_total",
        /// Sequence of the last message of the stream that was applied.
        pub(crate) feed_sequence: IntGauge = "refrain_draft_store_feed_sequence",
        /// Messages of the stream that are not applied.
        pub(crate) feed_lag_messages: IntGauge = "refrain_draft_store_feed_lag_messages",
        /// Age of the last applied message while others wait, in seconds; 0 at the end of the stream.
        pub(crate) feed_lag_seconds: Gauge = "refrain_draft_store_feed_lag_seconds",
        /// Messages of the stream that were applied.
        pub(crate) feed_applied: IntCounter = "refrain_draft_store_feed_applied_total",
        /// Messages that came again.
        pub(crate) feed_repeated: IntCounter = "refrain_draft_store_feed_repeated_total",
        /// Messages that nobody can read, which were skipped. Alert unless 0.
        pub(crate) feed_unreadable: IntCounter = "refrain_draft_store_feed_unreadable_total",
        /// Entries of the outbox that the broker took.
        pub(crate) feed_sent: IntCounter = "refrain_draft_store_feed_sent_total",
        /// Entries of the outbox that wait for the broker's acknowledgement.
        pub(crate) feed_in_flight: IntGauge = "refrain_draft_store_feed_in_flight",
        /// Times the replica took over the documents of another one.
        pub(crate) feed_joins: IntCounter = "refrain_draft_store_feed_joins_total",
        /// Times the replica applied the stream once more, since the brokers had lost or renumbered messages. Alert
        /// unless 0.
        pub(crate) feed_restarts: IntCounter = "refrain_draft_store_feed_restarts_total",
        /// Documents that were taken over from another replica.
        pub(crate) feed_joined_documents: IntCounter =
            "refrain_draft_store_feed_joined_documents_total",
        /// Segments that were taken over from another replica as files.
        pub(crate) feed_joined_segments: IntCounter =
            "refrain_draft_store_feed_joined_segments_total",
        /// Bytes of files and documents that came from another replica.
        pub(crate) feed_joined_bytes: IntCounter = "refrain_draft_store_feed_joined_bytes_total",
        /// Documents that the last join has taken over so far.
        pub(crate) feed_join_documents: IntGauge = "refrain_draft_store_feed_join_documents",
        /// Documents that the other replica had when the last join began.
        pub(crate) feed_join_documents_wanted: IntGauge =
            "refrain_draft_store_feed_join_documents_wanted",
        /// Tokens that the last join has taken over so far.
        pub(crate) feed_join_tokens: IntGauge = "refrain_draft_store_feed_join_tokens",
        /// Tokens that the other replica had when the last join began.
        pub(crate) feed_join_tokens_wanted: IntGauge =
            "refrain_draft_store_feed_join_tokens_wanted",
        /// Erasures of the stream that are not carried out here yet.
        pub(crate) feed_erasures_open: IntGauge = "refrain_draft_store_feed_erasures_open",
        /// Seconds since the oldest of them arrived; 0 if there is none.
        pub(crate) feed_erasure_age_seconds: IntGauge =
            "refrain_draft_store_feed_erasure_age_seconds",
        /// Messages deleted from the stream because their documents were erased.
        pub(crate) feed_erased_messages: IntCounter =
            "refrain_draft_store_feed_erased_messages_total",
        /// Times the writer was rebuilt from disk after an error or a panic.
        pub(crate) writer_restarts: IntCounter = "refrain_draft_store_writer_restarts_total",
    }
}

impl StoreMetrics {
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let families = StoreMetrics::register(metrics.registry())?;
        // A rate over a counter that does not exist yet shows nothing, so all of them exist from the start.
        for from in ["log", "segments"] {
            for outcome in JOB_OUTCOMES {
                families.segments_made.with_label_values(&[from, outcome]);
            }
        }
        Ok(families)
    }

    pub(crate) fn reject(&self, limit: Limit) {
        self.rejections.with_label_values(&[limit.as_str()]).inc();
    }
}
