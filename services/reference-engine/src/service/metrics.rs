//! The engine's metrics.

use std::sync::Arc;

use refrain_output_grammar::GrammarCompiler;
use refrain_protocol::ApiError;
use refrain_protocol::engine::{DrafterKind, EngineLoad};
use refrain_service_kit::telemetry::Metrics;

use super::pool::PoolMetrics;
use crate::engine::{FORM_WORKING, KV_LOADING, StepReport};
use crate::pool::KvPool;

/// Buckets start at 0.1 ms, because a step of a small model takes less than 1 ms.
const STEP_SECONDS_BUCKETS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    30.0,
];

/// Value of the label `limit` of forms that found the queue of the compiler full.
const FORMS_WAITING: &str = "engine_forms_waiting";

refrain_service_kit::metric_families! {
    /// The families of an engine.
    pub(super) struct EngineFamilies {
        /// Duration of one step: drafting, forward pass and sampling.
        step_seconds: Histogram = "refrain_engine_step_seconds" in STEP_SECONDS_BUCKETS,
        /// Tokens that the model computed, draft tokens included.
        computed: IntCounter = "refrain_engine_computed_tokens_total",
        /// Tokens whose KV was reused from another session.
        cached: IntCounter = "refrain_engine_cached_tokens_total",
        /// Tokens emitted by steps.
        emitted: IntCounter = "refrain_engine_emitted_tokens_total",
        /// Emitted tokens that were taken as the likeliest while another was about as likely. With a backend that
        /// sums in several orders, a draft may change these.
        near_ties: IntCounter = "refrain_engine_near_ties_total",
        /// Emitted tokens that were accepted draft tokens.
        accepted: IntCounter = "refrain_engine_accepted_draft_tokens_total",
        /// Verified draft tokens of the engine's own head or draft model.
        self_drafted: IntCounterVec = "refrain_engine_self_drafted_tokens_total" ["source"],
        /// Text tokens that the head or draft model computed to catch up with sessions.
        text_rows: IntCounterVec = "refrain_engine_self_draft_follow_rows_total" ["source"],
        /// Draft tokens that the head or draft model computed to continue drafts.
        draft_rows: IntCounterVec = "refrain_engine_self_draft_guess_rows_total" ["source"],
        /// Tokens whose hidden states were dropped before the head read them.
        states_dropped: IntCounter = "refrain_engine_eagle3_dropped_tokens_total",
        /// Tokens whose hidden states are held for the head, kept sessions included.
        states_held: IntGauge = "refrain_engine_eagle3_held_tokens",
        /// Refused steps and items, by limit or fault.
        rejections: IntCounterVec = "refrain_engine_rejections_total" ["limit"],
        /// Sessions closed because they were idle.
        pub(super) expired: IntCounter = "refrain_engine_expired_sessions_total",
        /// Parked sessions closed because running requests needed their room.
        pub(super) parked_evicted: IntCounter = "refrain_engine_parked_evicted_total",
        /// Steps that panicked.
        pub(super) panics: IntCounter = "refrain_engine_panics_total",
        /// Open sessions, parked ones included.
        sessions_open: IntGauge = "refrain_engine_sessions_open",
        /// Parked sessions, whose requests are between two chunks.
        sessions_parked: IntGauge = "refrain_engine_sessions_parked",
        /// Finished sessions whose KV is kept.
        sessions_kept: IntGauge = "refrain_engine_sessions_kept",
        /// KV tokens in use, kept sessions included.
        kv_tokens: IntGauge = "refrain_engine_kv_tokens",
        /// Version of the weights.
        pub(super) weight_version: IntGauge = "refrain_engine_weight_version",
        /// Steps waiting for the one in progress.
        steps_waiting: IntGauge = "refrain_engine_steps_waiting",
        /// Forms of outputs that are compiled or wait for it.
        forms_waiting: IntGauge = "refrain_engine_forms_waiting",
        /// Compiled forms that are kept.
        forms_kept: IntGauge = "refrain_engine_forms_kept",
        /// About the bytes of the compiled forms that are kept.
        form_bytes: IntGauge = "refrain_engine_forms_kept_bytes",
        /// Compiled forms that were pushed out of the cache by others.
        forms_pushed_out: IntCounter = "refrain_engine_forms_pushed_out_total",
    }
}

