//! Metrics of verify calls.

use prometheus::{CounterVec, IntCounterVec};
use refrain_service_kit::telemetry::Metrics;

use super::verify::VerifyMethod;

/// The collectors. Cheap to clone.
#[derive(Clone)]
pub(crate) struct DriveMetrics {
    model: String,
    calls: IntCounterVec,
    seconds: CounterVec,
}

impl DriveMetrics {
    /// Registers the metrics under the model's name.
    ///
    /// # Errors
    /// A name is taken.
    pub(crate) fn new(metrics: &Metrics, model: &str) -> anyhow::Result<Self> {
        let calls = metrics.counter_vec(
            "refrain_drive_calls_total",
            "Verify calls to a streaming engine, by method and by outcome: verified, unknown (the response left \
             the next token open), or failed.",
            &["model", "way", "outcome"],
        )?;
        let seconds = metrics.float_counter_vec(
            "refrain_drive_call_seconds_total",
            "Duration of verify calls, seconds.",
            &["model", "way"],
        )?;
        for method in VerifyMethod::ALL {
            calls.with_label_values(&[model, method.as_str(), "verified"]);
            seconds.with_label_values(&[model, method.as_str()]);
        }
        Ok(DriveMetrics {
            model: model.to_owned(),
            calls,
            seconds,
        })
    }

    /// Counts a verify call.
    pub(super) fn call(&self, method: VerifyMethod, outcome: &str, seconds: f64) {
        let (model, method) = (self.model.as_str(), method.as_str());
        self.calls
            .with_label_values(&[model, method, outcome])
            .inc();
        let spent = self.seconds.with_label_values(&[model, method]);
        spent.inc_by(seconds);
    }
}
