//! The collectors of drafts: their tokens, the router's decisions, and the gain that they bring.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use prometheus::{CounterVec, GaugeVec, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec};
use refrain_protocol::chunk::{DraftScope, DraftSource, StepCounts};
use refrain_service_kit::telemetry::Metrics;

/// Tokens of drafts, and the router's decisions.
#[derive(Clone)]
pub(super) struct DraftMetrics {
    steps: IntCounterVec,
    drafted: IntCounterVec,
    accepted: IntCounterVec,
    emitted: IntCounterVec,
    /// The children of these counters: tokens come too often to look the children up by their labels.
    by_source: Arc<RwLock<HashMap<(DraftSource, DraftScope), SourceCounters>>>,
    pub(super) decisions: IntCounterVec,
    pub(super) accepted_length: HistogramVec,
    pub(super) expected_tokens: CounterVec,
    pub(super) expected_accepted: IntCounterVec,
    pub(super) budget: IntCounterVec,
    pub(super) statistics_calls: IntCounterVec,
}

/// The gain that drafts bring, and whether they are in use.
#[derive(Clone)]
pub(super) struct GainMetrics {
    pub(super) threshold: GaugeVec,
    pub(super) self_draft_accepted_length: GaugeVec,
    pub(super) self_draft_gain: GaugeVec,
    pub(super) self_draft_in_use: IntGaugeVec,
    pub(super) gain: GaugeVec,
    pub(super) drafts_in_use: IntGaugeVec,
    pub(super) step_cost_error: GaugeVec,
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
                "Tokens of suffix drafts that the goodput router admitted to the step or refused. Requests that \
                 the engine drafts for are left out.",
                &["model", "outcome"],
            )?,
            statistics_calls: metrics.counter_vec(
                "refrain_spec_statistics_calls_total",
                "Calls that exchange acceptance statistics with the draft store, by outcome.",
                &["model", "outcome"],
            )?,
        })
    }

    /// Counts the tokens of a step.
    pub(super) fn count(
        &self,
        model: &str,
        source: DraftSource,
        scope: DraftScope,
        counts: StepCounts,
    ) {
        let key = (source, scope);
        let known = self
            .by_source
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(counters) = known.get(&key) {
            counters.add(counts);
            return;
        }
        drop(known);
        let labels = [model, source.as_str(), scope.as_str()];
        let counters = SourceCounters {
            steps: self.steps.with_label_values(&labels),
            drafted: self.drafted.with_label_values(&labels),
            accepted: self.accepted.with_label_values(&labels),
            emitted: self.emitted.with_label_values(&labels),
        };
        counters.add(counts);
        let mut known = self
            .by_source
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.insert(key, counters);
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
                "Throughput with the engine's own head or draft model divided by the throughput without, by batch \
                 size (upper bound of its bucket).",
                &source_batch,
            )?,
            self_draft_in_use: metrics.gauge_vec(
                "refrain_self_draft_in_use",
                "1 while the engine's own head or draft model may be used, by batch size (upper bound of its \
                 bucket).",
                &source_batch,
            )?,
            gain: metrics.float_gauge_vec(
                "refrain_spec_gain_ratio",
                "Throughput with drafts divided by the throughput without, by batch size (upper bound of its \
                 bucket). For the score router: suffix drafts only.",
                &batch,
            )?,
            drafts_in_use: metrics.gauge_vec(
                "refrain_spec_in_use",
                "1 while drafts are in use, by batch size (upper bound of its bucket). For the score router: \
                 suffix drafts only.",
                &batch,
            )?,
            step_cost_error: metrics.float_gauge_vec(
                "refrain_engine_step_cost_error_ratio",
                "Recent mean difference between the expected and the real duration of steps, as a share of the \
                 real one.",
                &["model"],
            )?,
        })
    }
}
