//! What a worker tells of an engine that generates by itself.

use prometheus::{CounterVec, GaugeVec, IntCounterVec, IntGaugeVec};
use refrain_service_kit::telemetry::Metrics;

use crate::engine::{Introduced, StreamingLoad, VerifyWay};

/// Its collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct StreamingMetrics {
    model: String,
    drive_calls: IntCounterVec,
    drive_call_seconds: CounterVec,
    requests: IntGaugeVec,
    kv_usage: GaugeVec,
    step: GaugeVec,
    introductions: IntCounterVec,
}

impl StreamingMetrics {
    pub(super) fn new(metrics: &Metrics, model: &str) -> anyhow::Result<Self> {
        let drive_calls = metrics.counter_vec(
            "refrain_drive_calls_total",
            "Calls that had a streaming engine judge a draft, by way and by whether the answer could be used.",
            &["model", "way", "outcome"],
        )?;
        let drive_call_seconds = metrics.float_counter_vec(
            "refrain_drive_call_seconds_total",
            "Seconds of such calls.",
            &["model", "way"],
        )?;
        for way in [VerifyWay::Chain, VerifyWay::FanOut] {
            drive_calls.with_label_values(&[model, way.as_str(), "verified"]);
            drive_call_seconds.with_label_values(&[model, way.as_str()]);
        }
        let step = metrics.float_gauge_vec(
            "refrain_engine_streamed_step_seconds",
            "Median gap lately between what a streaming engine sends a request, by the largest number of requests that it sends to; 0: none was heard.",
            &["model", "batch"],
        )?;
        step.with_label_values(&[model, "1"]);
        let introductions = metrics.counter_vec(
            "refrain_worker_introductions_total",
            "Namespaces that an engine with the drafts inside was to be told of when it came back, by what came of it: expired ones have a signature that is too old, and failed ones are tried again as often as attempts_max says.",
            &["outcome"],
        )?;
        for outcome in ["told", "failed", "expired"] {
            introductions.with_label_values(&[outcome]);
        }
        Ok(StreamingMetrics {
            model: model.to_owned(),
            drive_calls,
            drive_call_seconds,
            requests: metrics.gauge_vec(
                "refrain_engine_requests",
                "Requests that a streaming engine says it has, running or waiting.",
                &["model", "state"],
            )?,
            kv_usage: metrics.float_gauge_vec(
                "refrain_engine_kv_usage_ratio",
                "Share of its KV cache that a streaming engine says is in use.",
                &["model"],
            )?,
            step,
            introductions,
        })
    }

    /// What a step takes of a streaming engine that sends to up to `batch` requests.
    pub(crate) fn step(&self, batch: u32, seconds: f64) {
        let batch = batch.to_string();
        let labels = [self.model.as_str(), batch.as_str()];
        self.step.with_label_values(&labels).set(seconds);
    }

    /// A call that had a streaming engine judge a draft.
    pub(crate) fn drive_call(&self, way: VerifyWay, outcome: &str, seconds: f64) {
        let (model, way) = (self.model.as_str(), way.as_str());
        let calls = &self.drive_calls;
        calls.with_label_values(&[model, way, outcome]).inc();
        let spent = self.drive_call_seconds.with_label_values(&[model, way]);
        spent.inc_by(seconds);
    }

    /// What an engine with the drafts inside was told since the last time.
    pub(crate) fn introduced(&self, of: Introduced) {
        for (outcome, count) in [
            ("told", of.told),
            ("failed", of.failed),
            ("expired", of.expired),
        ] {
            self.introductions
                .with_label_values(&[outcome])
                .inc_by(count);
        }
    }

    /// What a streaming engine says of its load.
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
