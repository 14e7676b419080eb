//! The scheduler's metrics.

use refrain_protocol::WorkerId;
use refrain_protocol::scheduling::RequestClass;
use refrain_service_kit::telemetry::REQUEST_SECONDS_BUCKETS;

use crate::dispatch::{Dispatch, LeaseEnd, LeaseRefusal, Placed};

/// Values of the label `limit` beside those of [`LeaseRefusal`].
const OTHER_LIMITS: [&str; 3] = ["mailbox_max", "signature", "restarted"];

/// Both classes of requests.
const CLASSES: [RequestClass; 2] = [RequestClass::Interactive, RequestClass::Rollout];
/// The values of the label `context`.
const CONTEXTS: [&str; 2] = ["held", "missing"];
/// Upper bounds of the relative errors of estimates. An error of 1 means twice the true length, or none of it.
const ERROR_BUCKETS: &[f64] = &[0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0];

fn classes() -> impl Iterator<Item = &'static str> {
    CLASSES.into_iter().map(RequestClass::as_str)
}

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
        /// Requests that wait for a lease now, by class.
        waiting: IntGaugeVec = "refrain_scheduler_waiting" ["class"] with classes(),
        /// Chunks that were granted, by class.
        chunks: IntCounterVec = "refrain_scheduler_chunks_total" ["class"] with classes(),
        /// Chunks that were granted on another worker than the request's last one.
        moves: IntCounter = "refrain_scheduler_moves_total",
        /// Groups of rollouts whose lengths are remembered.
        groups: IntGauge = "refrain_scheduler_groups",
        /// Prefixes of contexts that are known to lie on some worker.
        prefixes: IntGauge = "refrain_scheduler_prefixes",
        /// Named sessions whose worker is remembered.
        sessions_tracked: IntGauge = "refrain_scheduler_sessions_tracked",
        /// Context tokens of granted chunks that their worker was taken to hold, and those that it had to read. A
        /// worker that is gone leaves the list.
        context_tokens: IntCounterVec = "refrain_scheduler_context_tokens_total" ["worker", "context"],
        /// How far finished rollouts were from the length that was expected when they started, by their true length.
        estimate_error: Histogram = "refrain_scheduler_estimate_error_ratio" in ERROR_BUCKETS,
        /// Whether this scheduler grants leases (1) or stands by for another one (0).
        leads: IntGauge = "refrain_scheduler_leads",
        /// Leases that are held now.
        leases_running: IntGauge = "refrain_scheduler_leases_running",
        /// Live workers, by their heartbeats.
        workers: IntGauge = "refrain_scheduler_workers",
        /// Leases that ended, by outcome.
        leases: IntCounterVec = "refrain_scheduler_leases_total" ["outcome"],
        /// Time from a request for a lease to its grant.
        lease_wait_seconds: Histogram = "refrain_scheduler_lease_wait_seconds" in REQUEST_SECONDS_BUCKETS,
        /// Requests that were refused a lease, by the limit they reached.
        rejections: IntCounterVec = "refrain_scheduler_rejections_total" ["limit"] with limits(),
        /// Leases that expired because no heartbeat named them.
        expired_leases: IntCounter = "refrain_scheduler_expired_leases_total",
        /// Rebuilds of the dispatcher after a panic.
        pub(crate) actor_restarts: IntCounter = "refrain_scheduler_actor_restarts_total",
    }
}

impl SchedulerMetrics {
    pub(crate) fn granted(&self, waited_ms: u64, worker: &WorkerId, placed: &Placed) {
        self.lease_wait_seconds.observe(waited_ms as f64 / 1_000.0);
        self.chunks
            .with_label_values(&[placed.class.as_str()])
            .inc();
        self.moves.inc_by(u64::from(placed.moved));
        let tokens = [placed.held_tokens, placed.missing_tokens];
        for (context, tokens) in CONTEXTS.into_iter().zip(tokens) {
            self.context_tokens
                .with_label_values(&[worker.0.as_str(), context])
                .inc_by(u64::from(tokens));
        }
    }

    /// Drops the counters of a worker that is gone, so that names do not pile up.
    pub(crate) fn worker_lost(&self, worker: &WorkerId) {
        for context in CONTEXTS {
            // It fails where nothing was counted.
            let _ = self
                .context_tokens
                .remove_label_values(&[worker.0.as_str(), context]);
        }
    }

    pub(crate) fn length_learned(&self, estimated_tokens: u32, tokens: u32) {
        let error = f64::from(estimated_tokens.abs_diff(tokens));
        self.estimate_error
            .observe(error / f64::from(tokens.max(1)));
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

    /// Notes whether this process leads. One that does not shows nothing of what it knows.
    pub(crate) fn led(&self, leads: bool) {
        self.leads.set(i64::from(leads));
        if !leads {
            for gauge in [
                &self.queue_length,
                &self.groups,
                &self.prefixes,
                &self.sessions_tracked,
                &self.leases_running,
                &self.workers,
            ] {
                gauge.set(0);
            }
            for class in CLASSES {
                self.waiting.with_label_values(&[class.as_str()]).set(0);
            }
        }
    }

    pub(crate) fn observe(&self, dispatch: &Dispatch) {
        self.queue_length.set(dispatch.queue_length() as i64);
        for class in CLASSES {
            self.waiting
                .with_label_values(&[class.as_str()])
                .set(dispatch.waiting(class) as i64);
        }
        self.groups.set(dispatch.groups_tracked() as i64);
        self.prefixes.set(dispatch.prefixes_tracked() as i64);
        self.sessions_tracked
            .set(dispatch.sessions_tracked() as i64);
        self.leases_running.set(dispatch.leases_running() as i64);
        self.workers.set(dispatch.workers() as i64);
    }
}
