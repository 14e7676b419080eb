//! The families of the worker's metrics.

use super::labels::{ContextOrigin, ParkingOutcome, RejectionLimit};

/// Buckets of the time to propose a draft, seconds.
const PROPOSE_BUCKETS: &[f64] = &[
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2,
];

/// Buckets of the requests in a step.
const BATCH_BUCKETS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// Buckets of the accepted tokens of a draft.
const ACCEPTED_BUCKETS: &[f64] = &[
    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0,
];

/// Buckets of tokens per step.
const LENGTH_BUCKETS: &[f64] = &[
    1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0,
];

refrain_service_kit::metric_families! {
    /// The families of the worker, with those of streaming engines.
    pub(crate) struct WorkerFamilies {
        /// Emitted tokens.
        pub(super) goodput_tokens: IntCounterVec = "refrain_goodput_tokens_total" ["model"],
        /// Duration of engine steps, seconds. For a streaming engine: the gaps between its events.
        pub(super) step_seconds: CounterVec = "refrain_engine_step_seconds_total" ["model"],
        /// Share of that duration that the engine's own head or draft model took, seconds.
        pub(super) draft_seconds: CounterVec = "refrain_engine_draft_seconds_total" ["model"],
        /// Time to propose a draft for one request.
        pub(crate) propose_seconds: Histogram = "refrain_worker_propose_seconds" in PROPOSE_BUCKETS,
        /// Requests in an engine step.
        pub(crate) step_batch: Histogram = "refrain_worker_step_batch_requests" in BATCH_BUCKETS,
        /// Running chunks.
        pub(crate) chunks_running: IntGauge = "refrain_worker_chunks_running",
        /// Version of the weights, as the engine or a trainer told it last.
        pub(super) weight_version: IntGauge = "refrain_worker_weight_version",
        /// Whether a trainer has paused the worker.
        pub(super) paused: IntGauge = "refrain_worker_paused",
        /// Chunks that the worker holds back because it is paused.
        pub(super) held_chunks: IntGauge = "refrain_worker_held_chunks",
        /// Orders of trainers, by kind and outcome.
        pub(super) orders: IntCounterVec = "refrain_worker_orders_total" ["order", "outcome"],
        /// Ended chunks, by outcome.
        pub(super) chunks: IntCounterVec = "refrain_worker_chunks_total" ["outcome"],
        /// Refused or ended chunks, by the limit that was reached.
        pub(super) rejections: IntCounterVec =
            "refrain_worker_rejections_total" ["limit"] with RejectionLimit::LABELS,
        /// Requests that are parked between two chunks.
        pub(crate) parked_requests: IntGauge = "refrain_worker_parked_requests",
        /// Tokens of their texts.
        pub(crate) parked_tokens: IntGauge = "refrain_worker_parked_tokens",
        /// Parked requests by their fate.
        pub(super) parking: IntCounterVec =
            "refrain_worker_parking_total" ["outcome"] with ParkingOutcome::LABELS,
        /// Context tokens of chunks that began, by their origin: sent by the gateway, or parked here.
        pub(super) context_tokens: IntCounterVec =
            "refrain_worker_context_tokens_total" ["origin"] with ContextOrigin::LABELS,
        /// Engine steps, or responses of a streaming engine, that failed as a whole.
        pub(crate) engine_failures: IntCounter = "refrain_worker_engine_failures_total",
        /// Repeated attempts to open a stream of a streaming engine.
        pub(crate) engine_retries: IntCounter = "refrain_worker_engine_retries_total",

        /// Engine steps that sampled, counted per request.
        pub(super) steps: IntCounterVec = "refrain_spec_steps_total" ["model", "source", "scope"],
        /// Draft tokens offered to the engine.
        pub(super) drafted: IntCounterVec =
            "refrain_spec_drafted_tokens_total" ["model", "source", "scope"],
        /// Draft tokens that the engine accepted.
        pub(super) accepted: IntCounterVec =
            "refrain_spec_accepted_tokens_total" ["model", "source", "scope"],
        /// Emitted tokens, including the bonus token of each step.
        pub(super) emitted: IntCounterVec =
            "refrain_spec_emitted_tokens_total" ["model", "source", "scope"],
        /// Accepted tokens of a draft, of one source. A draft whose position n was accepted has n or more.
        pub(super) accepted_per_draft: HistogramVec =
            "refrain_spec_accepted_per_draft" ["model", "source"] in ACCEPTED_BUCKETS,
        /// Decisions of the router per request and step, with their reason.
        pub(super) decisions: IntCounterVec =
            "refrain_spec_decisions_total" ["model", "decision", "reason"],
        /// Mean tokens per step of a chunk, including the bonus token.
        pub(super) accepted_length: HistogramVec =
            "refrain_spec_accepted_length" ["model"] in LENGTH_BUCKETS,
        /// Draft tokens that the router expected to be accepted.
        pub(super) expected_tokens: CounterVec =
            "refrain_spec_expected_tokens_total" ["model", "source"],
        /// Accepted tokens of the drafts that the router had an expectation for.
        pub(super) expected_accepted: IntCounterVec =
            "refrain_spec_expected_accepted_tokens_total" ["model", "source"],
        /// Tokens of suffix drafts that the goodput router admitted to the step or refused. Requests that the engine
        /// drafts for are left out.
        pub(super) budget: IntCounterVec = "refrain_spec_budget_tokens_total" ["model", "outcome"],
        /// Calls that exchange acceptance statistics with the draft store, by outcome.
        pub(super) statistics_calls: IntCounterVec =
            "refrain_spec_statistics_calls_total" ["model", "outcome"],

        /// SCORE that a suffix draft had to exceed in the last step (score router).
        pub(super) threshold: GaugeVec = "refrain_spec_threshold" ["model"],
        /// Recent mean tokens per step with the engine's own head or draft model, including the bonus token.
        pub(super) self_draft_accepted_length: GaugeVec =
            "refrain_self_draft_accepted_length" ["model", "source"],
        /// Throughput with the engine's own head or draft model divided by the throughput without, by batch size
        /// (upper bound of its bucket).
        pub(super) self_draft_gain: GaugeVec =
            "refrain_self_draft_gain_ratio" ["model", "source", "batch"],
        /// 1 while the engine's own head or draft model may be used, by batch size (upper bound of its bucket).
        pub(super) self_draft_in_use: IntGaugeVec =
            "refrain_self_draft_in_use" ["model", "source", "batch"],
        /// Recent tokens per second with drafts over those of plain decoding, by batch size (upper bound of its
        /// bucket). Absent while the error is above 0.2 or unknown, in the first minute, and after two idle minutes.
        pub(super) gain: GaugeVec = "refrain_spec_gain_ratio" ["model", "batch"],
        /// Two standard errors of the gain from drafts, as a share of it, by batch size (upper bound of its bucket).
        pub(super) gain_error: GaugeVec = "refrain_spec_gain_error_ratio" ["model", "batch"],
        /// Steps that the gain from drafts rests on, plain and with drafts, by batch size (upper bound of its
        /// bucket).
        pub(super) gain_steps: IntGaugeVec = "refrain_spec_gain_steps" ["model", "batch", "side"],
        /// 1 while drafts are in use, by batch size (upper bound of its bucket). For the score router: suffix drafts
        /// only.
        pub(super) drafts_in_use: IntGaugeVec = "refrain_spec_in_use" ["model", "batch"],
        /// Recent mean difference between the expected and the real duration of steps, as a share of the real one.
        pub(super) step_cost_error: GaugeVec = "refrain_engine_step_cost_error_ratio" ["model"],

        /// Requests in a streaming engine by its own report, running or waiting.
        pub(super) engine_requests: IntGaugeVec = "refrain_engine_requests" ["model", "state"],
        /// Share of the engine's KV cache that running requests use, by its own report.
        pub(super) engine_kv_usage: GaugeVec = "refrain_engine_kv_usage_ratio" ["model"],
        /// 1 while the circuit breaker of a streaming engine is open, because the engine keeps failing.
        pub(super) breaker_open: IntGaugeVec = "refrain_worker_engine_breaker_open" ["model"],
        /// Recent median gap between a streaming engine's events to one request, seconds, by batch size (upper bound
        /// of its bucket). 0: no events yet.
        pub(super) streamed_step: GaugeVec =
            "refrain_engine_streamed_step_seconds" ["model", "batch"],
        /// Introductions of namespaces to a restarted engine with the Refrain plugin inside, by outcome: succeeded,
        /// failed (repeated up to attempts_max times), or expired (the signature was too old).
        pub(super) introductions: IntCounterVec =
            "refrain_worker_introductions_total" ["outcome"] with ["succeeded", "failed", "expired"],
        /// Tokens of past outputs that the primer has sent to a llama-server.
        pub(crate) primer_tokens: IntCounter = "refrain_worker_primer_tokens_total",
        /// Past outputs that it has sent to their ends.
        pub(crate) primer_documents: IntCounter = "refrain_worker_primer_documents_total",
        /// Restarts of the server that the primer has noticed.
        pub(crate) primer_starts: IntCounter = "refrain_worker_primer_starts_total",
        /// Chunks whose namespace is not primed, because their tenant keeps keys or users apart.
        pub(crate) primer_isolated: IntCounter = "refrain_worker_primer_isolated_chunks_total",
        /// Failed calls of the primer: to the store, to look at the server, or to prime it.
        pub(crate) primer_failures: IntCounterVec =
            "refrain_worker_primer_failures_total" ["call"] with ["store", "look", "prime"],
    }
}
