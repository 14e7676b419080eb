//! How it stands with the fallback: measured step by step where it is the engine's own head, heard of through
//! the scheduler where it is another worker.
//!
//! No clock and no I/O: the decode loop says what each step was made of and what came of it.

use std::sync::{Arc, Mutex, MutexGuard};

use refrain_protocol::WorkerId;
use refrain_protocol::chunk::ChunkEnd;
use refrain_protocol::scheduling::Eagle3Report;
use refrain_speculation::{
    Fallback, Gate, GateStep, HandOverParams, Mode, Passage, Threshold, batch_bucket, hands_over,
};

use crate::config::{FallbackChoice, SpeculationConfig};
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{Rates, Running};

/// Reports on heads, exchanged between the decode loop and the heartbeats.
#[derive(Default)]
pub(crate) struct Reports {
    own: Mutex<Option<Eagle3Report>>,
    other: Mutex<Option<Eagle3Report>>,
}

impl Reports {
    /// How this worker's head does, while it is in use.
    pub(crate) fn own(&self) -> Option<Eagle3Report> {
        *lock(&self.own)
    }

    /// What the scheduler said of the worker that is the fallback; `None` if it is not to be had.
    pub(crate) fn hear(&self, report: Option<Eagle3Report>) {
        *lock(&self.other) = report;
    }
}

fn lock(report: &Mutex<Option<Eagle3Report>>) -> MutexGuard<'_, Option<Eagle3Report>> {
    report
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What an item of a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemKind {
    /// A piece of a prompt, whether it samples or not.
    Prefill,
    /// Verifies a suffix draft.
    Suffix,
    /// Drafted by the head.
    Fallback,
    /// Plain decoding.
    Plain,
}

/// One item of a step that was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemDone {
    pub(crate) kind: ItemKind,
    /// The router decides for it.
    pub(crate) is_auto: bool,
    /// The router could have used the head for it.
    pub(crate) eligible: bool,
    /// Context tokens that it brought.
    pub(crate) context: u32,
    /// Text that the head had to read first, beyond what the last steps brought.
    pub(crate) catch_up_tokens: u32,
    /// Tokens emitted; `None` if it failed.
    pub(crate) emitted: Option<u32>,
}

/// Everything that is known of the fallback.
pub(crate) struct FallbackWatch {
    /// `None` if `auto` requests never use the engine's head.
    gate: Option<Gate>,
    has_head: bool,
    threshold: Threshold,
    accepted_length: Recent,
    prefill: Recent,
    /// Steps per second of plain decoding.
    plain: Recent,
    /// Seconds of steps that decoded in one way, per request.
    plain_step: Recent,
    suffix_step: Recent,
    fallback_step: Recent,
    /// The worker that is the fallback.
    other: Option<WorkerId>,
    hand_over: HandOverParams,
    reports: Arc<Reports>,
    metrics: WorkerMetrics,
}

impl FallbackWatch {
    pub(crate) fn new(
        config: &SpeculationConfig,
        router: &Router,
        reports: Arc<Reports>,
        metrics: WorkerMetrics,
    ) -> Self {
        let gated = router.has_head() && router.threshold.allows_fallback();
        FallbackWatch {
            gate: gated.then(|| Gate::new(config.eagle3.gate())),
            has_head: router.has_head(),
            threshold: router.threshold,
            accepted_length: Recent::default(),
            prefill: Recent::default(),
            plain: Recent::default(),
            plain_step: Recent::default(),
            suffix_step: Recent::default(),
            fallback_step: Recent::default(),
            other: other_worker(config),
            hand_over: config.hand_over(),
            reports,
            metrics,
        }
    }

    /// How it stands with the head in a step that decodes for `batch` requests.
    pub(crate) fn state(&self, batch: u32) -> Fallback {
        let break_even = self.break_even();
        match &self.gate {
            None if self.has_head => Fallback::NotPaying,
            None => Fallback::Absent,
            Some(gate) => match gate.passage(batch) {
                Passage::Shut => Fallback::NotPaying,
                Passage::Probe => Fallback::Probed,
                Passage::Open => Fallback::InUse { break_even },
                Passage::Pause => Fallback::Paused { break_even },
            },
        }
    }

    /// See [`Fallback::InUse`]. Time is counted per request of a step, so that large steps and small ones compare.
    fn break_even(&self) -> Option<f32> {
        let accepted_length = self.accepted_length.value()?;
        let suffix_s = self.suffix_step.value().or(self.plain_step.value());
        let cost = suffix_s.zip(self.fallback_step.value());
        let cost = cost.map_or(1.0, |(suffix_s, fallback_s)| suffix_s / fallback_s);
        Some((accepted_length * cost) as f32)
    }

