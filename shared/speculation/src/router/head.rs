//! How fast each way of decoding is, and under the score policy whether the engine's head is used.

use std::collections::HashMap;

use super::score::{Fallback, Threshold};
use super::trials::{Mode, Phase, Sample, Trials, batch_bucket};
use super::{Policy, Route, RouterParams, Step};
use crate::DecayedRatio;

/// Text per request that the head may have read in a step for its time to count as that of drafting, in tokens.
const READ_LITTLE_TOKENS: u32 = 16;

/// How the head does at one batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadStatus {
    /// The largest batch that is measured together with the one that was asked for.
    pub batch: u32,
    /// Whether the head is used there.
    pub in_use: bool,
    /// Tokens per second with the head over those without it, once both were measured.
    pub gain: Option<f64>,
    /// The greatest gain over all batch sizes where the head is used.
    pub best_gain: Option<f64>,
    /// Tokens per step of the head, the target's own included, once there was one.
    pub accepted_length: Option<f64>,
    /// The SCORE that a suffix draft must exceed.
    pub threshold: f32,
}

/// Speeds that a transfer to another worker is reckoned with, in tokens per second, once they were measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speeds {
    /// Reading prompts.
    pub prefill_tokens_s: Option<f64>,
    /// Decoding one request without drafts.
    pub decode_tokens_s: Option<f64>,
}

/// Seconds of steps whose requests all decoded in one way.
#[derive(Clone, Copy, Debug, Default)]
struct StepTimes {
    plain: DecayedRatio,
    suffix: DecayedRatio,
    head: DecayedRatio,
}

/// Measures the head and the other ways of decoding.
#[derive(Clone, Debug)]
pub(super) struct HeadMonitor {
    /// `None` if `auto` requests never use the engine's head.
    trials: Option<Trials>,
    /// The goodput policy weighs the head itself, so trials only measure.
    is_budgeted: bool,
    has_head: bool,
    threshold: Threshold,
    accepted_length: DecayedRatio,
    prefill: DecayedRatio,
    /// Steps per second of plain decoding.
    plain: DecayedRatio,
    /// By the largest batch that is measured together.
    steps: HashMap<u32, StepTimes>,
}

impl HeadMonitor {
    pub(super) fn new(params: &RouterParams) -> Self {
        let is_tried = params.head.is_some() && params.threshold.allows_fallback();
        HeadMonitor {
            trials: is_tried.then(|| Trials::new(Mode::Without, params.head_trials)),
            is_budgeted: params.policy == Policy::Goodput,
            has_head: params.head.is_some(),
            threshold: params.threshold,
            accepted_length: DecayedRatio::default(),
            prefill: DecayedRatio::default(),
            plain: DecayedRatio::default(),
            steps: HashMap::new(),
        }
    }

    /// The state of the head in a step that decodes for `batch` requests.
    pub(super) fn fallback(&self, batch: u32) -> Fallback {
        let break_even = self.break_even(batch);
        let Some(phase) = self.phase(batch) else {
            return match self.has_head {
                true => Fallback::NotPaying,
                false => Fallback::Absent,
            };
        };
        match (phase.in_use, phase.on_trial) {
            (false, false) => Fallback::NotPaying,
            (false, true) => Fallback::Probed,
            (true, false) => Fallback::InUse { break_even },
            (true, true) => Fallback::Paused { break_even },
        }
    }

    /// Whether the head, or doing without it, is on trial. No other trial may run then: each would be blamed for the
    /// effect of the other.
    pub(super) fn is_on_trial(&self, batch: u32) -> bool {
        self.phase(batch).is_some_and(|phase| phase.on_trial)
    }

    /// How the head is used; `None` if `auto` requests never use it.
    pub(super) fn phase(&self, batch: u32) -> Option<Phase> {
        let trials = self.trials.as_ref()?;
        Some(match self.is_budgeted {
            true => Phase {
                in_use: true,
                on_trial: false,
            },
            false => trials.phase(batch),
        })
    }

