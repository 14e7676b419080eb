//! The gain from drafts, as gauges that come and go with the steps that they rest on.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use prometheus::{GaugeVec, IntGaugeVec};
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::router::{GainEstimator, GainParams, GainReading, Step};

use super::families::WorkerFamilies;

/// The estimator of the gain of one worker.
pub(crate) struct GainGauges {
    clock: Instant,
    estimator: Arc<Mutex<GainEstimator>>,
}

impl GainGauges {
    /// Shows the figures of the moment whenever metrics are rendered.
    pub(super) fn start(
        metrics: &Metrics,
        families: &WorkerFamilies,
        model: &str,
        params: GainParams,
    ) -> Self {
        let clock = Instant::now();
        let estimator = Arc::new(Mutex::new(GainEstimator::new(params)));
        let shown = Shown {
            model: model.to_owned(),
            ratio: families.gain.clone(),
            error: families.gain_error.clone(),
            steps: families.gain_steps.clone(),
        };
        let seen = estimator.clone();
        metrics.before_rendering(move || {
            let readings = seen.lock().readings(clock.elapsed());
            readings.iter().for_each(|reading| shown.set(reading));
        });
        GainGauges { clock, estimator }
    }

    /// Takes a step into account that has just ended. `may_draft` tells whether the settings allow drafts in it.
    pub(crate) fn step(&self, step: &Step, may_draft: bool) {
        let at = self.clock.elapsed();
        self.estimator.lock().observe_step(at, step, may_draft);
    }

    /// Begins anew, because a step failed and the engine may have been restarted.
    pub(crate) fn restart(&self) {
        self.estimator.lock().restart();
    }
}

/// The families of the gain.
struct Shown {
    model: String,
    ratio: GaugeVec,
    error: GaugeVec,
    steps: IntGaugeVec,
}

impl Shown {
    fn set(&self, reading: &GainReading) {
        let batch = reading.batch.to_string();
        let labels = [&*self.model, &*batch];
        for (family, value) in [(&self.ratio, reading.ratio), (&self.error, reading.error)] {
            match value {
                Some(value) => family.with_label_values(&labels).set(value),
                // It fails where there was no figure before.
                None => drop(family.remove_label_values(&labels)),
            }
        }
        let sides = [
            ("plain", reading.plain_steps),
            ("drafted", reading.drafted_steps),
        ];
        for (side, steps) in sides {
            let labels = [&*self.model, &*batch, side];
            let steps = i64::try_from(steps).unwrap_or(i64::MAX);
            self.steps.with_label_values(&labels).set(steps);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use refrain_speculation::router::{GainSample, GainSide};

    use super::*;

    #[test]
    fn a_ratio_is_shown_while_it_is_certain_and_its_steps_always() {
        let metrics = Metrics::new().unwrap();
        let families = WorkerFamilies::register(metrics.registry()).unwrap();
        let params = GainParams {
            warm_up: Duration::ZERO,
            ..GainParams::default()
        };
        let gauges = GainGauges::start(&metrics, &families, "m", params);
        let shown = || String::from_utf8(metrics.render()).unwrap();
        let line = |family: &str, rest: &str| format!("refrain_spec_gain_{family}{{{rest}");
        let ratio = line("ratio", "batch=\"2\",model=\"m\"} 3\n");
        assert!(!shown().contains("refrain_spec_gain_ratio{"));
        let decode = |seconds: std::ops::Range<u64>| {
            let mut estimator = gauges.estimator.lock();
            for at in seconds {
                for (side, tokens) in [(GainSide::Plain, 2), (GainSide::Drafted, 6)] {
                    let sample = GainSample {
                        batch: 2,
                        side,
                        tokens,
                        seconds: 0.5,
                    };
                    // The clock of the gauges stands almost still meanwhile.
                    estimator.observe(Duration::from_secs(at), sample);
                }
            }
        };
        // Twelve seconds are in three blocks of five seconds.
        decode(0..12);
        let page = shown();
        let steps = line("steps", "batch=\"2\",model=\"m\",side=\"plain\"} 4\n");
        assert!(page.contains(&steps), "{page}");
        assert!(!page.contains("refrain_spec_gain_ratio{"), "{page}");
        assert!(!page.contains("refrain_spec_gain_error_ratio{"), "{page}");
        decode(12..100);
        let page = shown();
        assert!(page.contains(&ratio), "{page}");
        let error = line("error_ratio", "batch=\"2\",model=\"m\"} ");
        assert!(page.contains(&error), "{page}");
        gauges.restart();
        let page = shown();
        assert!(!page.contains("refrain_spec_gain_ratio{"), "{page}");
        assert!(!page.contains("refrain_spec_gain_error_ratio{"), "{page}");
        let none = line("steps", "batch=\"2\",model=\"m\",side=\"drafted\"} 0\n");
        assert!(page.contains(&none), "{page}");
    }
}
