//! How it stands with the fallback: measured step by step where it is the engine's own head, heard of through
//! the scheduler where it is another worker.
//!
//! No clock and no I/O: the decode loop says what each step was made of and what came of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use refrain_protocol::WorkerId;
use refrain_protocol::chunk::ChunkEnd;
use refrain_protocol::engine::DrafterKind;
use refrain_protocol::scheduling::Eagle3Report;
use refrain_speculation::{DecayedRatio, Passage, batch_bucket};
use refrain_speculation::router::{ACCEPTED_LENGTH_PRIOR, Fallback, Trials, Sample, TransferParams, Mode, Threshold, should_transfer};

use crate::config::{FallbackChoice, RouterChoice, SpeculationConfig};
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{ActiveRequest, Rates};

/// Reports on heads, exchanged between the decode loop and the heartbeats.
#[derive(Default)]
pub(crate) struct Reports {
    own: Mutex<Option<Eagle3Report>>,
    other: Mutex<Option<Eagle3Report>>,
}

impl Reports {
    /// How this worker's head does; `None` without one.
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
    /// Verifies a suffix draft and one of the head as one tree.
    Merged,
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

/// A step that was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepDone<'a> {
    pub(crate) items: &'a [ItemDone],
    /// Seconds it took.
    pub(crate) seconds: f64,
    /// Of them, seconds of the engine's head.
    pub(crate) draft_seconds: f64,
}

impl StepDone<'_> {
    /// Requests that decoded.
    pub(crate) fn batch(&self) -> u32 {
        self.decoding().count() as u32
    }

    /// Whether all of it was decoding, and came to something.
    pub(crate) fn is_clean(&self) -> bool {
        self.items
            .iter()
            .all(|item| item.kind != ItemKind::Prefill && item.emitted.is_some())
    }

    /// What a gate is told of it.
    pub(crate) fn figures(&self, mode: Option<Mode>) -> Sample {
        Sample {
            batch: self.batch(),
            mode,
            tokens: self.decoding().filter_map(|item| item.emitted).sum(),
            seconds: self.seconds,
            draft_seconds: self.draft_seconds,
            catch_up_tokens: self.items.iter().map(|item| item.catch_up_tokens).sum(),
        }
    }

    fn decoding(&self) -> impl Iterator<Item = &ItemDone> {
        self.items
            .iter()
            .filter(|item| item.kind != ItemKind::Prefill)
    }
}

