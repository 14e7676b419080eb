//! The worker's Prometheus metrics.

mod families;
mod gain;
mod labels;

use std::sync::OnceLock;

use prometheus::{Counter, Histogram, IntCounter};
use refrain_draft_replica::{ReplicaMetrics, UploaderMetrics};
use refrain_protocol::chunk::{DraftScope, DraftSource, StepCounts};
use refrain_protocol::engine::DrafterKind;
use refrain_protocol::engine_order::PauseMode;
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::router::GainParams;

use self::families::WorkerFamilies;
use self::gain::GainGauges;
use crate::engine::{IntroductionCounts, StreamingLoad};

pub(crate) use self::labels::{ContextOrigin, OrderKind, ParkingOutcome, RejectionLimit};

/// The worker's metrics.
pub(crate) struct WorkerMetrics {
    model: String,
    pub(crate) families: WorkerFamilies,
    // Children of families: tokens come too often to look them up by their labels.
    goodput_tokens: IntCounter,
    step_seconds: Counter,
    draft_seconds: Counter,
    by_source: [[OnceLock<SourceCounters>; SCOPES]; SOURCES],
    pub(crate) gain: GainGauges,
    pub(crate) replica: ReplicaMetrics,
    pub(crate) uploader: UploaderMetrics,
}

const SOURCES: usize = DraftSource::None as usize + 1;
const SCOPES: usize = DraftScope::None as usize + 1;

/// The counters of one source and scope.
struct SourceCounters {
    /// Steps, drafted, accepted and emitted tokens.
    sums: [IntCounter; 4],
    /// Accepted tokens of each draft.
    accepted: Histogram,
}

impl SourceCounters {
    fn add(&self, counts: StepCounts) {
        let StepCounts {
            steps,
            drafted,
            accepted,
            emitted,
        } = counts;
        for (counter, count) in self.sums.iter().zip([steps, drafted, accepted, emitted]) {
            counter.inc_by(count);
        }
        if drafted > 0 {
            self.accepted.observe(accepted as f64);
        }
    }
}

impl WorkerMetrics {
    /// Registers all metrics under the model's name. `gain` has the rules by which the gain of drafts is shown.
    ///
    /// # Errors
    /// A name is taken, as by a second worker in one registry.
    pub(crate) fn new(metrics: &Metrics, model: &str, gain: GainParams) -> anyhow::Result<Self> {
        let families = WorkerFamilies::register(metrics.registry())?;
        // A rate over a counter that does not exist yet shows nothing instead of 0.
        families.streamed_step.with_label_values(&[model, "1"]);
        for order in OrderKind::LABELS {
            families.orders.with_label_values(&[*order, "done"]);
        }
        Ok(WorkerMetrics {
            model: model.to_owned(),
            goodput_tokens: families.goodput_tokens.with_label_values(&[model]),
            step_seconds: families.step_seconds.with_label_values(&[model]),
            draft_seconds: families.draft_seconds.with_label_values(&[model]),
            by_source: Default::default(),
            gain: GainGauges::start(metrics, &families, model, gain),
            families,
            replica: ReplicaMetrics::register(metrics.registry())?,
            uploader: UploaderMetrics::register(metrics.registry())?,
        })
    }

    /// Counts a rejection.
    pub(crate) fn reject(&self, limit: RejectionLimit) {
        let rejections = &self.families.rejections;
        rejections.with_label_values(&[limit.as_str()]).inc();
    }

    /// Counts what became of a parked request.
    pub(crate) fn parked(&self, outcome: ParkingOutcome) {
        let parking = &self.families.parking;
        parking.with_label_values(&[outcome.as_str()]).inc();
    }

    /// Counts the context of a chunk that begins.
    pub(crate) fn context(&self, origin: ContextOrigin, tokens: usize) {
        let context = &self.families.context_tokens;
        let context = context.with_label_values(&[origin.as_str()]);
        context.inc_by(tokens as u64);
    }

