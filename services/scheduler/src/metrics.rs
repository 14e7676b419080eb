//! What the scheduler counts.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use refrain_service_kit::telemetry::{Metrics, SECONDS_BUCKETS};

use crate::dispatch::refusal::Refusal;
use crate::dispatch::{Dispatch, LeaseEnd};

/// Cheap to clone.
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
            "Requests refused a lease, by the limit they met.",
            &["limit"],
        )?;
        // A rate over a counter that does not exist yet shows nothing, so these do from the start.
        let limits = Refusal::ALL.map(Refusal::as_str);
        for limit in limits
            .iter()
            .chain(&["mailbox_max", "signature", "restarted"])
        {
            rejections.with_label_values(&[*limit]);
        }
        Ok(SchedulerMetrics {
            queue_length: metrics.gauge(
                "refrain_scheduler_queue_length",
                "Requests that wait for a lease.",
            )?,
            leases_running: metrics
                .gauge("refrain_scheduler_leases_running", "Leases somebody holds.")?,
            workers: metrics.gauge("refrain_scheduler_workers", "Workers that report.")?,
            leases: metrics.counter_vec(
                "refrain_scheduler_leases_total",
                "Leases that ended, by how they ended.",
                &["outcome"],
            )?,
            lease_wait_seconds: metrics.histogram(
                "refrain_scheduler_lease_wait_seconds",
                "Time from asking for a lease to the grant.",
                SECONDS_BUCKETS,
            )?,
            rejections,
            expired_leases: metrics.counter(
                "refrain_scheduler_expired_leases_total",
                "Leases that no heartbeat named for their whole life.",
            )?,
            actor_restarts: metrics.counter(
                "refrain_scheduler_actor_restarts_total",
                "Times the dispatcher panicked and was rebuilt.",
            )?,
        })
    }

    pub(crate) fn granted(&self, waited_ms: u64) {
        self.lease_wait_seconds.observe(waited_ms as f64 / 1_000.0);
    }

    /// Counts a refusal by the limit it met.
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
