//! What is told of the copy of the drafts, and of outputs on their way.

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};
use refrain_service_kit::telemetry::Metrics;
use refrain_suffix_index::IndexSizes;

/// Collectors of namespaces and groups. Cheap to clone.
#[derive(Clone)]
pub struct MemoryMetrics {
    index_tokens: IntGauge,
    index_bytes: IntGauge,
    index_documents: IntGauge,
    index_live_tokens: IntGauge,
    index_live_bytes: IntGauge,
    index_sealed_tokens: IntGauge,
    index_segment_bytes: IntGauge,
    index_segments: IntGauge,
    pub(crate) index_namespaces: IntGauge,
    pub(crate) index_evictions: IntCounter,
    index_jobs: IntCounterVec,
    pub(crate) index_lock_seconds: HistogramVec,
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

impl MemoryMetrics {
    /// Registers everything.
    ///
    /// # Errors
    /// A name is taken.
    pub fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let gauge = |name: &str, help: &str| metrics.gauge(name, help);
        let index_jobs = metrics.counter_vec(
            "refrain_worker_index_jobs_total",
            "Seals, merges and rebuilds of indexes.",
            &["job"],
        )?;
        let take_overs = metrics.counter_vec(
            "refrain_worker_take_overs_total",
            "Times the store's segments of a namespace were asked for, to be taken over as they are.",
            &["outcome"],
        )?;
        let lookups = metrics.counter_vec(
            "refrain_worker_lookups_total",
            "Calls for drafts from the store's index, for namespaces that are not all here.",
            &["outcome"],
        )?;
        let group_rejections = metrics.counter_vec(
            "refrain_worker_group_rejections_total",
            "Requests that drafted without their group, and pieces of output that were left out of it.",
            &["limit"],
        )?;
        // A rate over a counter that does not exist yet shows nothing, so these do from the start.
        for job in ["seal", "merge", "rebuild"] {
            index_jobs.with_label_values(&[job]);
        }
        for outcome in ["done", "nothing", "failed"] {
            take_overs.with_label_values(&[outcome]);
        }
        for outcome in ["asked", "answered", "late", "failed"] {
            lookups.with_label_values(&[outcome]);
        }
        for limit in [GROUPS_MAX, GROUP_TOKENS_MAX] {
            group_rejections.with_label_values(&[limit]);
        }
        Ok(MemoryMetrics {
            index_tokens: gauge(
                "refrain_worker_index_tokens",
                "Tokens that can be drafted from.",
            )?,
            index_bytes: gauge(
                "refrain_worker_index_bytes",
                "Memory of the indexes, live parts and segments.",
            )?,
            index_documents: gauge(
                "refrain_worker_index_documents",
                "Documents that can be drafted from.",
            )?,
            index_live_tokens: gauge(
                "refrain_worker_index_live_tokens",
                "Tokens of live parts: of outputs that run, and of those not sealed yet.",
            )?,
            index_live_bytes: gauge(
                "refrain_worker_index_live_bytes",
                "Memory of the live parts of indexes.",
            )?,
            index_sealed_tokens: gauge(
                "refrain_worker_index_sealed_tokens",
                "Tokens of segments that can be drafted from.",
            )?,
            index_segment_bytes: gauge(
                "refrain_worker_index_segment_bytes",
                "Memory of the segments of indexes.",
            )?,
            index_segments: gauge("refrain_worker_index_segments", "Segments of indexes.")?,
            index_namespaces: gauge("refrain_worker_index_namespaces", "Namespaces followed.")?,
            index_evictions: metrics.counter(
                "refrain_worker_index_evictions_total",
                "Documents and namespaces left out for want of room.",
            )?,
            index_jobs,
            index_lock_seconds: metrics.histogram_vec(
                "refrain_worker_index_lock_seconds",
                "Time that an index was locked for the beginning or the end of a job.",
                &["job"],
                &[
                    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1,
                ],
            )?,
            follow_failures: metrics.counter(
                "refrain_worker_follow_failures_total",
                "Times the draft store could not be followed.",
            )?,
            take_overs,
            lookups,
            take_over_bytes: metrics.counter(
                "refrain_worker_take_over_bytes_total",
                "Bytes of segments that were taken over from the store.",
            )?,
            groups: gauge(
                "refrain_worker_groups",
                "Groups of samples with a tree of their own.",
            )?,
            group_tokens: gauge("refrain_worker_group_tokens", "Tokens of groups' trees.")?,
            group_bytes: gauge("refrain_worker_group_bytes", "Memory of groups' trees.")?,
            group_evictions: metrics.counter(
                "refrain_worker_group_evictions_total",
                "Groups, and outputs of groups, let go for want of room.",
            )?,
            group_rejections,
        })
    }

