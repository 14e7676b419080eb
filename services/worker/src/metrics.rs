//! The worker's Prometheus metrics.

mod labels;
mod speculation;
mod streaming;

use prometheus::{Counter, GaugeVec, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use refrain_draft_replica::{ReplicaMetrics, UploaderMetrics};
use refrain_protocol::chunk::{DraftScope, DraftSource, StepCounts};
use refrain_protocol::engine::DrafterKind;
use refrain_service_kit::telemetry::Metrics;

pub(crate) use self::labels::{ChunkOutcome, RejectionLimit};
use self::speculation::{DraftMetrics, GainMetrics};
pub(crate) use self::streaming::StreamingMetrics;

/// The worker's collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WorkerMetrics {
    model: String,
    drafts: DraftMetrics,
    gains: GainMetrics,
    goodput_tokens: IntCounter,
    step_seconds: Counter,
    draft_seconds: Counter,
    pub(crate) propose_seconds: Histogram,
    pub(crate) step_batch: Histogram,
    pub(crate) chunks_running: IntGauge,
    chunks: IntCounterVec,
    rejections: IntCounterVec,
    pub(crate) engine_failures: IntCounter,
    pub(crate) engine_retries: IntCounter,
    /// Metrics of streaming engines.
    pub(crate) streaming: StreamingMetrics,
    pub(crate) replica: ReplicaMetrics,
    pub(crate) uploader: UploaderMetrics,
}

impl WorkerMetrics {
    /// Registers all metrics under the model's name.
    ///
    /// # Errors
    /// A name is taken, as by a second worker in one registry.
    pub(crate) fn new(metrics: &Metrics, model: &str) -> anyhow::Result<Self> {
        let of_model = ["model"];
        Ok(WorkerMetrics {
            model: model.to_owned(),
            drafts: DraftMetrics::new(metrics)?,
            gains: GainMetrics::new(metrics)?,
            goodput_tokens: metrics
                .counter_vec("refrain_goodput_tokens_total", "Emitted tokens.", &of_model)?
                .with_label_values(&[model]),
            step_seconds: metrics
                .float_counter_vec(
                    "refrain_engine_step_seconds_total",
                    "Duration of engine steps, seconds. For a streaming engine: the gaps between its events.",
                    &of_model,
                )?
                .with_label_values(&[model]),
            draft_seconds: metrics
                .float_counter_vec(
                    "refrain_engine_draft_seconds_total",
                    "Share of that duration that the engine's own head or draft model took, seconds.",
                    &of_model,
                )?
                .with_label_values(&[model]),
            propose_seconds: metrics.histogram(
                "refrain_worker_propose_seconds",
                "Time to propose a draft for one request.",
                &[
                    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2,
                ],
            )?,
            step_batch: metrics.histogram(
                "refrain_worker_step_batch_requests",
                "Requests in an engine step.",
                &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
            )?,
            chunks_running: metrics.gauge("refrain_worker_chunks_running", "Running chunks.")?,
            chunks: metrics.counter_vec(
                "refrain_worker_chunks_total",
                "Ended chunks, by outcome.",
                &["outcome"],
            )?,
            rejections: rejections(metrics)?,
            engine_failures: metrics.counter(
                "refrain_worker_engine_failures_total",
                "Engine steps, or responses of a streaming engine, that failed as a whole.",
            )?,
            engine_retries: metrics.counter(
                "refrain_worker_engine_retries_total",
                "Repeated attempts to open a stream of a streaming engine.",
            )?,
            streaming: StreamingMetrics::new(metrics, model)?,
            replica: ReplicaMetrics::register(metrics.registry())?,
            uploader: UploaderMetrics::register(metrics.registry())?,
        })
    }

    /// Counts a rejection.
    pub(crate) fn reject(&self, limit: RejectionLimit) {
        self.rejections.with_label_values(&[limit.as_str()]).inc();
    }

    /// Counts a chunk that has ended.
    pub(crate) fn chunk_ended(&self, outcome: ChunkOutcome) {
        self.chunks.with_label_values(&[outcome.as_str()]).inc();
    }

    /// Counts the duration of a step, and the share that the engine's own drafter took of it, seconds.
    pub(crate) fn engine_step(&self, seconds: f64, draft_seconds: f64) {
        self.step_seconds.inc_by(seconds.max(0.0));
        self.draft_seconds.inc_by(draft_seconds.max(0.0));
    }

    /// Counts the tokens of a step.
    pub(crate) fn step(&self, source: DraftSource, scope: DraftScope, counts: StepCounts) {
        self.goodput_tokens.inc_by(counts.emitted);
        self.drafts.count(&self.model, source, scope, counts);
    }

