//! The scheduler's metrics.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use refrain_service_kit::telemetry::{Metrics, SECONDS_BUCKETS};

use crate::dispatch::{Dispatch, LeaseEnd, LeaseRefusal};

/// Gauges and counters. They are cheap to clone.
#[derive(Clone)]
pub(crate) struct SchedulerMetrics {
    queue_length: IntGauge,
    leases_running: IntGauge,
    workers: IntGauge,
    leases: IntCounterVec,
    lease_wait_seconds: Histogram,
    rejections: IntCounterVec,
    expired_leases: IntCounter,
    pub(crate) actor_restarts: IntCounter,
}

impl SchedulerMetrics {
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let rejections = metrics.counter_vec(
            "refrain_scheduler_rejections_total",
            "Requests that were refused a lease, by the limit they reached.",
            &["limit"],
        )?;
        // A rate over a missing counter is empty, so all limits are registered at the start.
        let limits = LeaseRefusal::ALL.map(LeaseRefusal::as_str);
        for limit in limits
            .iter()
            .chain(&["mailbox_max", "signature", "restarted"])
        {
            rejections.with_label_values(&[*limit]);
        }
        Ok(SchedulerMetrics {
            queue_length: metrics.gauge(
                "refrain_scheduler_queue_length",
                "Requests that wait for a lease now.",
            )?,
            leases_running: metrics.gauge(
                "refrain_scheduler_leases_running",
                "Leases that are held now.",
            )?,
            workers: metrics.gauge(
                "refrain_scheduler_workers",
                "Live workers, by their heartbeats.",
            )?,
            leases: metrics.counter_vec(
                "refrain_scheduler_leases_total",
                "Leases that ended, by outcome.",
                &["outcome"],
            )?,
            lease_wait_seconds: metrics.histogram(
                "refrain_scheduler_lease_wait_seconds",
                "Time from a request for a lease to its grant.",
                SECONDS_BUCKETS,
            )?,
            rejections,
            expired_leases: metrics.counter(
                "refrain_scheduler_expired_leases_total",
                "Leases that expired because no heartbeat named them.",
            )?,
            actor_restarts: metrics.counter(
                "refrain_scheduler_actor_restarts_total",
                "Rebuilds of the dispatcher after a panic.",
            )?,
        })
    }

    pub(crate) fn granted(&self, waited_ms: u64) {
        self.lease_wait_seconds.observe(waited_ms as f64 / 1_000.0);
    }

    /// Counts a refusal under the limit that the request reached.
    pub(crate) fn rejected(&self, limit: &'static str) {
        self.rejections.with_label_values(&[limit]).inc();
    }

    pub(crate) fn ended(&self, end: LeaseEnd) {
        self.leases.with_label_values(&[end.as_str()]).inc();
        if end == LeaseEnd::Expired {
            self.expired_leases.inc();
        }
    }

    pub(crate) fn observe(&self, dispatch: &Dispatch) {
        self.queue_length.set(dispatch.queue_length() as i64);
        self.leases_running.set(dispatch.leases_running() as i64);
        self.workers.set(dispatch.workers() as i64);
    }
}
