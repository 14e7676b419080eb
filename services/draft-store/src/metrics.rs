//! The metrics of the store.

mod labels;

pub(crate) use labels::{Limit, RemovalReason};

use prometheus::{Gauge, Histogram, IntCounter, IntCounterVec, IntGauge};
use refrain_service_kit::telemetry::Metrics;

/// Bucket bounds from 0.5 ms to 10 s.
const COMMIT_SECONDS_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

#[derive(Clone)]
pub(crate) struct StoreMetrics {
    pub(crate) documents: IntGauge,
    pub(crate) tokens: IntGauge,
    pub(crate) logical_bytes: IntGauge,
    pub(crate) disk_bytes: IntGauge,
    pub(crate) disk_free_bytes: IntGauge,
    pub(crate) blob_files: IntGauge,
    pub(crate) live_ratio: Gauge,
    pub(crate) rewrites: IntCounterVec,
    pub(crate) reclaimed_bytes: IntCounter,
    pub(crate) unsealed_tokens: IntGauge,
    pub(crate) segments: IntGauge,
    pub(crate) segment_bytes: IntGauge,
    pub(crate) exports: IntGauge,
    pub(crate) export_held_bytes: IntGauge,
    pub(crate) export_disk_bytes: IntGauge,
    pub(crate) segments_made: IntCounterVec,
    pub(crate) segments_lost: IntCounter,
    pub(crate) sent_segment_bytes: IntCounter,
    pub(crate) lookup_seconds: Histogram,
    pub(crate) lookup_contexts: IntCounterVec,
    pub(crate) lookups_running: IntGauge,
    pub(crate) lookup_views: IntGauge,
    pub(crate) append_seconds: Histogram,
    pub(crate) appended_tokens: IntCounter,
    pub(crate) evictions: IntCounterVec,
    pub(crate) rejections: IntCounterVec,
    pub(crate) quarantines: IntCounter,
    pub(crate) quarantines_held: IntGauge,
    pub(crate) missing_documents: IntGauge,
    pub(crate) clock_offset_seconds: IntGauge,
    pub(crate) damaged_records: IntCounter,
    pub(crate) feed_waiters: IntGauge,
    pub(crate) erasures: IntGauge,
    pub(crate) erased_documents: IntGauge,
    pub(crate) pending_tokens: IntGauge,
    pub(crate) writer_restarts: IntCounter,
}