    /// Counts a decision of the router and its reason.
    pub(crate) fn decision(&self, (decision, reason): (&str, &str)) {
        self.drafts
            .decisions
            .with_label_values(&[self.model.as_str(), decision, reason])
            .inc();
    }

    /// Counts the draft tokens that a budget admitted and refused.
    pub(crate) fn budget(&self, admitted: u32, refused: u32) {
        for (outcome, tokens) in [("admitted", admitted), ("refused", refused)] {
            self.drafts
                .budget
                .with_label_values(&[self.model.as_str(), outcome])
                .inc_by(u64::from(tokens));
        }
    }

    /// Counts the expected and the accepted tokens of a draft.
    pub(crate) fn expectation(&self, source: DraftSource, expected: f32, accepted: u32) {
        let labels = [self.model.as_str(), source.as_str()];
        self.drafts
            .expected_tokens
            .with_label_values(&labels)
            .inc_by(f64::from(expected.max(0.0)));
        self.drafts
            .expected_accepted
            .with_label_values(&labels)
            .inc_by(u64::from(accepted));
    }

    /// Counts an exchange of acceptance statistics with the store.
    pub(crate) fn statistics_call(&self, is_answered: bool) {
        let outcome = if is_answered { "answered" } else { "failed" };
        self.drafts
            .statistics_calls
            .with_label_values(&[self.model.as_str(), outcome])
            .inc();
    }

    /// Observes the mean accepted length of a chunk.
    pub(crate) fn request_length(&self, emitted: u64, steps: u64) {
        if steps > 0 {
            self.drafts
                .accepted_length
                .with_label_values(&[self.model.as_str()])
                .observe(emitted as f64 / steps as f64);
        }
    }

    /// Sets the error of the expected step times, as a share.
    pub(crate) fn step_cost_error(&self, share: f64) {
        self.gains
            .step_cost_error
            .with_label_values(&[self.model.as_str()])
            .set(share);
    }

    /// Sets the threshold of the score router.
    pub(crate) fn threshold(&self, in_force: f32) {
        self.gains
            .threshold
            .with_label_values(&[self.model.as_str()])
            .set(f64::from(in_force));
    }

    /// Sets the accepted length of the engine's own drafter.
    pub(crate) fn self_draft_accepted_length(&self, kind: DrafterKind, tokens: f64) {
        self.gains
            .self_draft_accepted_length
            .with_label_values(&[self.model.as_str(), kind.as_str()])
            .set(tokens);
    }

    /// Sets the gate of the engine's own drafter for batches of up to `batch`.
    pub(crate) fn self_draft_gate(
        &self,
        kind: DrafterKind,
        batch: u32,
        in_use: bool,
        gain: Option<f64>,
    ) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), kind.as_str(), batch.as_str()];
        let (uses, gains) = (&self.gains.self_draft_in_use, &self.gains.self_draft_gain);
        set_gate(uses, gains, &labels, in_use, gain);
    }

    /// Sets the guard's state of drafts for batches of up to `batch`.
    pub(crate) fn guard_gate(&self, batch: u32, in_use: bool, gain: Option<f64>) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), batch.as_str()];
        let (uses, gains) = (&self.gains.drafts_in_use, &self.gains.gain);
        set_gate(uses, gains, &labels, in_use, gain);
    }
}

/// The counter of rejections, with all limits.
fn rejections(metrics: &Metrics) -> anyhow::Result<IntCounterVec> {
    let rejections = metrics.counter_vec(
        "refrain_worker_rejections_total",
        "Refused or ended chunks, by the limit that was reached.",
        &["limit"],
    )?;
    for limit in RejectionLimit::all() {
        rejections.with_label_values(&[limit.as_str()]);
    }
    Ok(rejections)
}

fn set_gate(
    uses: &IntGaugeVec,
    gains: &GaugeVec,
    labels: &[&str],
    in_use: bool,
    gain: Option<f64>,
) {
    uses.with_label_values(labels).set(i64::from(in_use));
    if let Some(gain) = gain {
        gains.with_label_values(labels).set(gain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_shown_before_it_is_reached() {
        let metrics = Metrics::new().unwrap();
        WorkerMetrics::new(&metrics, "m").unwrap();
        let page = String::from_utf8(metrics.render()).unwrap();
        let mut limits: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("refrain_worker_rejections_total{limit=\""))
            .filter_map(|line| line.strip_suffix("\"} 0"))
            .collect();
        limits.sort_unstable();
        let all = [
            "breaker",
            "descriptors",
            "draining",
            "epoch",
            "reader_stall_ms_max",
            "running_max",
        ];
        assert_eq!(limits, all);
    }
}
