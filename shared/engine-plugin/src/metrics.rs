//! What is told of the work in an engine.

use prometheus::{IntCounter, IntCounterVec, IntGauge};
use refrain_draft_replica::{HarvestMetrics, MemoryMetrics};
use refrain_service_kit::telemetry::Metrics;

/// Collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct InEngineMetrics {
    pub(crate) drafts: IntCounter,
    pub(crate) drafted: IntCounter,
    pub(crate) accepted: IntCounter,
    pub(crate) said: IntCounter,
    pub(crate) requests: IntGauge,
    pub(crate) queued_tokens: IntGauge,
    pub(crate) paused_tokens: IntGauge,
    pub(crate) reading_tokens: IntGauge,
    pub(crate) forgotten: IntCounter,
    pub(crate) busy: IntCounter,
    pub(crate) token_failures: IntCounter,
    pub(crate) rejections: IntCounterVec,
    pub(crate) memory: MemoryMetrics,
    pub(crate) harvest: HarvestMetrics,
}

/// Labels of rejections.
pub(crate) const QUEUED_TOKENS_MAX: &str = "queued_tokens_max";
pub(crate) const TOKEN: &str = "token";
pub(crate) const FIELDS: &str = "fields";
pub(crate) const READING_TOKENS_MAX: &str = "reading_tokens_max";
pub(crate) const INDEX: &str = "index";

impl InEngineMetrics {
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let rejections = metrics.counter_vec(
            "refrain_client_rejections_total",
            "Requests without the drafts of their namespace, since its token was refused or what they brought cannot be read, or without those of their own prompt, and pieces of output that had to wait, or that the memory was not brought for want of room.",
            &["limit"],
        )?;
        for limit in [QUEUED_TOKENS_MAX, TOKEN, FIELDS, READING_TOKENS_MAX, INDEX] {
            rejections.with_label_values(&[limit]);
        }
        Ok(InEngineMetrics {
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
                "Draft tokens that the engine said as they were offered.",
            )?,
            said: metrics.counter(
                "refrain_client_said_tokens_total",
                "Tokens that the engine said.",
            )?,
            requests: metrics.gauge("refrain_client_requests", "Requests that run.")?,
            queued_tokens: metrics.gauge(
                "refrain_client_queued_tokens",
                "Output tokens on their way to the background thread.",
            )?,
            paused_tokens: metrics.gauge(
                "refrain_client_paused_tokens",
                "Tokens of requests that were interrupted and are remembered.",
            )?,
            reading_tokens: metrics.gauge(
                "refrain_client_reading_tokens",
                "Tokens of long prompts that wait to be read.",
            )?,
            forgotten: metrics.counter(
                "refrain_client_forgotten_requests_total",
                "Requests that were interrupted and forgotten for want of room.",
            )?,
            busy: metrics.counter(
                "refrain_client_busy_total",
                "Times that a step went without a part of the drafts, since others held it.",
            )?,
            token_failures: metrics.counter(
                "refrain_client_token_failures_total",
                "Times that the engine's own token was too old or wrong, or its file could not be read.",
            )?,
            rejections,
            memory: MemoryMetrics::new(metrics)?,
            harvest: HarvestMetrics::new(metrics)?,
        })
    }
    pub(crate) fn rejected(&self, limit: &str) {
        self.rejections.with_label_values(&[limit]).inc();
    }
}
