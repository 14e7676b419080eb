//! What a worker tells Prometheus.

mod streaming;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use prometheus::{
    Counter, CounterVec, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec,
};
use refrain_draft_replica::{ReplicaMetrics, UploadMetrics};
use refrain_protocol::chunk::{DraftScope, DraftSource, StepCounts};
use refrain_protocol::engine::DrafterKind;
use refrain_service_kit::telemetry::Metrics;

pub(crate) use self::streaming::StreamingMetrics;

/// The worker's collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WorkerMetrics {
    model: String,
    spec_steps: IntCounterVec,
    spec_drafted: IntCounterVec,
    spec_accepted: IntCounterVec,
    spec_emitted: IntCounterVec,
    /// Their children: tokens come too often to look them up by their labels.
    spec: Arc<RwLock<HashMap<(DraftSource, DraftScope), SpecCounters>>>,
    spec_decisions: IntCounterVec,
    accepted_length: HistogramVec,
    goodput_tokens: IntCounter,
    step_seconds: Counter,
    draft_seconds: Counter,
    expected_tokens: CounterVec,
    expected_accepted: IntCounterVec,
    budget_slots: IntCounterVec,
    step_cost_error: GaugeVec,
    chances_calls: IntCounterVec,
    threshold: GaugeVec,
    self_draft_accepted_length: GaugeVec,
    self_draft_gain: GaugeVec,
    self_draft_in_use: IntGaugeVec,
    gain: GaugeVec,
    drafts_in_use: IntGaugeVec,
    pub(crate) propose_seconds: Histogram,
    pub(crate) step_batch: Histogram,
    pub(crate) chunks_running: IntGauge,
    pub(crate) chunks: IntCounterVec,
    pub(crate) rejections: IntCounterVec,
    pub(crate) engine_failures: IntCounter,
    pub(crate) engine_retries: IntCounter,
    pub(crate) primed_tokens: IntCounter,
    /// Of engines that generate by themselves.
    pub(crate) streaming: StreamingMetrics,
    pub(crate) memory: ReplicaMetrics,
    pub(crate) harvest: UploadMetrics,
}

/// The counters of a source and scope.
struct SpecCounters {
    steps: IntCounter,
    drafted: IntCounter,
    accepted: IntCounter,
    emitted: IntCounter,
}

impl SpecCounters {
    fn add(&self, counts: StepCounts) {
        self.steps.inc_by(counts.steps);
        self.drafted.inc_by(counts.drafted);
        self.accepted.inc_by(counts.accepted);
        self.emitted.inc_by(counts.emitted);
    }
}

