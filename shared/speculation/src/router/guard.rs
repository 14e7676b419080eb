//! The guard: measures steps with drafts against steps without them, and turns drafting off where it loses.
//!
//! It believes no estimate of the router. Suffix drafts need no head, but where verifying them is not nearly free,
//! drafts that are often rejected make every request slower. Under the score policy the guard holds back suffix
//! drafts only, because the head has trials of its own there. Under the goodput policy it holds back all drafts.

use std::collections::HashMap;

use super::trials::{Mode, Phase, Sample, TrialParams, Trials, batch_bucket};
use super::{Route, RouteReason, Step};

/// The drafts that a guard holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guarded {
    /// Suffix drafts.
    SuffixDrafts,
    /// Suffix drafts and the head's.
    AllDrafts,
}

/// The guard's view of drafts at a batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// The largest batch that it is about.
    pub batch: u32,
    /// Whether drafts are in use.
    pub in_use: bool,
    /// Whether that has just changed.
    pub changed: bool,
    /// Tokens per second with drafts over those without, once both were measured.
    pub gain: Option<f64>,
}

/// Trials of something that saves steps against doing without it, which starts in use and goes out of use where its
/// gain is below a limit.
#[derive(Clone, Debug)]
struct Gate {
    trials: Trials,
    /// By the largest batch that is measured together: whether it was in use at the last verdict.
    was_in_use: HashMap<u32, bool>,
}

impl Gate {
    /// With more `patience`, trials are longer and come later.
    fn new(gain_min: f64, patience: u32) -> Self {
        let usual = TrialParams::default();
        let params = TrialParams {
            gain_leave: gain_min,
            gain_enter: gain_min,
            trial_steps: patience * usual.trial_steps,
            backoff_steps: patience * usual.backoff_steps,
            ..usual
        };
        Gate {
            trials: Trials::new(Mode::With, params),
            was_in_use: HashMap::new(),
        }
    }

    fn observe(&mut self, sample: Sample) -> Verdict {
        self.trials.observe(sample);
        let in_use = self.trials.phase(sample.batch).in_use;
        let batch = batch_bucket(sample.batch);
        let was_in_use = self.was_in_use.insert(batch, in_use).unwrap_or(true);
        Verdict {
            batch,
            in_use,
            changed: in_use != was_in_use,
            gain: self.trials.gain(sample.batch),
        }
    }
}

/// The guard of drive mode, over calls that verify a draft while the engine generates by itself.
#[derive(Clone, Debug)]
pub struct CallGuard(Gate);

impl CallGuard {
    /// A guard that holds calls back below `gain_min`, tokens per second with calls over those without.
    pub fn new(gain_min: f64) -> Self {
        CallGuard(Gate::new(gain_min, 1))
    }

    /// Why no call is made that should pay, while `batch` requests run; `None` if it is made.
    pub fn holds_back(&self, batch: u32) -> Option<RouteReason> {
        let phase = self.0.trials.phase(batch);
        match phase.mode() {
            Mode::With => None,
            Mode::Without if phase.on_trial => Some(RouteReason::Pause),
            Mode::Without => Some(RouteReason::SuffixNotPaying),
        }
    }

    /// Takes a stretch of `seconds` into account in which `batch` requests emitted `tokens`, and in which a call was
    /// made or held back. Returns the present verdict.
    pub fn observe(&mut self, batch: u32, called: bool, tokens: u32, seconds: f64) -> Verdict {
        self.0.observe(Sample {
            batch,
            mode: Some(if called { Mode::With } else { Mode::Without }),
            tokens,
            seconds,
            draft_seconds: 0.0,
            read_tokens: 0,
        })
    }
}

/// A guard over the drafts of `auto` requests.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    gate: Gate,
    guarded: Guarded,
    /// By the largest batch that is measured together.
    head_in_use: HashMap<u32, bool>,
}

impl Guard {
    /// A guard that holds drafts back below `gain_min`, tokens per second with drafts over those without.
    pub(super) fn new(gain_min: f64, guarded: Guarded) -> Self {
        // The goodput policy leaves out by itself what does not pay, so a verdict against all of it has time to be
        // sure.
        let patience = match guarded {
            Guarded::SuffixDrafts => 1,
            Guarded::AllDrafts => 3,
        };
        Guard {
            gate: Gate::new(gain_min, patience),
            guarded,
            head_in_use: HashMap::new(),
        }
    }

    /// Whether a step that decodes for `batch` requests verifies no guarded drafts. The guard starts no trial unless
    /// it `may_try`.
    pub(super) fn withholds(&self, batch: u32, may_try: bool) -> bool {
        match self.gate.trials.phase(batch) {
            phase if may_try => phase.mode() == Mode::Without,
            phase => !phase.in_use,
        }
    }

    /// Whether drafts, or doing without them, are on trial at this batch size.
    pub(super) fn is_on_trial(&self, batch: u32) -> bool {
        self.gate.trials.phase(batch).on_trial
    }

    /// Takes a step into account. Returns the present verdict, if the step was evidence.
    pub(super) fn observe(&mut self, step: &Step, head: Phase) -> Option<Verdict> {
        let batch = step.batch();
        if batch == 0 {
            return None;
        }
        // The goodput policy weighs the head step by step, so its drafts are part of what is guarded.
        let head = match self.guarded {
            Guarded::SuffixDrafts => head,
            Guarded::AllDrafts => Phase::default(),
        };
        let known = self.head_in_use.insert(batch_bucket(batch), head.in_use);
        if known.is_some_and(|known| known != head.in_use) {
            // Doing without suffix drafts means something else from now on.
            self.gate.trials.forget(batch);
        }
        if head.on_trial || !self.concerns(step) {
            return None;
        }
        let mode = match step.withheld {
            true => Mode::Without,
            false => Mode::With,
        };
        Some(self.gate.observe(Sample {
            batch,
            mode: step.is_clean().then_some(mode),
            tokens: step.emitted(),
            seconds: step.seconds + step.compose_seconds,
            draft_seconds: 0.0,
            read_tokens: 0,
        }))
    }

    /// Whether guarded drafts were verified, or might have been had they not been held back. Steps without any are
    /// the same with and without.
    fn concerns(&self, step: &Step) -> bool {
        let is_guarded = |route| match route {
            Some(Route::Suffix) => true,
            Some(Route::Fallback | Route::Merged) => self.guarded == Guarded::AllDrafts,
            Some(Route::Plain) | None => false,
        };
        let mut auto = step.items.iter().filter(|item| item.is_auto);
        auto.any(|item| step.withheld || is_guarded(item.route))
    }
}

#[cfg(test)]
mod tests;
