//! Metrics of drafts: their tokens, the router's decisions, and the gain that they bring.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use prometheus::{CounterVec, GaugeVec, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec};
use refrain_protocol::chunk::{DraftScope, DraftSource, StepCounts};
use refrain_protocol::engine::DrafterKind;
use refrain_service_kit::telemetry::Metrics;

use super::WorkerMetrics;

/// Tokens of drafts, and the router's decisions.
#[derive(Clone)]
pub(super) struct DraftMetrics {
    steps: IntCounterVec,
    drafted: IntCounterVec,
    accepted: IntCounterVec,
    emitted: IntCounterVec,
    /// The children of these counters: tokens come too often to look the children up by their labels.
    by_source: Arc<RwLock<HashMap<(DraftSource, DraftScope), SourceCounters>>>,
    decisions: IntCounterVec,
    accepted_length: HistogramVec,
    expected_tokens: CounterVec,
    expected_accepted: IntCounterVec,
    budget: IntCounterVec,
    chances_calls: IntCounterVec,
}

/// The gain that drafts bring, and whether they are in use.
#[derive(Clone)]
pub(super) struct GainMetrics {
    threshold: GaugeVec,
    self_draft_accepted_length: GaugeVec,
    self_draft_gain: GaugeVec,
    self_draft_in_use: IntGaugeVec,
    gain: GaugeVec,
    drafts_in_use: IntGaugeVec,
    step_cost_error: GaugeVec,
}

/// The counters of one source and scope.
struct SourceCounters {
    steps: IntCounter,
    drafted: IntCounter,
    accepted: IntCounter,
    emitted: IntCounter,
}

impl SourceCounters {
    fn add(&self, counts: StepCounts) {
        self.steps.inc_by(counts.steps);
        self.drafted.inc_by(counts.drafted);
        self.accepted.inc_by(counts.accepted);
        self.emitted.inc_by(counts.emitted);
    }
}

impl DraftMetrics {
    pub(super) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let source = ["model", "source", "scope"];
        Ok(DraftMetrics {
            steps: metrics.counter_vec(
                "refrain_spec_steps_total",
                "Engine steps that sampled, counted per request.",
                &source,
            )?,
            drafted: metrics.counter_vec(
                "refrain_spec_drafted_tokens_total",
                "Draft tokens offered to the engine.",
                &source,
            )?,
            accepted: metrics.counter_vec(
                "refrain_spec_accepted_tokens_total",
                "Draft tokens that the engine accepted.",
                &source,
            )?,
            emitted: metrics.counter_vec(
                "refrain_spec_emitted_tokens_total",
                "Emitted tokens, including the bonus token of each step.",
                &source,
            )?,
            by_source: Arc::default(),
            decisions: metrics.counter_vec(
                "refrain_spec_decisions_total",
                "Decisions of the router per request and step, with their reason.",
                &["model", "decision", "reason"],
            )?,
            accepted_length: metrics.histogram_vec(
                "refrain_spec_accepted_length",
                "Mean tokens per step of a chunk, including the bonus token.",
                &["model"],
                &[
                    1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0,
                ],
            )?,
            expected_tokens: metrics.float_counter_vec(
                "refrain_spec_expected_tokens_total",
                "Draft tokens that the router expected to be accepted.",
                &["model", "source"],
            )?,
            expected_accepted: metrics.counter_vec(
                "refrain_spec_expected_accepted_tokens_total",
                "Accepted tokens of the drafts that the router had an expectation for.",
                &["model", "source"],
            )?,
            budget: metrics.counter_vec(
                "refrain_spec_budget_tokens_total",
                "Tokens of suffix drafts that the goodput router admitted to the step or refused. Requests that the engine drafts for are left out.",
                &["model", "outcome"],
            )?,
            chances_calls: metrics.counter_vec(
                "refrain_spec_chances_calls_total",
                "Calls that exchange acceptance statistics with the draft store, by outcome.",
                &["model", "outcome"],
            )?,
        })
    }
}

impl GainMetrics {
    pub(super) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let batch = ["model", "batch"];
        let source_batch = ["model", "source", "batch"];
        Ok(GainMetrics {
            threshold: metrics.float_gauge_vec(
                "refrain_spec_threshold",
                "SCORE that a suffix draft had to exceed in the last step (score router).",
                &["model"],
            )?,
            self_draft_accepted_length: metrics.float_gauge_vec(
                "refrain_self_draft_accepted_length",
                "Recent mean tokens per step with the engine's own head or draft model, including the bonus token.",
                &["model", "source"],
            )?,
            self_draft_gain: metrics.float_gauge_vec(
                "refrain_self_draft_gain_ratio",
                "Throughput with the engine's own head or draft model divided by the throughput without, by batch size (upper bound of its bucket).",
                &source_batch,
            )?,
            self_draft_in_use: metrics.gauge_vec(
                "refrain_self_draft_in_use",
                "1 while the engine's own head or draft model may be used, by batch size (upper bound of its bucket).",
                &source_batch,
            )?,
            gain: metrics.float_gauge_vec(
                "refrain_spec_gain_ratio",
                "Throughput with drafts divided by the throughput without, by batch size (upper bound of its bucket). For the score router: suffix drafts only.",
                &batch,
            )?,
            drafts_in_use: metrics.gauge_vec(
                "refrain_spec_in_use",
                "1 while drafts are in use, by batch size (upper bound of its bucket). For the score router: suffix drafts only.",
                &batch,
            )?,
            step_cost_error: metrics.float_gauge_vec(
                "refrain_engine_step_cost_error_ratio",
                "Recent mean difference between the expected and the real duration of steps, as a share of the real one.",
                &["model"],
            )?,
        })
    }
}

impl WorkerMetrics {
    /// Counts the tokens of a step.
    pub(crate) fn step(&self, source: DraftSource, scope: DraftScope, counts: StepCounts) {
        self.goodput_tokens.inc_by(counts.emitted);
        let drafts = &self.drafts;
        let key = (source, scope);
        let known = drafts
            .by_source
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = known.get(&key) {
            counters.add(counts);
            return;
        }
        drop(known);
        let labels = [self.model.as_str(), source.as_str(), scope.as_str()];
        let counters = SourceCounters {
            steps: drafts.steps.with_label_values(&labels),
            drafted: drafts.drafted.with_label_values(&labels),
            accepted: drafts.accepted.with_label_values(&labels),
            emitted: drafts.emitted.with_label_values(&labels),
        };
        counters.add(counts);
        let mut known = drafts
            .by_source
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert(key, counters);
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
    pub(crate) fn chances_call(&self, is_answered: bool) {
        let outcome = if is_answered { "answered" } else { "failed" };
        self.drafts
            .chances_calls
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