/// The families of an engine, and the kind of its drafter.
pub(super) struct EngineMetrics {
    pub(super) families: EngineFamilies,
    /// Value of the label `source`.
    source: &'static str,
    /// The pool and its metrics, if there is one.
    pool: Option<(Arc<KvPool>, PoolMetrics)>,
}

impl EngineMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Fails if a name is already registered, such as by a second engine.
    pub(super) fn new(
        metrics: &Metrics,
        drafter: Option<DrafterKind>,
        pool: Option<Arc<KvPool>>,
    ) -> anyhow::Result<Self> {
        let families = EngineFamilies::register(metrics.registry())?;
        let source = drafter.map_or("none", DrafterKind::as_str);
        for family in [
            &families.self_drafted,
            &families.text_rows,
            &families.draft_rows,
        ] {
            family.with_label_values(&[source]);
        }
        let pool = match pool {
            Some(pool) => Some((pool, PoolMetrics::new(metrics)?)),
            None => None,
        };
        Ok(EngineMetrics {
            families,
            source,
            pool,
        })
    }

    pub(super) fn stepped(&self, report: &StepReport, seconds: f64) {
        let families = &self.families;
        let source = &[self.source];
        let rows = report.draft_rows;
        families.step_seconds.observe(seconds);
        families.computed.inc_by(report.computed_tokens as u64);
        families
            .text_rows
            .with_label_values(source)
            .inc_by(rows.text as u64);
        families
            .draft_rows
            .with_label_values(source)
            .inc_by(rows.draft as u64);
        families.states_dropped.inc_by(report.states_dropped);
        families.near_ties.inc_by(report.near_ties);
        let self_drafted = families.self_drafted.with_label_values(source);
        for result in &report.results {
            match result {
                Ok(output) => {
                    families.cached.inc_by(output.cached_tokens.into());
                    self_drafted.inc_by(output.self_drafted.into());
                    families.emitted.inc_by(output.emitted.len() as u64);
                    families.accepted.inc_by(output.accepted_nodes.len() as u64);
                }
                // It is only sent again.
                Err(error)
                    if [KV_LOADING, FORM_WORKING]
                        .map(Some)
                        .contains(&error.code.as_deref()) => {}
                Err(error) => self.rejected(error),
            }
        }
    }

    /// Counts a refusal by its code. This crate has few codes, so the label is bounded.
    pub(super) fn rejected(&self, error: &ApiError) {
        let limit = error.code.as_deref().unwrap_or(error.kind.openai_type());
        self.families.rejections.with_label_values(&[limit]).inc();
    }

    /// Publishes what the compiler of forms does. A form that found the queue full is a rejection, although its
    /// session asks again.
    pub(super) fn forms(&self, grammars: &GrammarCompiler) {
        let families = &self.families;
        let gauge = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        // Both counters only grow, and nothing else adds to them.
        let grow = |counter: &prometheus::IntCounter, count: u64| {
            counter.inc_by(count.saturating_sub(counter.get()));
        };
        let kept = grammars.cached();
        families.forms_waiting.set(gauge(grammars.forms_waiting()));
        families.forms_kept.set(gauge(kept.grammars));
        families.form_bytes.set(gauge(kept.grammar_bytes));
        grow(&families.forms_pushed_out, kept.pushed_out);
        let refused = families.rejections.with_label_values(&[FORMS_WAITING]);
        grow(&refused, grammars.forms_refused());
    }

    pub(super) fn load(&self, load: &EngineLoad, state_tokens: u64) {
        let families = &self.families;
        families.states_held.set(state_tokens.cast_signed());
        families.sessions_open.set(load.sessions_open.into());
        families.sessions_parked.set(load.sessions_parked.into());
        families.sessions_kept.set(load.sessions_kept.into());
        families.kv_tokens.set(load.kv_tokens.cast_signed());
        families.steps_waiting.set(load.steps_waiting.into());
        if let Some((pool, metrics)) = &self.pool {
            metrics.publish(pool);
        }
    }
}
