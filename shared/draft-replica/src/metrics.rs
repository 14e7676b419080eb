//! Metrics of the replica and of the upload.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge};
use refrain_service_kit::telemetry::Metrics;
use refrain_suffix_index::IndexSizes;

/// Collectors of namespaces and groups. A clone shares them.
#[derive(Clone)]
pub struct ReplicaMetrics {
    tokens: IntGauge,
    bytes: IntGauge,
    documents: IntGauge,
    live_tokens: IntGauge,
    live_bytes: IntGauge,
    sealed_tokens: IntGauge,
    segment_bytes: IntGauge,
    segments: IntGauge,
    pub(crate) namespaces: IntGauge,
    pub(crate) evictions: IntCounter,
    jobs: IntCounterVec,
    lock_seconds: HistogramVec,
    pub(crate) follow_failures: IntCounter,
    take_overs: IntCounterVec,
    lookups: IntCounterVec,
    pub(crate) take_over_bytes: IntCounter,
    groups: IntGauge,
    group_tokens: IntGauge,
    group_bytes: IntGauge,
    pub(crate) group_evictions: IntCounter,
    group_rejections: IntCounterVec,
}

impl ReplicaMetrics {
    /// Registers all collectors.
    ///
    /// # Errors
    /// A name is taken.
    pub fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let gauge = |name: &str, help: &str| metrics.gauge(name, help);
        // A rate over a series that does not exist yet shows nothing, so all series exist from the start.
        let counters = |name: &str, help: &str, label: &str, values: &[&str]| {
            let counters = metrics.counter_vec(name, help, &[label])?;
            for value in values {
                counters.with_label_values(&[*value]);
            }
            anyhow::Ok(counters)
        };
        Ok(ReplicaMetrics {
            tokens: gauge(
                "refrain_replica_tokens",
                "Tokens that requests can draft from.",
            )?,
            bytes: gauge(
                "refrain_replica_bytes",
                "Memory of all indexes, live parts and segments together.",
            )?,
            documents: gauge(
                "refrain_replica_documents",
                "Documents that requests can draft from.",
            )?,
            live_tokens: gauge(
                "refrain_replica_live_tokens",
                "Tokens of live parts: of outputs that run, and of outputs not sealed yet.",
            )?,
            live_bytes: gauge(
                "refrain_replica_live_bytes",
                "Memory of the live parts of indexes.",
            )?,
            sealed_tokens: gauge(
                "refrain_replica_sealed_tokens",
                "Tokens of segments that requests can draft from.",
            )?,
            segment_bytes: gauge(
                "refrain_replica_segment_bytes",
                "Memory of the segments of indexes.",
            )?,
            segments: gauge("refrain_replica_segments", "Segments of all indexes.")?,
            namespaces: gauge(
                "refrain_replica_namespaces",
                "Namespaces that are followed.",
            )?,
            evictions: metrics.counter(
                "refrain_replica_evictions_total",
                "Documents and namespaces evicted for want of capacity.",
            )?,
            jobs: counters(
                "refrain_replica_jobs_total",
                "Seals, merges and rebuilds of indexes.",
                "job",
                &["seal", "merge", "rebuild"],
            )?,
            lock_seconds: metrics.histogram_vec(
                "refrain_replica_lock_seconds",
                "Time that an index was locked at the beginning or the end of a job.",
                &["job"],
                &[
                    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1,
                ],
            )?,
            follow_failures: metrics.counter(
                "refrain_replica_follow_failures_total",
                "Calls for the draft store's feed or segments that failed.",
            )?,
            take_overs: counters(
                "refrain_replica_take_overs_total",
                "Attempts to take over the draft store's segments of a namespace, by outcome.",
                "outcome",
                &["done", "nothing", "failed"],
            )?,
            lookups: counters(
                "refrain_replica_lookups_total",
                "Calls for drafts from the store's index, for namespaces that are not all here.",
                "outcome",
                &["asked", "answered", "late", "failed"],
            )?,
            take_over_bytes: metrics.counter(
                "refrain_replica_take_over_bytes_total",
                "Bytes of segments that were taken over from the draft store.",
            )?,
            groups: gauge(
                "refrain_replica_groups",
                "Groups of samples with a tree of their own.",
            )?,
            group_tokens: gauge("refrain_replica_group_tokens", "Tokens of groups' trees.")?,
            group_bytes: gauge("refrain_replica_group_bytes", "Memory of groups' trees.")?,
            group_evictions: metrics.counter(
                "refrain_replica_group_evictions_total",
                "Groups, and outputs of groups, evicted for want of capacity.",
            )?,
            group_rejections: counters(
                "refrain_replica_group_rejections_total",
                "Requests that drafted without their group, and updates of outputs that were left out of it.",
                "limit",
                &[GROUPS_MAX, GROUP_TOKENS_MAX],
            )?,
        })
    }

    /// Counts a finished job on an index.
    pub(crate) fn job(&self, name: &str) {
        self.jobs.with_label_values(&[name]).inc();
    }

    /// The histogram of the times for which jobs of this name lock an index.
    pub(crate) fn lock_seconds(&self, job: &str) -> Histogram {
        self.lock_seconds.with_label_values(&[job])
    }

    /// Counts a take-over.
    pub(crate) fn take_over(&self, outcome: &str) {
        self.take_overs.with_label_values(&[outcome]).inc();
    }

    /// Counts a look-up, or its outcome.
    pub(crate) fn lookup(&self, outcome: &str) {
        self.lookups.with_label_values(&[outcome]).inc();
    }

    /// Counts a request that drafts without its group.
    pub(crate) fn group_refused(&self) {
        self.group_rejections.with_label_values(&[GROUPS_MAX]).inc();
    }

    /// Counts an update of an output that is left out of its group.
    pub(crate) fn group_full(&self) {
        self.group_rejections
            .with_label_values(&[GROUP_TOKENS_MAX])
            .inc();
    }

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

    /// Sets the sizes of all groups together.
    pub(crate) fn set_group_sizes(&self, groups: usize, tokens: u64, bytes: usize) {
        self.groups.set(groups as i64);
        self.group_tokens.set(tokens as i64);
        self.group_bytes.set(bytes as i64);
    }
}

const GROUPS_MAX: &str = "groups_max";
const GROUP_TOKENS_MAX: &str = "group_tokens_max";

/// Collectors of the upload. A clone shares them.
#[derive(Clone)]
pub struct UploaderMetrics {
    pub(crate) pending_tokens: IntGauge,
    pub(crate) dropped_tokens: IntCounter,
    pub(crate) failures: IntCounter,
}

impl UploaderMetrics {
    /// Registers all collectors.
    ///
    /// # Errors
    /// A name is taken.
    pub fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        Ok(UploaderMetrics {
            pending_tokens: metrics.gauge(
                "refrain_upload_pending_tokens",
                "Output tokens held for the draft store: not acknowledged yet, or of outputs that still run.",
            )?,
            dropped_tokens: metrics.counter(
                "refrain_upload_dropped_tokens_total",
                "Output tokens that never reached the draft store.",
            )?,
            failures: metrics.counter(
                "refrain_upload_failures_total",
                "Messages that the draft store did not accept.",
            )?,
        })
    }
}
