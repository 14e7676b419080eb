//! Metrics of the plugin.

use prometheus::{IntCounter, IntCounterVec, IntGauge};
use refrain_draft_replica::{ReplicaMetrics, UploaderMetrics};
use refrain_service_kit::telemetry::Metrics;

/// All collectors. A clone shares them.
#[derive(Clone)]
pub(crate) struct PluginMetrics {
    pub(crate) drafts: IntCounter,
    pub(crate) drafted: IntCounter,
    pub(crate) accepted: IntCounter,
    pub(crate) emitted: IntCounter,
    pub(crate) requests: IntGauge,
    pub(crate) queued_tokens: IntGauge,
    pub(crate) paused_tokens: IntGauge,
    pub(crate) reading_tokens: IntGauge,
    pub(crate) forgotten: IntCounter,
    pub(crate) busy: IntCounter,
    pub(crate) token_failures: IntCounter,
    pub(crate) rejections: IntCounterVec,
    pub(crate) replica: ReplicaMetrics,
    pub(crate) upload: UploaderMetrics,
}

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

impl PluginMetrics {
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let rejections = metrics.counter_vec(
            "refrain_client_rejections_total",
            "Requests and outputs that were rejected in part, by limit or fault: requests without drafts of their \
             namespace (token, fields) or of their own prompt (reading_tokens_max), and outputs that had to wait or \
             were not merged (queued_tokens_max, index).",
            &["limit"],
        )?;
        for limit in [QUEUED_TOKENS_MAX, TOKEN, FIELDS, READING_TOKENS_MAX, INDEX] {
            rejections.with_label_values(&[limit]);
        }
        Ok(PluginMetrics {
            drafts: metrics.counter(
                "refrain_client_drafts_total",
                "Drafts offered to the engine.",
            )?,
            drafted: metrics.counter(
                "refrain_client_drafted_tokens_total",
                "Draft tokens offered to the engine.",
            )?,
            accepted: metrics.counter(
                "refrain_client_accepted_tokens_total",
                "Offered draft tokens that the engine accepted.",
            )?,
            emitted: metrics.counter(
                "refrain_client_said_tokens_total",
                "Tokens that the engine emitted.",
            )?,
            requests: metrics.gauge("refrain_client_requests", "Running requests.")?,
            queued_tokens: metrics.gauge(
                "refrain_client_queued_tokens",
                "Output tokens queued for the background thread.",
            )?,
            paused_tokens: metrics.gauge(
                "refrain_client_paused_tokens",
                "Tokens of interrupted requests that are remembered.",
            )?,
            reading_tokens: metrics.gauge(
                "refrain_client_reading_tokens",
                "Tokens of long prompts that wait to be indexed.",
            )?,
            forgotten: metrics.counter(
                "refrain_client_forgotten_requests_total",
                "Interrupted requests that were forgotten for want of room.",
            )?,
            busy: metrics.counter(
                "refrain_client_busy_total",
                "Times that a step went without a part of its drafts, since another thread held their index.",
            )?,
            token_failures: metrics.counter(
                "refrain_client_token_failures_total",
                "Times that the configured token was expired or wrong, or its file could not be read.",
            )?,
            rejections,
            replica: ReplicaMetrics::new(metrics)?,
            upload: UploaderMetrics::new(metrics)?,
        })
    }

    pub(crate) fn rejected(&self, limit: &str) {
        self.rejections.with_label_values(&[limit]).inc();
    }
}
