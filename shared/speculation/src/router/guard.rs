//! The guard: measures steps with drafts against steps without them, and turns drafting off where it loses.
//!
//! It believes no estimate of the router. Suffix drafts need no head, but where verifying them is not nearly free,
//! drafts that are often rejected make every request slower. Under the score policy the guard holds back suffix
//! drafts only, because the head has trials of its own there. Under the goodput policy it holds back all drafts.

use std::collections::HashMap;

use super::trials::{Mode, Phase, Sample, TrialParams, Trials, batch_bucket};
use super::{Route, Step};

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

/// A guard over the drafts of `auto` requests. They start in use, and go out of use where their gain is below a
/// limit.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    trials: Trials,
    guarded: Guarded,
    /// By the largest batch that is measured together: whether drafts were in use at the last verdict.
    was_in_use: HashMap<u32, bool>,
    /// By the largest batch that is measured together.
    head_in_use: HashMap<u32, bool>,
}

impl Guard {
    /// A guard that holds drafts back below `gain_min`, tokens per second with drafts over those without.
    pub(super) fn new(gain_min: f64, guarded: Guarded) -> Self {
        // The goodput policy already drops drafts that lose. So this guard may collect more evidence before it turns
        // all of them off: its trials are longer and come later.
        let patience = match guarded {
            Guarded::SuffixDrafts => 1,
            Guarded::AllDrafts => 3,
        };
        let usual = TrialParams::default();
        let params = TrialParams {
            gain_leave: gain_min,
            gain_enter: gain_min,
            trial_steps: patience * usual.trial_steps,
            backoff_steps: patience * usual.backoff_steps,
            ..usual
        };
        Guard {
            trials: Trials::new(Mode::With, params),
            guarded,
            was_in_use: HashMap::new(),
            head_in_use: HashMap::new(),
        }
    }

    /// Whether a step that decodes for `batch` requests verifies no guarded drafts. The guard starts no trial unless
    /// it `may_try`.
    pub(super) fn withholds(&self, batch: u32, may_try: bool) -> bool {
        match self.trials.phase(batch) {
            phase if may_try => phase.mode() == Mode::Without,
            phase => !phase.in_use,
        }
    }

    /// Whether drafts, or doing without them, are on trial at this batch size.
    pub(super) fn is_on_trial(&self, batch: u32) -> bool {
        self.trials.phase(batch).on_trial
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
        let bucket = batch_bucket(batch);
        let known = self.head_in_use.insert(bucket, head.in_use);
        if known.is_some_and(|known| known != head.in_use) {
            // Doing without suffix drafts means something else from now on.
            self.trials.forget(batch);
        }
        if head.on_trial || !self.concerns(step) {
            return None;
        }
        let mode = match step.withheld {
            true => Mode::Without,
            false => Mode::With,
        };
        self.trials.observe(Sample {
            batch,
            mode: step.is_clean().then_some(mode),
            tokens: step.emitted(),
            seconds: step.seconds + step.compose_seconds,
            draft_seconds: 0.0,
            read_tokens: 0,
        });
        let in_use = self.trials.phase(batch).in_use;
        let was_in_use = self.was_in_use.insert(bucket, in_use).unwrap_or(true);
        Some(Verdict {
            batch: bucket,
            in_use,
            changed: in_use != was_in_use,
            gain: self.trials.gain(batch),
        })
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
