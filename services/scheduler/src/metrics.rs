//! The scheduler's metrics.

use refrain_service_kit::telemetry::SECONDS_BUCKETS;

use crate::dispatch::{Dispatch, LeaseEnd, LeaseRefusal};

/// Values of the label `limit` beside those of [`LeaseRefusal`].
const OTHER_LIMITS: [&str; 3] = ["mailbox_max", "signature", "restarted"];

fn limits() -> impl Iterator<Item = &'static str> {
    let refusals = LeaseRefusal::LABELS.iter().copied();
    refusals.chain(OTHER_LIMITS)
}

refrain_service_kit::metric_families! {
    /// Gauges and counters. They are cheap to clone.
    #[derive(Clone)]
    pub(crate) struct SchedulerMetrics {
        /// Requests that wait for a lease now.
        queue_length: IntGauge = "refrain_scheduler_queue_length",
        /// Leases that are held now.
        leases_running: IntGauge = "refrain_scheduler_leases_running",
        /// Live workers, by their heartbeats.
        workers: IntGauge = "refrain_scheduler_workers",
        /// Leases that ended, by outcome.
        leases: IntCounterVec = "refrain_scheduler_leases_total" ["outcome"],
        /// Time from a request for a lease to its grant.
        lease_wait_seconds: Histogram = "refrain_scheduler_lease_wait_seconds" in SECONDS_BUCKETS,
        /// Requests that were refused a lease, by the limit they reached.
        rejections: IntCounterVec = "refrain_scheduler_rejections_total" ["limit"] with limits(),
        /// Leases that expired because no heartbeat named them.
        expired_leases: IntCounter = "refrain_scheduler_expired_leases_total",
        /// Rebuilds of the dispatcher after a panic.
        pub(crate) actor_restarts: IntCounter = "refrain_scheduler_actor_restarts_total",
    }
}

impl SchedulerMetrics {
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