impl WorkerMetrics {
    /// Registers everything under the model's name.
    ///
    /// # Errors
    /// A name is taken: two workers in one registry.
    pub(crate) fn new(metrics: &Metrics, model: &str) -> anyhow::Result<Self> {
        let spec = ["model", "source", "scope"];
        let rejections = metrics.counter_vec(
            "refrain_worker_rejections_total",
            "Chunks refused, by the limit that was reached.",
            &["limit"],
        )?;
        // A rate over a counter that does not exist yet shows nothing, so these do from the start.
        for limit in [
            "running_max",
            "epoch",
            "draining",
            "breaker",
            "descriptors",
            "reader_stall_ms_max",
        ] {
            rejections.with_label_values(&[limit]);
        }
        Ok(WorkerMetrics {
            model: model.to_owned(),
            spec_steps: metrics.counter_vec(
                "refrain_spec_steps_total",
                "Engine steps that sampled, per request.",
                &spec,
            )?,
            spec_drafted: metrics.counter_vec(
                "refrain_spec_drafted_tokens_total",
                "Draft tokens offered to the engine.",
                &spec,
            )?,
            spec_accepted: metrics.counter_vec(
                "refrain_spec_accepted_tokens_total",
                "Draft tokens that the engine accepted.",
                &spec,
            )?,
            spec_emitted: metrics.counter_vec(
                "refrain_spec_emitted_tokens_total",
                "Tokens emitted, the target's own included.",
                &spec,
            )?,
            spec: Arc::default(),
            spec_decisions: metrics.counter_vec(
                "refrain_spec_decisions_total",
                "What the router decided for a step, and why.",
                &["model", "decision", "reason"],
            )?,
            accepted_length: metrics.histogram_vec(
                "refrain_spec_accepted_length",
                "Tokens per step of a request, the target's own included.",
                &["model"],
                &[
                    1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0,
                ],
            )?,
            goodput_tokens: metrics.counter_vec(
                "refrain_goodput_tokens_total",
                "Tokens kept.",
                &["model"],
            )?
            .with_label_values(&[model]),
            step_seconds: metrics.float_counter_vec(
                "refrain_engine_step_seconds_total",
                "Seconds of engine steps; of a streaming engine, told by the gaps between what it sends.",
                &["model"],
            )?
            .with_label_values(&[model]),
            draft_seconds: metrics.float_counter_vec(
                "refrain_engine_draft_seconds_total",
                "Seconds of engine steps that the engine's own head or draft model took.",
                &["model"],
            )?
            .with_label_values(&[model]),
            expected_tokens: metrics.float_counter_vec(
                "refrain_spec_expected_tokens_total",
                "Draft tokens that the goodput router expected to be accepted.",
                &["model", "source"],
            )?,
            expected_accepted: metrics.counter_vec(
                "refrain_spec_expected_accepted_tokens_total",
                "Draft tokens that were accepted of the drafts that the goodput router had expected something of.",
                &["model", "source"],
            )?,
            budget_slots: metrics.counter_vec(
                "refrain_spec_budget_tokens_total",
                "Tokens of suffix drafts, by whether the goodput router found them worth their time; those of requests that the engine drafts for apart.",
                &["model", "outcome"],
            )?,
            step_cost_error: metrics.float_gauge_vec(
                "refrain_engine_step_cost_error_ratio",
                "How far steps lately took longer or shorter than expected, as a share of what they took.",
                &["model"],
            )?,
            chances_calls: metrics.counter_vec(
                "refrain_spec_chances_calls_total",
                "Calls that told the draft store what drafts were worth here, by whether it answered.",
                &["model", "outcome"],
            )?,
            threshold: metrics.float_gauge_vec(
                "refrain_spec_threshold",
                "SCORE that a suffix draft had to exceed in the last step, by the score router.",
                &["model"],
            )?,
            self_draft_accepted_length: metrics.float_gauge_vec(
                "refrain_self_draft_accepted_length",
                "Tokens per step with the engine's own head or draft model, lately, the target's own included.",
                &["model", "source"],
            )?,
            self_draft_gain: metrics.float_gauge_vec(
                "refrain_self_draft_gain_ratio",
                "Tokens per second with the engine's own head or draft model / without, by the largest batch measured together.",
                &["model", "source", "batch"],
            )?,
            self_draft_in_use: metrics.gauge_vec(
                "refrain_self_draft_in_use",
                "1 while the engine's own head or draft model may be used, by the largest batch measured together.",
                &["model", "source", "batch"],
            )?,
            gain: metrics.float_gauge_vec(
                "refrain_spec_gain_ratio",
                "Tokens per second with drafts / without, by the largest batch measured together; of the score router, suffix drafts.",
                &["model", "batch"],
            )?,
            drafts_in_use: metrics.gauge_vec(
                "refrain_spec_in_use",
                "1 while drafts are in use, by the largest batch measured together; of the score router, suffix drafts.",
                &["model", "batch"],
            )?,
            propose_seconds: metrics.histogram(
                "refrain_worker_propose_seconds",
                "Time to draft for one request.",
                &[
                    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2,
                ],
            )?,
            step_batch: metrics.histogram(
                "refrain_worker_step_batch_requests",
                "Requests in an engine step.",
                &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
            )?,
            chunks_running: metrics
                .gauge("refrain_worker_chunks_running", "Chunks being decoded.")?,
            chunks: metrics.counter_vec(
                "refrain_worker_chunks_total",
                "Chunks by how they ended.",
                &["outcome"],
            )?,
            rejections,
            engine_failures: metrics.counter(
                "refrain_worker_engine_failures_total",
                "Engine steps, or answers of a streaming engine, that failed as a whole.",
            )?,
            engine_retries: metrics.counter(
                "refrain_worker_engine_retries_total",
                "Second attempts to start an answer of a streaming engine, before its first token.",
            )?,
            primed_tokens: metrics.counter(
                "refrain_primed_tokens_total",
                "Draft tokens that were put into the n-gram pool of a llama-server.",
            )?,
            streaming: StreamingMetrics::new(metrics, model)?,
            memory: ReplicaMetrics::new(metrics)?,
            harvest: UploadMetrics::new(metrics)?,
        })
    }

