//! Metrics of streaming engines.

use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec};
use refrain_service_kit::telemetry::Metrics;

use crate::engine::{IntroductionCounts, StreamingLoad};

/// The collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct StreamingMetrics {
    model: String,
    requests: IntGaugeVec,
    kv_usage: GaugeVec,
    step: GaugeVec,
    introductions: IntCounterVec,
}

impl StreamingMetrics {
    pub(super) fn new(metrics: &Metrics, model: &str) -> anyhow::Result<Self> {
        let step = metrics.float_gauge_vec(
            "refrain_engine_streamed_step_seconds",
            "Recent median gap between a streaming engine's events to one request, seconds, by batch size (upper \
             bound of its bucket). 0: no events yet.",
            &["model", "batch"],
        )?;
        step.with_label_values(&[model, "1"]);
        let introductions = metrics.counter_vec(
            "refrain_worker_introductions_total",
            "Introductions of namespaces to a restarted engine with the Refrain plugin inside, by outcome: told, \
             failed (repeated up to attempts_max times), or expired (the signature was too old).",
            &["outcome"],
        )?;
        for outcome in ["told", "failed", "expired"] {
            introductions.with_label_values(&[outcome]);
        }
        Ok(StreamingMetrics {
            model: model.to_owned(),
            requests: metrics.gauge_vec(
                "refrain_engine_requests",
                "Requests in a streaming engine by its own report, running or waiting.",
                &["model", "state"],
            )?,
            kv_usage: metrics.float_gauge_vec(
                "refrain_engine_kv_usage_ratio",
                "Share of a streaming engine's KV cache in use, by its own report.",
                &["model"],
            )?,
            step,
            introductions,
        })
    }

    /// Sets the step time of batches of up to `batch` requests.
    pub(crate) fn step(&self, batch: u32, seconds: f64) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), batch.as_str()];
        self.step.with_label_values(&labels).set(seconds);
    }

    /// Counts introductions.
    pub(crate) fn introduced(&self, counts: IntroductionCounts) {
        for (outcome, count) in [
            ("told", counts.succeeded),
            ("failed", counts.failed),
            ("expired", counts.expired),
        ] {
            self.introductions
                .with_label_values(&[outcome])
                .inc_by(count);
        }
    }

    /// Sets the load that a streaming engine reports.
    pub(crate) fn load(&self, load: StreamingLoad) {
        let model = self.model.as_str();
        for (state, requests) in [("running", load.running), ("waiting", load.waiting)] {
            if let Some(requests) = requests {
                let gauge = self.requests.with_label_values(&[model, state]);
                gauge.set(requests as i64);
            }
        }
        if let Some(share) = load.kv_usage {
            self.kv_usage.with_label_values(&[model]).set(share);
        }
    }
}