impl StoreMetrics {
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let name = |name: &str| format!("refrain_draft_store_{name}");
        let gauge = |key: &str, help: &str| metrics.gauge(&name(key), help);
        let counter = |key: &str, help: &str| metrics.counter(&name(key), help);
        let figures = StoreMetrics {
            documents: gauge("documents", "Documents stored.")?,
            tokens: gauge("tokens", "Output tokens stored.")?,
            logical_bytes: gauge("logical_bytes", "Bytes as stored, without sled's overhead.")?,
            disk_bytes: gauge("disk_bytes", "Bytes of the data directory.")?,
            disk_free_bytes: gauge(
                "disk_free_bytes",
                "Free bytes on the disk of the data directory.",
            )?,
            blob_files: gauge(
                "blob_files",
                "Values too large for the pages of the log's index. Alert unless 0.",
            )?,
            live_ratio: metrics.float_gauge(
                &name("live_ratio"),
                "Bytes of live records in the log, per byte of the log on disk.",
            )?,
            rewrites: metrics.counter_vec(
                &name("rewrites_total"),
                "Rewrites of the log that give space back, by outcome.",
                &["outcome"],
            )?,
            reclaimed_bytes: counter(
                "reclaimed_bytes_total",
                "Bytes on disk given back by rewrites.",
            )?,
            unsealed_tokens: gauge(
                "unsealed_tokens",
                "Tokens in the log that are not sealed yet.",
            )?,
            segments: gauge("segments", "Segments in use.")?,
            segment_bytes: gauge("segment_bytes", "Bytes of the segments in use.")?,
            exports: gauge("exports", "Exports in progress.")?,
            export_held_bytes: gauge(
                "export_held_bytes",
                "Bytes of memory held for exports: their lists, and documents put aside for them.",
            )?,
            export_disk_bytes: gauge(
                "export_disk_bytes",
                "Bytes of deleted segments whose files are kept for exports.",
            )?,
            segments_made: metrics.counter_vec(
                &name("segments_made_total"),
                "Segments made, by source (log: sealed, segments: merged) and outcome.",
                &["from", "outcome"],
            )?,
            segments_lost: counter(
                "segments_lost_total",
                "Segments whose file was missing or damaged at start.",
            )?,
            sent_segment_bytes: counter(
                "sent_segment_bytes_total",
                "Bytes of segments sent to workers that took them over.",
            )?,
            lookup_seconds: metrics.histogram(
                &name("lookup_seconds"),
                "Seconds to draft for all contexts of one call.",
                &[
                    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 0.1,
                ],
            )?,
            lookup_contexts: metrics.counter_vec(
                &name("lookup_contexts_total"),
                "Contexts for which workers asked for a draft, by result.",
                &["result"],
            )?,
            lookups_running: gauge("lookups_running", "Look-ups in flight.")?,
            lookup_views: gauge(
                "lookup_views",
                "Namespaces whose segments are held open for look-ups.",
            )?,
            append_seconds: metrics.histogram(
                &name("append_seconds"),
                "Seconds from the arrival of an append at the writer until it is durable.",
                COMMIT_SECONDS_BUCKETS,
            )?,
            appended_tokens: counter("appended_tokens_total", "Tokens made durable.")?,
            evictions: metrics.counter_vec(
                &name("evictions_total"),
                "Documents removed, by reason.",
                &["reason"],
            )?,
            rejections: metrics.counter_vec(
                &name("rejections_total"),
                "Calls refused because a limit was reached, by limit.",
                &["limit"],
            )?,
            quarantines: counter(
                "quarantines_total",
                "Logs moved to quarantine because they could not be read in full.",
            )?,
            quarantines_held: gauge(
                "quarantines_held",
                "Quarantine directories with unreadable content. Alert unless 0.",
            )?,
            missing_documents: gauge(
                "missing_documents",
                "Documents lost before the last start, until an operator confirms the loss. Alert unless 0.",
            )?,
            clock_offset_seconds: gauge(
                "clock_offset_seconds",
                "Seconds that the wall clock is ahead of the store's time after a jump. Alert unless 0.",
            )?,
            damaged_records: counter("damaged_records_total", "Damaged records found.")?,
            feed_waiters: gauge("feed_waiters", "Calls of follow that wait for a change.")?,
            erasures: gauge("erasures", "Erasures remembered.")?,
            erased_documents: gauge("erased_documents", "Erased documents remembered.")?,
            pending_tokens: gauge("pending_tokens", "Tokens that wait for a commit.")?,
            writer_restarts: counter(
                "writer_restarts_total",
                "Times the writer was rebuilt from disk after an error or a panic.",
            )?,
        };
        // A rate over a counter that does not exist yet shows nothing, so all of them exist from the start.
        for removal in RemovalReason::ALL {
            figures.evictions.with_label_values(&[removal.as_str()]);
        }
        for outcome in ["done", "failed"] {
            for from in ["log", "segments"] {
                figures.segments_made.with_label_values(&[from, outcome]);
            }
            figures.rewrites.with_label_values(&[outcome]);
        }
        for result in ["found", "nothing"] {
            figures.lookup_contexts.with_label_values(&[result]);
        }
        for limit in Limit::ALL {
            figures.rejections.with_label_values(&[limit.as_str()]);
        }
        Ok(figures)
    }

    pub(crate) fn reject(&self, limit: Limit) {
        self.rejections.with_label_values(&[limit.as_str()]).inc();
    }
}