    /// Sets the version of the weights.
    pub(crate) fn weight_version(&self, version: u64) {
        let gauge = &self.families.weight_version;
        gauge.set(version.cast_signed());
    }

    /// Sets whether the worker is paused, and how many chunks it holds back.
    pub(crate) fn pause(&self, mode: Option<PauseMode>, held: u32) {
        self.families.paused.set(mode.is_some().into());
        self.families.held_chunks.set(held.into());
    }

    /// Counts an order of a trainer.
    pub(crate) fn order(&self, order: OrderKind, is_done: bool) {
        let outcome = if is_done { "done" } else { "failed" };
        let orders = &self.families.orders;
        orders.with_label_values(&[order.as_str(), outcome]).inc();
    }

    /// Counts a chunk that has ended.
    pub(crate) fn chunk_ended(&self, outcome: &str) {
        let chunks = &self.families.chunks;
        chunks.with_label_values(&[outcome]).inc();
    }

    /// Counts the duration of a step, and the share that the engine's own drafter took of it, seconds.
    pub(crate) fn engine_step(&self, seconds: f64, draft_seconds: f64) {
        self.step_seconds.inc_by(seconds.max(0.0));
        self.draft_seconds.inc_by(draft_seconds.max(0.0));
    }

    /// Counts the tokens of a step.
    pub(crate) fn step(&self, source: DraftSource, scope: DraftScope, counts: StepCounts) {
        self.goodput_tokens.inc_by(counts.emitted);
        let counters = self.by_source[source as usize][scope as usize].get_or_init(|| {
            let of = &self.families;
            let labels = [&*self.model, source.as_str(), scope.as_str()];
            SourceCounters {
                sums: [&of.steps, &of.drafted, &of.accepted, &of.emitted]
                    .map(|family| family.with_label_values(&labels)),
                accepted: of.accepted_per_draft.with_label_values(&labels[..2]),
            }
        });
        counters.add(counts);
    }

    /// Counts a decision of the router and its reason.
    pub(crate) fn decision(&self, (decision, reason): (&str, &str)) {
        let decisions = &self.families.decisions;
        decisions
            .with_label_values(&[&self.model, decision, reason])
            .inc();
    }

    /// Counts the draft tokens that a budget admitted and refused.
    pub(crate) fn budget(&self, admitted: u32, refused: u32) {
        for (outcome, tokens) in [("admitted", admitted), ("refused", refused)] {
            let budget = &self.families.budget;
            budget
                .with_label_values(&[&*self.model, outcome])
                .inc_by(u64::from(tokens));
        }
    }

    /// Counts the expected and the accepted tokens of a draft.
    pub(crate) fn expectation(&self, source: DraftSource, expected: f32, accepted: u32) {
        let labels = [&*self.model, source.as_str()];
        self.families
            .expected_tokens
            .with_label_values(&labels)
            .inc_by(f64::from(expected.max(0.0)));
        self.families
            .expected_accepted
            .with_label_values(&labels)
            .inc_by(u64::from(accepted));
    }

    /// Counts an exchange of acceptance statistics with the store.
    pub(crate) fn statistics_call(&self, is_answered: bool) {
        let outcome = if is_answered { "answered" } else { "failed" };
        let calls = &self.families.statistics_calls;
        calls.with_label_values(&[&*self.model, outcome]).inc();
    }

    /// Observes the mean accepted length of a chunk.
    pub(crate) fn request_length(&self, counts: StepCounts) {
        if counts.steps > 0 {
            let lengths = &self.families.accepted_length;
            lengths
                .with_label_values(&[&self.model])
                .observe(counts.emitted as f64 / counts.steps as f64);
        }
    }

    /// Sets the error of the expected step times, as a share.
    pub(crate) fn step_cost_error(&self, share: f64) {
        let error = &self.families.step_cost_error;
        error.with_label_values(&[&self.model]).set(share);
    }