    /// A job on an index was done.
    pub(crate) fn job(&self, name: &str) {
        self.index_jobs.with_label_values(&[name]).inc();
    }

    /// The store was asked for its segments of a namespace.
    pub(crate) fn take_over(&self, outcome: &str) {
        self.take_overs.with_label_values(&[outcome]).inc();
    }

    /// The store was asked for drafts, or what became of that.
    pub(crate) fn lookup(&self, outcome: &str) {
        self.lookups.with_label_values(&[outcome]).inc();
    }

    /// A request drafts without its group.
    pub(crate) fn group_refused(&self) {
        self.group_rejections.with_label_values(&[GROUPS_MAX]).inc();
    }

    /// A piece of an output is left out of its group.
    pub(crate) fn group_full(&self) {
        self.group_rejections
            .with_label_values(&[GROUP_TOKENS_MAX])
            .inc();
    }

    /// Sizes of all namespaces together.
    pub(crate) fn index_sizes(&self, sizes: &IndexSizes) {
        let tokens = sizes.live_tokens + sizes.segment_tokens;
        self.index_tokens.set(tokens as i64);
        self.index_bytes
            .set((sizes.live_bytes + sizes.segment_bytes) as i64);
        self.index_documents
            .set((sizes.live_documents + sizes.segment_documents) as i64);
        self.index_live_tokens.set(sizes.live_tokens as i64);
        self.index_live_bytes.set(sizes.live_bytes as i64);
        self.index_sealed_tokens.set(sizes.segment_tokens as i64);
        self.index_segment_bytes.set(sizes.segment_bytes as i64);
        self.index_segments.set(sizes.segments as i64);
    }

    /// Sizes of all groups together.
    pub(crate) fn group_sizes(&self, groups: usize, tokens: u64, bytes: usize) {
        self.groups.set(groups as i64);
        self.group_tokens.set(tokens as i64);
        self.group_bytes.set(bytes as i64);
    }
}

const GROUPS_MAX: &str = "groups_max";
const GROUP_TOKENS_MAX: &str = "group_tokens_max";

/// Collectors of outputs on their way to the store. Cheap to clone.
#[derive(Clone)]
pub struct HarvestMetrics {
    pub(crate) pending_tokens: IntGauge,
    pub(crate) dropped_tokens: IntCounter,
    pub(crate) failures: IntCounter,
}

impl HarvestMetrics {
    /// Registers everything.
    ///
    /// # Errors
    /// A name is taken.
    pub fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        Ok(HarvestMetrics {
            pending_tokens: metrics.gauge(
                "refrain_worker_harvest_pending_tokens",
                "Output tokens held for the draft store: not yet acknowledged, or of outputs that still run.",
            )?,
            dropped_tokens: metrics.counter(
                "refrain_worker_harvest_dropped_tokens_total",
                "Output tokens that never reached the draft store.",
            )?,
            failures: metrics.counter(
                "refrain_worker_harvest_failures_total",
                "Messages that the draft store did not take.",
            )?,
        })
    }
}