    /// See [`Fallback::InUse`]. Times are compared within a batch size: a step of eight requests does not take eight
    /// times as long as a step of one.
    fn break_even(&self, batch: u32) -> Option<f32> {
        let accepted_length = self.accepted_length.value()?;
        let times = self.steps.get(&batch_bucket(batch));
        let cost = times.and_then(|times| {
            let suffix_s = times.suffix.value().or(times.plain.value())?;
            Some(suffix_s / times.head.value()?)
        });
        Some((accepted_length * cost.unwrap_or(1.0)) as f32)
    }

    /// Takes a step into account. It is no evidence while something else is on trial.
    pub(super) fn observe(&mut self, step: &Step, others_try: bool) {
        if !(step.seconds.is_finite() && step.seconds > 0.0) {
            return;
        }
        let batch = step.batch();
        self.time(step, batch);
        // The rest of the step is counted in, so prompts seem to cost a little more than they do.
        let prompts = step.items.iter().filter(|item| item.route.is_none());
        let prompt_tokens: u32 = prompts.map(|item| item.context_tokens).sum();
        if prompt_tokens > 0 {
            self.prefill.add(f64::from(prompt_tokens), step.seconds);
        }
        for item in &step.items {
            if let (Some(Route::Fallback), Some(emitted)) = (item.route, item.emitted) {
                self.accepted_length.add(f64::from(emitted), 1.0);
            }
        }
        if batch > 0 {
            self.judge(step, others_try);
        }
    }

    fn time(&mut self, step: &Step, batch: u32) {
        let times = self.steps.entry(batch_bucket(batch)).or_default();
        match step.only_route() {
            Some(Route::Plain) => {
                self.plain.add(1.0, step.seconds);
                times.plain.add(step.seconds, 1.0);
            }
            Some(Route::Suffix) => times.suffix.add(step.seconds, 1.0),
            // Reading a prompt is paid once, whatever the step is used for.
            Some(Route::Fallback) if step.read_tokens() <= READ_LITTLE_TOKENS * batch => {
                times.head.add(step.seconds, 1.0);
            }
            _ => {}
        }
    }

    /// Shows a step to the trials as what they had let it do. The requests of a batch seldom decode all in one way;
    /// it counts that the trials decided for one of them.
    fn judge(&mut self, step: &Step, others_try: bool) {
        let mode = self.phase(step.batch()).map(Phase::mode);
        let (Some(mode), Some(trials)) = (mode, &mut self.trials) else {
            return;
        };
        let sample = |mode| Sample {
            batch: step.batch(),
            mode,
            tokens: step.emitted(),
            seconds: step.seconds,
            draft_seconds: step.draft_seconds,
            read_tokens: step.read_tokens(),
        };
        if self.is_budgeted || !step.items.iter().any(|item| item.may_use_head) {
            // The trials had no say, but the speed is worth knowing.
            trials.learn(sample(match step.only_route() {
                Some(Route::Plain) => Some(Mode::Without),
                Some(Route::Fallback) => Some(Mode::With),
                Some(Route::Suffix | Route::Merged) | None => None,
            }));
            return;
        }
        let decided = step.items.iter().any(|item| {
            item.may_use_head && matches!(item.route, Some(Route::Fallback | Route::Plain))
        });
        if !others_try && decided {
            trials.observe(sample(step.is_clean().then_some(mode)));
        }
    }

    /// See [`Router::request_ended`](super::Router::request_ended).
    pub(super) fn request_ended(&mut self, context_tokens: u32, unmatched_tokens: u32) {
        if let Some(trials) = &mut self.trials {
            trials.request_ended(context_tokens, unmatched_tokens);
        }
    }

    pub(super) fn status(&self, batch: u32) -> HeadStatus {
        let trials = self.trials.as_ref();
        HeadStatus {
            batch: batch_bucket(batch),
            in_use: self.phase(batch).is_some_and(|phase| phase.in_use),
            gain: trials.and_then(|trials| trials.gain(batch)),
            best_gain: trials.and_then(|trials| trials.best_gain(!self.is_budgeted)),
            accepted_length: self.accepted_length.value(),
            threshold: self.fallback(batch).threshold(self.threshold),
        }
    }

    pub(super) fn speeds(&self) -> Speeds {
        Speeds {
            prefill_tokens_s: self.prefill.value(),
            decode_tokens_s: self.plain.value(),
        }
    }
}