    /// Takes a step into account.
    pub(crate) fn step_done(&mut self, items: &[ItemDone], step_s: f64, draft_s: f64) {
        if !(step_s.is_finite() && step_s > 0.0) {
            return;
        }
        let decoding = || items.iter().filter(|item| item.kind != ItemKind::Prefill);
        let batch = decoding().count() as u32;
        let tokens: u32 = decoding().filter_map(|item| item.emitted).sum();
        let pure = pure(items);
        if pure == Some(ItemKind::Plain) {
            self.plain.add(1.0, step_s);
        }
        let of_kind = match pure {
            Some(ItemKind::Plain) => Some(&mut self.plain_step),
            Some(ItemKind::Suffix) => Some(&mut self.suffix_step),
            Some(ItemKind::Fallback) => Some(&mut self.fallback_step),
            Some(ItemKind::Prefill) | None => None,
        };
        if let Some(of_kind) = of_kind {
            of_kind.add(step_s, f64::from(batch));
        }
        let mode = match pure {
            Some(ItemKind::Plain) => Some(Mode::Plain),
            Some(ItemKind::Fallback) => Some(Mode::Fallback),
            Some(ItemKind::Suffix | ItemKind::Prefill) | None => None,
        };
        let read: u32 = items
            .iter()
            .filter(|item| item.kind == ItemKind::Prefill)
            .map(|item| item.context)
            .sum();
        if read > 0 {
            // The rest of the step is counted in, so prompts seem to cost a little more than they do.
            self.prefill.add(f64::from(read), step_s);
        }
        for item in items.iter().filter(|item| item.kind == ItemKind::Fallback) {
            if let Some(emitted) = item.emitted {
                self.accepted_length.add(f64::from(emitted), 1.0);
            }
        }
        if batch == 0 {
            return;
        }
        if let Some(gate) = &mut self.gate {
            let step = GateStep {
                batch,
                mode,
                tokens,
                seconds: step_s,
                draft_seconds: draft_s,
                catch_up_tokens: items.iter().map(|item| item.catch_up_tokens).sum(),
            };
            // A step in which the gate had no say belongs to no trial; how fast it was is worth knowing.
            if items.iter().any(|item| item.eligible) {
                gate.observe(step);
            } else {
                gate.learn(step);
            }
        }
        self.publish(batch);
    }

    /// A chunk is over.
    pub(crate) fn request_ended(&mut self, running: &Running) {
        if let Some(gate) = &mut self.gate
            && running.self_drafts()
        {
            gate.request_ended(running.start_len(), running.unmatched());
        }
    }

    /// Whether the request goes on at the worker that is the fallback: then how its chunk ends.
    pub(crate) fn hand_over(&self, running: &Running) -> Option<ChunkEnd> {
        let other = self.other.as_ref()?;
        let report = (*lock(&self.reports.other))?;
        let rates = Rates {
            speedup: Some(report.speedup),
            prefill_tokens_s: self.prefill.value(),
            decode_tokens_s: self.plain.value(),
        };
        hands_over(&running.candidacy(rates), &self.hand_over)
            .then(|| running.end_for(other.clone()))
    }

    /// How many of the router's decisions are looked back on; 0 if nothing is ever handed over.
    pub(crate) fn decisions_kept(&self) -> usize {
        self.other
            .as_ref()
            .map_or(0, |_| self.hand_over.after_steps)
    }

    fn publish(&self, batch: u32) {
        let state = self.state(batch);
        self.metrics.threshold(self.threshold.in_force(state));
        if let Some(length) = self.accepted_length.value() {
            self.metrics.eagle3_accepted_length(length);
        }
        let Some(gate) = &self.gate else {
            return;
        };
        let in_use = matches!(state, Fallback::InUse { .. } | Fallback::Paused { .. });
        let gain = gate.gain(batch);
        self.metrics.eagle3_gate(batch_bucket(batch), in_use, gain);
        // Told for the size of batch that the head serves best, whatever the last step was: a worker that stands
        // idle would else be judged by a straggler.
        let best = gate
            .buckets()
            .filter(|(_, in_use, _)| *in_use)
            .filter_map(|(_, _, gain)| gain)
            .max_by(f64::total_cmp);
        let measured = self.accepted_length.value().zip(best);
        *lock(&self.reports.own) = measured.map(|(accepted_length, speedup)| Eagle3Report {
            accepted_length: accepted_length as f32,
            speedup: speedup as f32,
        });
    }
}

/// The worker that requests are handed over to, if the configuration names one.
pub(crate) fn other_worker(config: &SpeculationConfig) -> Option<WorkerId> {
    match &config.fallback {
        FallbackChoice::Worker(name) => Some(WorkerId(name.clone())),
        FallbackChoice::Own | FallbackChoice::Off => None,
    }
}

/// How all items of a step decoded, if they all did in one way.
fn pure(items: &[ItemDone]) -> Option<ItemKind> {
    let kind = items.first()?.kind;
    items
        .iter()
        .all(|item| item.kind == kind && item.emitted.is_some())
        .then_some(kind)
}

/// A mean over what was seen lately: a quotient of two decayed sums.
#[derive(Clone, Copy, Debug, Default)]
struct Recent {
    of: f64,
    per: f64,
}

impl Recent {
    /// What is left of an older entry when one more comes: half after 128.
    const DECAY: f64 = 0.9946;

    fn add(&mut self, of: f64, per: f64) {
        self.of = self.of * Self::DECAY + of;
        self.per = self.per * Self::DECAY + per;
    }

    fn value(&self) -> Option<f64> {
        (self.per > 0.0).then(|| self.of / self.per)
    }
}
