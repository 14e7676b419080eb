//! The engine's metrics.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};
use refrain_protocol::ApiError;
use refrain_protocol::engine::{DrafterKind, EngineLoad};
use refrain_service_kit::telemetry::Metrics;

use crate::engine::StepReport;

/// Buckets start at 0.1 ms, because a step of a small model takes less than 1 ms.
const STEP_SECONDS_BUCKETS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    30.0,
];

/// The registered metrics of one engine.
#[derive(Clone)]
pub(crate) struct EngineMetrics {
    step_seconds: Histogram,
    computed: IntCounter,
    cached: IntCounter,
    emitted: IntCounter,
    accepted: IntCounter,
    self_drafted: IntCounter,
    text_rows: IntCounter,
    draft_rows: IntCounter,
    states_dropped: IntCounter,
    states_held: IntGauge,
    rejections: IntCounterVec,
    expired: IntCounter,
    panics: IntCounter,
    sessions_open: IntGauge,
    sessions_kept: IntGauge,
    kv_tokens: IntGauge,
    steps_waiting: IntGauge,
}

impl EngineMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Fails if a name is already registered, such as by a second engine.
    pub(crate) fn new(metrics: &Metrics, drafter: Option<DrafterKind>) -> anyhow::Result<Self> {
        let counter =
            |name: &str, help: &str| metrics.counter(&format!("refrain_engine_{name}_total"), help);
        let drafter = drafter.map_or("none", DrafterKind::as_str);
        let of_drafter = |name: &str, help: &str| -> anyhow::Result<IntCounter> {
            let name = format!("refrain_engine_{name}_total");
            let counter = metrics.counter_vec(&name, help, &["source"])?;
            Ok(counter.with_label_values(&[drafter]))
        };
        let gauge = |name: &str, help: &str| metrics.gauge(&format!("refrain_engine_{name}"), help);
        Ok(EngineMetrics {
            step_seconds: metrics.histogram(
                "refrain_engine_step_seconds",
                "Duration of one step: drafting, forward pass and sampling.",
                STEP_SECONDS_BUCKETS,
            )?,
            computed: counter(
                "computed_tokens",
                "Tokens that the model computed, draft tokens included.",
            )?,
            cached: counter(
                "cached_tokens",
                "Tokens whose KV was reused from another session.",
            )?,
            emitted: counter("emitted_tokens", "Tokens emitted by steps.")?,
            accepted: counter(
                "accepted_draft_tokens",
                "Emitted tokens that were accepted draft tokens.",
            )?,
            self_drafted: of_drafter(
                "self_drafted_tokens",
                "Verified draft tokens of the engine's own head or draft model.",
            )?,
            text_rows: of_drafter(
                "self_draft_follow_rows",
                "Text tokens that the head or draft model computed to catch up with sessions.",
            )?,
            draft_rows: of_drafter(
                "self_draft_guess_rows",
                "Draft tokens that the head or draft model computed to continue drafts.",
            )?,
            states_dropped: counter(
                "eagle3_dropped_tokens",
                "Tokens whose hidden states were dropped before the head read them.",
            )?,
            states_held: gauge(
                "eagle3_held_tokens",
                "Tokens whose hidden states are held for the head, kept sessions included.",
            )?,
            rejections: metrics.counter_vec(
                "refrain_engine_rejections_total",
                "Refused steps and items, by limit or fault.",
                &["limit"],
            )?,
            expired: counter(
                "expired_sessions",
                "Sessions closed because they were idle.",
            )?,
            panics: counter("panics", "Steps that panicked.")?,
            sessions_open: gauge("sessions_open", "Open sessions.")?,
            sessions_kept: gauge("sessions_kept", "Finished sessions whose KV is kept.")?,
            kv_tokens: gauge("kv_tokens", "KV tokens in use, kept sessions included.")?,
            steps_waiting: gauge("steps_waiting", "Steps waiting for the one in progress.")?,
        })
    }

    pub(crate) fn stepped(&self, report: &StepReport, seconds: f64) {
        self.step_seconds.observe(seconds);
        self.computed.inc_by(report.computed_tokens as u64);
        self.cached.inc_by(report.cached_tokens as u64);
        self.text_rows.inc_by(report.draft_rows.text as u64);
        self.draft_rows.inc_by(report.draft_rows.draft as u64);
        self.states_dropped.inc_by(report.states_dropped);
        for result in &report.results {
            match result {
                Ok(output) => {
                    self.self_drafted.inc_by(output.self_drafted.into());
                    self.emitted.inc_by(output.emitted.len() as u64);
                    self.accepted.inc_by(output.accepted_nodes.len() as u64);
                }
                Err(error) => self.rejected(error),
            }
        }
    }

    /// Counts a refusal by its code. This crate has few codes, so the label is bounded.
    pub(crate) fn rejected(&self, error: &ApiError) {
        let limit = error.code.as_deref().unwrap_or(error.kind.openai_type());
        self.rejections.with_label_values(&[limit]).inc();
    }

    pub(crate) fn panicked(&self) {
        self.panics.inc();
    }

    pub(crate) fn expired(&self, sessions: usize) {
        self.expired.inc_by(sessions as u64);
    }

    pub(crate) fn load(&self, load: &EngineLoad, state_tokens: u64) {
        self.states_held.set(state_tokens.cast_signed());
        self.sessions_open.set(load.sessions_open.into());
        self.sessions_kept.set(load.sessions_kept.into());
        self.kv_tokens.set(load.kv_tokens.cast_signed());
        self.steps_waiting.set(load.steps_waiting.into());
    }
}
