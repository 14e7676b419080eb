//! The families of the gateway's metrics.

use refrain_service_kit::telemetry::{REQUEST_SECONDS_BUCKETS, SECONDS_BUCKETS};

/// Buckets of tokens per request: powers of four, as the OpenTelemetry conventions advise.
const TOKEN_BUCKETS: &[f64] = &[
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
];

/// Buckets of the time between two steps, seconds.
const GAP_BUCKETS: &[f64] = &[
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
];

refrain_service_kit::metric_families! {
    /// The families, with names of OpenTelemetry's GenAI conventions where these have one.
    pub(crate) struct GatewayFamilies {
        /// Tokens per request.
        pub(crate) token_usage: HistogramVec =
            "gen_ai_client_token_usage" ["tenant", "model", "token_type"] in TOKEN_BUCKETS,
        /// Seconds from the head of a request to its last token.
        pub(crate) request_seconds: HistogramVec =
            "gen_ai_server_request_duration_seconds" ["tenant", "model"] in REQUEST_SECONDS_BUCKETS,
        /// Seconds from the head of a request to its first token, for each choice. Rollouts may wait for long.
        pub(crate) first_token_seconds: HistogramVec =
            "gen_ai_server_time_to_first_token_seconds" ["tenant", "model", "class"] in REQUEST_SECONDS_BUCKETS,
        /// Seconds per token after the first one, mean over a choice.
        pub(crate) per_token_seconds: HistogramVec =
            "gen_ai_server_time_per_output_token_seconds" ["tenant", "model"] in SECONDS_BUCKETS,
        /// Interactive requests in flight. One with n choices counts as n.
        pub(crate) in_flight: IntGauge = "refrain_gateway_requests_in_flight",
        /// Rollouts in flight. One with n choices counts as n.
        pub(crate) rollouts: IntGauge = "refrain_gateway_rollouts_in_flight",
        /// Prompts by which equal ones are found, so that their outputs share drafts.
        pub(crate) implicit_groups: IntGauge = "refrain_gateway_implicit_groups",
        /// Request bodies that are arriving.
        pub(crate) bodies: IntGauge = "refrain_gateway_bodies_arriving",
        /// Requests of trainers that are held back until there is room for them.
        pub(crate) trainer_held: IntGauge = "refrain_gateway_trainer_requests_held",
        /// Bytes of large bodies that are being parsed and tokenized.
        pub(crate) tokenizing: IntGauge = "refrain_gateway_tokenizing_bytes",
        /// Bytes of large bodies that wait to be parsed and tokenized.
        pub(crate) tokenizing_waiting: IntGauge = "refrain_gateway_tokenizing_waiting_bytes",
        /// Forms of outputs that are being compiled.
        pub(crate) forms_compiling: IntGauge = "refrain_gateway_forms_compiling",
        /// Forms of outputs that wait to be compiled.
        pub(crate) forms_waiting: IntGauge = "refrain_gateway_forms_waiting",
        /// Forms of a model whose verdict is kept.
        pub(crate) form_verdicts: IntGaugeVec = "refrain_gateway_form_verdicts" ["model"],
        /// Responses that are stored, to be continued or read again.
        pub(crate) responses: IntGauge = "refrain_gateway_responses_stored",
        /// Bytes of these responses with their conversations.
        pub(crate) responses_bytes: IntGauge = "refrain_gateway_responses_stored_bytes",
        /// Choices that continued after a chunk failed.
        pub(crate) continuations: IntCounter = "refrain_gateway_continuations_total",
        /// Tool calls in outputs. A failed one could not be parsed and came as text, or broke off. A dropped one was
        /// left out, because the client wants one call at a time.
        pub(crate) tool_calls: IntCounterVec = "refrain_gateway_tool_calls_total" ["model", "outcome"],
        /// Registrations of groups in the draft store, by outcome.
        pub(crate) group_registrations: IntCounterVec =
            "refrain_gateway_group_registrations_total" ["outcome"] with ["done", "failed"],
        /// Questions to the draft store for the lengths of earlier outputs to a prompt, by what it knew.
        pub(crate) length_estimates: IntCounterVec =
            "refrain_gateway_length_estimates_total" ["outcome"] with ["known", "unknown", "failed"],
        /// Requests by their final status; 499 means that the client went away. A request of an unknown caller has
        /// the tenant `none`, and one that was refused before its model was known has the model `none`.
        pub(crate) requests: IntCounterVec = "refrain_gateway_requests_total" ["tenant", "model", "status"],
        /// Choices that ended, by the reason in their answers. An `unfinished` one failed, or its client left.
        pub(super) choices: IntCounterVec = "refrain_gateway_choices_total" ["tenant", "model", "finish_reason"],
        /// Seconds between the arrivals of two steps of a choice. A step has one token or more.
        pub(super) step_gap_seconds: HistogramVec =
            "refrain_gateway_step_gap_seconds" ["tenant", "model"] in GAP_BUCKETS,
        /// Seconds of a request that workers spent on reading contexts (`prefill`), and on the output after it
        /// (`decode`). Choices add up.
        pub(crate) phase_seconds: HistogramVec =
            "refrain_gateway_phase_seconds" ["model", "phase"] in SECONDS_BUCKETS,
    }
}
