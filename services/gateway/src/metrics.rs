//! What the gateway counts.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge};
use refrain_protocol::ApiError;
use refrain_protocol::error::code;
use refrain_service_kit::telemetry::{Metrics, SECONDS_BUCKETS};

use crate::tokenizing::TokenizingMetrics;

/// Tenants with label values of their own; the rest share `other`.
const TENANT_LABELS_MAX: usize = 1000;

/// Names as OpenTelemetry's GenAI conventions have them, and the gateway's own.
pub(crate) struct GatewayMetrics {
    pub(crate) token_usage: HistogramVec,
    pub(crate) request_seconds: HistogramVec,
    pub(crate) first_token_seconds: HistogramVec,
    pub(crate) per_token_seconds: HistogramVec,
    pub(crate) in_flight: IntGauge,
    pub(crate) bodies: IntGauge,
    pub(crate) rejections: IntCounterVec,
    pub(crate) continuations: IntCounter,
    pub(crate) requests: IntCounterVec,
    pub(crate) tokenizing: TokenizingMetrics,
    tenants: Mutex<HashSet<String>>,
}

/// Tokens per request, powers of four as the conventions advise.
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

impl GatewayMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// A name is taken: two gateways share a registry.
    pub(crate) fn new(metrics: &Metrics) -> anyhow::Result<Self> {
        let by_model = ["tenant", "model"];
        let rejections = metrics.counter_vec(
            "refrain_gateway_rejections_total",
            "Requests refused because a limit was reached.",
            &["limit"],
        )?;
        // There from the start, so that a rate over them is 0 and not absent.
        for limit in [
            "requests",
            "tenant_requests",
            "bodies",
            "tenant_bodies",
            "bodies_bytes",
            "body_bytes",
            "body_time",
            "context",
            "retries",
            "tokenizing",
            "scheduler_wait",
        ] {
            rejections.with_label_values(&[limit]);
        }
        Ok(GatewayMetrics {
            token_usage: metrics.histogram_vec(
                "gen_ai_client_token_usage",
                "Tokens per request.",
                &["tenant", "model", "token_type"],
                TOKEN_BUCKETS,
            )?,
            request_seconds: metrics.histogram_vec(
                "gen_ai_server_request_duration_seconds",
                "From the request's body to its last token.",
                &by_model,
                SECONDS_BUCKETS,
            )?,
            first_token_seconds: metrics.histogram_vec(
                "gen_ai_server_time_to_first_token_seconds",
                "From the request's body to its first token.",
                &by_model,
                SECONDS_BUCKETS,
            )?,
            per_token_seconds: metrics.histogram_vec(
                "gen_ai_server_time_per_output_token_seconds",
                "Time between tokens after the first, mean over a choice.",
                &by_model,
                SECONDS_BUCKETS,
            )?,
            in_flight: metrics.gauge(
                "refrain_gateway_requests_in_flight",
                "Requests in flight; one of several choices counts as so many.",
            )?,
            bodies: metrics.gauge(
                "refrain_gateway_bodies_arriving",
                "Bodies of requests that are on their way.",
            )?,
            tokenizing: TokenizingMetrics {
                running: metrics.gauge(
                    "refrain_gateway_tokenizing_bytes",
                    "Large bodies that are parsed and tokenized now.",
                )?,
                waiting: metrics.gauge(
                    "refrain_gateway_tokenizing_waiting_bytes",
                    "Large bodies that wait to be parsed and tokenized.",
                )?,
                rejections: rejections.with_label_values(&["tokenizing"]),
            },
            rejections,
            continuations: metrics.counter(
                "refrain_gateway_continuations_total",
                "Choices that went on elsewhere after a worker failed.",
            )?,
            requests: metrics.counter_vec(
                "refrain_gateway_requests_total",
                "Requests by how they ended; 499: the client went away.",
                &["status"],
            )?,
            tenants: Mutex::default(),
        })
    }

    /// A request ends because it gets no lease.
    pub(crate) fn lease_given_up(&self, error: &ApiError) {
        if error.has_code(code::SCHEDULER_UNAVAILABLE) {
            self.rejections.with_label_values(&["scheduler_wait"]).inc();
        }
    }

    /// The label value of a tenant.
    pub(crate) fn tenant_label<'a>(&self, tenant: &'a str) -> &'a str {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.contains(tenant) {
            return tenant;
        }
        if tenants.len() >= TENANT_LABELS_MAX {
            return "other";
        }
        tenants.insert(tenant.to_owned());
        tenant
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_bounded() {
        let metrics = GatewayMetrics::new(&Metrics::new().unwrap()).unwrap();
        for tenant in 0..TENANT_LABELS_MAX {
            let tenant = tenant.to_string();
            assert_eq!(metrics.tenant_label(&tenant), tenant);
        }
        assert_eq!(metrics.tenant_label("one more"), "other");
        assert_eq!(metrics.tenant_label("7"), "7");
    }
}