    pub(crate) fn step(&self, source: DraftSource, scope: DraftScope, counts: StepCounts) {
        self.goodput_tokens.inc_by(counts.emitted);
        let key = (source, scope);
        let known = self.spec.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = known.get(&key) {
            counters.add(counts);
            return;
        }
        drop(known);
        let labels = [self.model.as_str(), source.as_str(), scope.as_str()];
        let counters = SpecCounters {
            steps: self.spec_steps.with_label_values(&labels),
            drafted: self.spec_drafted.with_label_values(&labels),
            accepted: self.spec_accepted.with_label_values(&labels),
            emitted: self.spec_emitted.with_label_values(&labels),
        };
        counters.add(counts);
        let mut known = self.spec.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(key, counters);
    }

    pub(crate) fn decision(&self, (decision, reason): (&str, &str)) {
        self.spec_decisions
            .with_label_values(&[self.model.as_str(), decision, reason])
            .inc();
    }

    pub(crate) fn engine_step(&self, seconds: f64, draft_seconds: f64) {
        self.step_seconds.inc_by(seconds.max(0.0));
        self.draft_seconds.inc_by(draft_seconds.max(0.0));
    }

    /// Draft tokens that a budget admitted and refused.
    pub(crate) fn budget(&self, admitted: u32, refused: u32) {
        for (outcome, tokens) in [("admitted", admitted), ("refused", refused)] {
            self.budget_slots
                .with_label_values(&[self.model.as_str(), outcome])
                .inc_by(u64::from(tokens));
        }
    }

    /// What was expected of a draft, and what came of it.
    pub(crate) fn expectation(&self, source: DraftSource, expected: f32, accepted: u32) {
        let labels = [self.model.as_str(), source.as_str()];
        self.expected_tokens
            .with_label_values(&labels)
            .inc_by(f64::from(expected.max(0.0)));
        self.expected_accepted
            .with_label_values(&labels)
            .inc_by(u64::from(accepted));
    }

    /// The store was told what drafts were worth.
    pub(crate) fn chances_call(&self, is_answered: bool) {
        let outcome = if is_answered { "answered" } else { "failed" };
        self.chances_calls
            .with_label_values(&[self.model.as_str(), outcome])
            .inc();
    }

    pub(crate) fn step_cost_error(&self, share: f64) {
        self.step_cost_error
            .with_label_values(&[self.model.as_str()])
            .set(share);
    }

    pub(crate) fn threshold(&self, in_force: f32) {
        self.threshold
            .with_label_values(&[self.model.as_str()])
            .set(f64::from(in_force));
    }

    pub(crate) fn self_draft_accepted_length(&self, kind: DrafterKind, tokens: f64) {
        self.self_draft_accepted_length
            .with_label_values(&[self.model.as_str(), kind.as_str()])
            .set(tokens);
    }

    /// What the gate knows of batches of up to `batch`.
    pub(crate) fn self_draft_gate(
        &self,
        kind: DrafterKind,
        batch: u32,
        in_use: bool,
        gain: Option<f64>,
    ) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), kind.as_str(), batch.as_str()];
        let (uses, gains) = (&self.self_draft_in_use, &self.self_draft_gain);
        set_gate(uses, gains, &labels, in_use, gain);
    }

    /// What the guard knows of drafts in batches of up to `batch`.
    pub(crate) fn guard_gate(&self, batch: u32, in_use: bool, gain: Option<f64>) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), batch.as_str()];
        set_gate(&self.drafts_in_use, &self.gain, &labels, in_use, gain);
    }

    pub(crate) fn request_length(&self, emitted: u64, steps: u64) {
        if steps > 0 {
            self.accepted_length
                .with_label_values(&[self.model.as_str()])
                .observe(emitted as f64 / steps as f64);
        }
    }
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