/// Everything that is known of the fallback.
pub(crate) struct FallbackWatch {
    /// `None` if `auto` requests never use the engine's head.
    gate: Option<Gate>,
    /// The goodput router weighs the head itself: the gate only measures.
    budgeted: bool,
    drafter: Option<DrafterKind>,
    threshold: Threshold,
    accepted_length: DecayedRatio,
    prefill: DecayedRatio,
    /// Steps per second of plain decoding.
    plain: DecayedRatio,
    /// What steps take, by the largest batch measured together.
    steps: HashMap<u32, StepTimes>,
    /// The worker that is the fallback.
    other: Option<WorkerId>,
    hand_over: TransferParams,
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
        let gated = router.drafter().is_some() && router.threshold.allows_fallback();
        let watch = FallbackWatch {
            gate: gated.then(|| Gate::new(config.eagle3.gate())),
            budgeted: config.router == RouterChoice::Goodput,
            drafter: router.drafter(),
            threshold: router.threshold,
            accepted_length: DecayedRatio::default(),
            prefill: DecayedRatio::default(),
            plain: DecayedRatio::default(),
            steps: HashMap::new(),
            other: other_worker(config),
            hand_over: config.hand_over(),
            reports,
            metrics,
        };
        watch.report();
        watch
    }

    /// How it stands with the head in a step that decodes for `batch` requests.
    pub(crate) fn state(&self, batch: u32) -> Fallback {
        let break_even = self.break_even(batch);
        match self.passage(batch) {
            None if self.drafter.is_some() => Fallback::NotPaying,
            None => Fallback::Absent,
            Some(Passage::Shut) => Fallback::NotPaying,
            Some(Passage::Probe) => Fallback::Probed,
            Some(Passage::Open) => Fallback::InUse { break_even },
            Some(Passage::Pause) => Fallback::Paused { break_even },
        }
    }

    fn passage(&self, batch: u32) -> Option<Passage> {
        let gate = self.gate.as_ref()?;
        Some(if self.budgeted {
            Passage::Open
        } else {
            gate.passage(batch)
        })
    }

    /// Whether the head, or doing without it, is on trial at this size of batch: no other trial may run then, or each
    /// would be blamed for what the other did.
    pub(crate) fn is_on_trial(&self, batch: u32) -> bool {
        self.passage(batch).is_some_and(Passage::is_trial)
    }

    /// Whether the head is in use at this size of batch.
    pub(crate) fn is_in_use(&self, batch: u32) -> bool {
        self.passage(batch).is_some_and(Passage::is_in_use)
    }

    /// See [`Fallback::InUse`]. Times are compared within a size of batch: a step of eight requests does not take eight
    /// times as long as one of one.
    fn break_even(&self, batch: u32) -> Option<f32> {
        let accepted_length = self.accepted_length.value()?;
        let times = self.steps.get(&batch_bucket(batch));
        let cost = times.and_then(|times| {
            let suffix_s = times.suffix.value().or(times.plain.value())?;
            Some(suffix_s / times.fallback.value()?)
        });
        Some((accepted_length * cost.unwrap_or(1.0)) as f32)
    }

    /// Takes a step into account. With `others_try` something else is on trial, and the step is no evidence.
    pub(crate) fn step_done(&mut self, step: &StepDone<'_>, others_try: bool) {
        let (items, step_s) = (step.items, step.seconds);
        if !(step_s.is_finite() && step_s > 0.0) {
            return;
        }
        let Sample {
            batch,
            catch_up_tokens,
            ..
        } = step.figures(None);
        let pure = pure(items);
        if pure == Some(ItemKind::Plain) {
            self.plain.add(1.0, step_s);
        }
        let times = self.steps.entry(batch_bucket(batch)).or_default();
        match pure {
            Some(ItemKind::Plain) => times.plain.add(step_s, 1.0),
            Some(ItemKind::Suffix) => times.suffix.add(step_s, 1.0),
            // Reading a prompt is paid once, whatever the step is used for.
            Some(ItemKind::Fallback) if catch_up_tokens <= READ_LITTLE_TOKENS * batch => {
                times.fallback.add(step_s, 1.0);
            }
            _ => {}
        }
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
        self.judge(step, others_try);
        self.publish(batch);
    }

    /// Shows a step to the gate, as what the gate had let it do. In a batch the requests of a step seldom go all the same
    /// way; what counts is that the gate's word decided for one of them.
    fn judge(&mut self, step: &StepDone<'_>, others_try: bool) {
        let Some(mode) = self.passage(step.batch()).map(Passage::mode) else {
            return;
        };
        let items = step.items;
        let Some(gate) = &mut self.gate else {
            return;
        };
        if self.budgeted || !items.iter().any(|item| item.eligible) {
            // The gate had no say; how fast it was is worth knowing.
            let mode = match pure(items) {
                Some(ItemKind::Plain) => Some(Mode::Plain),
                Some(ItemKind::Fallback) => Some(Mode::Fallback),
                Some(ItemKind::Suffix | ItemKind::Merged | ItemKind::Prefill) | None => None,
            };
            gate.learn(step.figures(mode));
            return;
        }
        let decided = items
            .iter()
            .any(|item| item.eligible && matches!(item.kind, ItemKind::Fallback | ItemKind::Plain));
        if others_try || !decided {
            return;
        }
        gate.observe(step.figures(step.is_clean().then_some(mode)));
    }

    /// A chunk is over.
    pub(crate) fn request_ended(&mut self, running: &ActiveRequest) {
        if let Some(gate) = &mut self.gate
            && running.self_drafts()
        {
            gate.request_ended(running.start_len(), running.unmatched());
        }
    }

    /// Whether the request goes on at the worker that is the fallback: then how its chunk ends.
    pub(crate) fn hand_over(&self, running: &ActiveRequest) -> Option<ChunkEnd> {
        let other = self.other.as_ref()?;
        let report = (*lock(&self.reports.other))?;
        let rates = Rates {
            speedup: Some(report.speedup),
            prefill_tokens_s: self.prefill.value(),
            decode_tokens_s: self.plain.value(),
        };
        should_transfer(&running.candidacy(rates), &self.hand_over)
            .then(|| running.end_for(other.clone()))
    }

    /// How many of the router's decisions are looked back on; 0 if nothing is ever handed over.
    pub(crate) fn decisions_kept(&self) -> usize {
        self.other
            .as_ref()
            .map_or(0, |_| self.hand_over.after_steps)
    }

    fn publish(&self, batch: u32) {
        if !self.budgeted {
            let state = self.state(batch);
            self.metrics.threshold(self.threshold.in_force(state));
        }
        let Some(kind) = self.drafter else {
            return;
        };
        if let Some(length) = self.accepted_length.value() {
            self.metrics.self_draft_accepted_length(kind, length);
        }
        let Some(gate) = &self.gate else {
            return;
        };
        let in_use = self.is_in_use(batch);
        let gain = gate.gain(batch);
        self.metrics
            .self_draft_gate(kind, batch_bucket(batch), in_use, gain);
        self.report();
    }

    /// Says how the head does, at the size of batch that it serves best: a worker that stands idle would else be judged by a
    /// straggler.
    fn report(&self) {
        let buckets = self.gate.iter().flat_map(Gate::buckets);
        let best = buckets
            .filter(|(_, in_use, _)| *in_use || self.budgeted)
            .filter_map(|(_, _, gain)| gain)
            .max_by(f64::total_cmp);
        let accepted_length = self.accepted_length.value().map(|length| length as f32);
        *lock(&self.reports.own) = self.drafter.map(|_| Eagle3Report {
            accepted_length: accepted_length.unwrap_or(ACCEPTED_LENGTH_PRIOR),
            speedup: best.unwrap_or(1.0) as f32,
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

/// Seconds of steps that went all in one way.
#[derive(Clone, Copy, Debug, Default)]
struct StepTimes {
    plain: DecayedRatio,
    suffix: DecayedRatio,
    fallback: DecayedRatio,
}

/// Text that the head may have read in a step, per request, for the step to tell what its steps take.
const READ_LITTLE_TOKENS: u32 = 16;
