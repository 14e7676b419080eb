//! Metrics of the plugin.

/// Label of output that had to wait with its request, or was not merged, since too much was queued.
pub(crate) const QUEUED_TOKENS_MAX: &str = "queued_tokens_max";
/// Label of requests whose namespace token was refused.
pub(crate) const TOKEN: &str = "token";
/// Label of requests with fields that cannot be read.
pub(crate) const FIELDS: &str = "fields";
/// Label of prompts that are not drafted from, since too many wait to be indexed.
pub(crate) const READING_TOKENS_MAX: &str = "reading_tokens_max";
/// Label of output that did not fit the index of its namespace.
pub(crate) const INDEX: &str = "index";

refrain_service_kit::metric_families! {
    /// Collectors of the plugin itself. A clone shares them.
    #[derive(Clone)]
    pub(crate) struct PluginMetrics {
        /// Drafts offered to the engine.
        pub(crate) drafts: IntCounter = "refrain_client_drafts_total",
        /// Draft tokens offered to the engine.
        pub(crate) drafted: IntCounter = "refrain_client_drafted_tokens_total",
        /// Offered draft tokens that the engine accepted.
        pub(crate) accepted: IntCounter = "refrain_client_accepted_tokens_total",
        /// Tokens that the engine emitted.
        pub(crate) emitted: IntCounter = "refrain_client_emitted_tokens_total",
        /// Running requests.
        pub(crate) requests: IntGauge = "refrain_client_requests",
        /// Output tokens queued for the background thread.
        pub(crate) queued_tokens: IntGauge = "refrain_client_queued_tokens",
        /// Tokens of interrupted requests that are remembered.
        pub(crate) paused_tokens: IntGauge = "refrain_client_paused_tokens",
        /// Tokens of long prompts that wait to be indexed.
        pub(crate) reading_tokens: IntGauge = "refrain_client_reading_tokens",
        /// Tokens of segments on each device of an engine that drafts there.
        pub(crate) device_tokens: IntGauge = "refrain_client_device_tokens",
        /// Interrupted requests that were forgotten for want of room.
        pub(crate) forgotten: IntCounter = "refrain_client_forgotten_requests_total",
        /// Times that a step went without a part of its drafts, since another thread held their index.
        pub(crate) busy: IntCounter = "refrain_client_busy_total",
        /// Times that the configured token was expired or wrong, or its file could not be read.
        pub(crate) token_failures: IntCounter = "refrain_client_token_failures_total",
        /// Requests and outputs that were rejected in part, by limit or fault: requests without drafts of their
        /// namespace (token, fields) or of their own prompt (reading_tokens_max), and outputs that had to wait or
        /// were not merged (queued_tokens_max, index).
        pub(crate) rejections: IntCounterVec = "refrain_client_rejections_total" ["limit"]
            with [QUEUED_TOKENS_MAX, TOKEN, FIELDS, READING_TOKENS_MAX, INDEX],
    }
}

impl PluginMetrics {
    pub(crate) fn rejected(&self, limit: &str) {
        self.rejections.with_label_values(&[limit]).inc();
    }
}