    /// Sets the threshold of the score router.
    pub(crate) fn threshold(&self, in_force: f32) {
        let threshold = &self.families.threshold;
        let threshold = threshold.with_label_values(&[&self.model]);
        threshold.set(f64::from(in_force));
    }

    /// Sets the accepted length of the engine's own drafter.
    pub(crate) fn self_draft_accepted_length(&self, kind: DrafterKind, tokens: f64) {
        let length = &self.families.self_draft_accepted_length;
        length
            .with_label_values(&[&*self.model, kind.as_str()])
            .set(tokens);
    }

    /// Sets the gate of the engine's own drafter for batches of up to `batch`.
    pub(crate) fn self_draft_gate(
        &self,
        kind: DrafterKind,
        batch: u32,
        in_use: bool,
        gain: Option<f64>,
    ) {
        let labels = [&*self.model, kind.as_str(), &*batch.to_string()];
        let uses = &self.families.self_draft_in_use;
        uses.with_label_values(&labels).set(i64::from(in_use));
        if let Some(gain) = gain {
            let gains = &self.families.self_draft_gain;
            gains.with_label_values(&labels).set(gain);
        }
    }

    /// Sets whether the guard lets drafts be used in batches of up to `batch`.
    pub(crate) fn drafts_in_use(&self, batch: u32, in_use: bool) {
        let labels = [&*self.model, &*batch.to_string()];
        let uses = &self.families.drafts_in_use;
        uses.with_label_values(&labels).set(i64::from(in_use));
    }

    /// Sets the step time of a streaming engine for batches of up to `batch` requests.
    pub(crate) fn streamed_step(&self, batch: u32, seconds: f64) {
        let labels = [&*self.model, &*batch.to_string()];
        let step = &self.families.streamed_step;
        step.with_label_values(&labels).set(seconds);
    }

    /// Counts introductions of namespaces to a streaming engine.
    pub(crate) fn introduced(&self, counts: IntroductionCounts) {
        for (outcome, count) in [
            ("succeeded", counts.succeeded),
            ("failed", counts.failed),
            ("expired", counts.expired),
        ] {
            let introductions = &self.families.introductions;
            introductions.with_label_values(&[outcome]).inc_by(count);
        }
    }

    /// Sets the load that a streaming engine reports.
    pub(crate) fn engine_load(&self, load: StreamingLoad) {
        for (state, requests) in [("running", load.running), ("waiting", load.waiting)] {
            if let Some(requests) = requests {
                let gauge = &self.families.engine_requests;
                let gauge = gauge.with_label_values(&[&*self.model, state]);
                gauge.set(requests as i64);
            }
        }
        if let Some(share) = load.kv_usage {
            self.kv_usage(share);
        }
    }

    /// Sets the share of the engine's KV cache that running requests use.
    pub(crate) fn kv_usage(&self, share: f64) {
        let usage = &self.families.engine_kv_usage;
        usage.with_label_values(&[&self.model]).set(share);
    }

    /// Sets whether the circuit breaker of a streaming engine is open.
    pub(crate) fn breaker(&self, is_open: bool) {
        let open = &self.families.breaker_open;
        open.with_label_values(&[&self.model]).set(is_open.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_shown_before_it_is_reached() {
        let metrics = Metrics::new().unwrap();
        WorkerMetrics::new(&metrics, "m", GainParams::default()).unwrap();
        let page = String::from_utf8(metrics.render()).unwrap();
        let mut limits: Vec<&str> = page
            .lines()
            .filter_map(|line| line.strip_prefix("refrain_worker_rejections_total{limit=\""))
            .filter_map(|line| line.strip_suffix("\"} 0"))
            .collect();
        limits.sort_unstable();
        let all = [
            "breaker",
            "descriptors",
            "draining",
            "epoch",
            "reader_stall_ms_max",
            "running_max",
        ];
        assert_eq!(limits, all);
    }
}
