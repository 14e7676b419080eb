//! Whether drafts pay at a size of batch: steps that may verify them against steps that may not. It believes neither
//! chances nor costs.
//!
//! Alone, a request's drafts are verified with arithmetic that would lie idle; in a full batch they are not, and drafts that
//! are often refused make everybody slower. Behind the score router the guard holds back suffix drafts, since the head
//! has a [`Gate`] of its own there; behind the goodput router all.

use std::collections::HashMap;

use crate::{Gate, GateParams, GateStep, Mode, batch_bucket};

/// What a guard holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// Suffix drafts.
    SuffixDrafts,
    /// Those, and the head's.
    AllDrafts,
}

/// A step that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuardedStep {
    /// Requests that decoded.
    pub batch: u32,
    /// Tokens that they were given.
    pub tokens: u32,
    /// What it took, with finding the drafts: doing without saves that, too.
    pub seconds: f64,
    /// What [`Guard::withholds`] said of it.
    pub withheld: bool,
    /// Drafts that are guarded were verified, or might have been had they not been held back: steps without any are the
    /// same with and without.
    pub concerned: bool,
    /// All of it was decoding, and came to something.
    pub is_clean: bool,
}

/// How it stands with a head that has a gate of its own, at a size of batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadUse {
    /// It, or doing without it, is on trial.
    pub on_trial: bool,
    /// It is in use.
    pub in_use: bool,
}

/// What a guard holds of drafts at a size of batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// The largest batch that it is about.
    pub batch: u32,
    /// Whether they are in use.
    pub in_use: bool,
    /// Whether that is news.
    pub changed: bool,
    /// Tokens per second with them / without, once both were measured.
    pub gain: Option<f64>,
}

/// See the module. No clock: the caller passes the seconds.
#[derive(Clone, Debug)]
pub struct Guard {
    gate: Gate,
    guarded: Guarded,
    /// By the largest batch measured together.
    in_use: HashMap<u32, bool>,
    head_in_use: HashMap<u32, bool>,
}

impl Guard {
    /// A guard that holds drafts back below `gain_min`, tokens per second with / without.
    pub fn new(gain_min: f64, guarded: Guarded) -> Self {
        let usual = GateParams::default();
        // The goodput router leaves out what does not pay by itself, so a verdict against all of it has time to be sure.
        let patience = match guarded {
            Guarded::SuffixDrafts => 1,
            Guarded::AllDrafts => 3,
        };
        Guard {
            gate: Gate::new(GateParams {
                starts_with: Mode::Fallback,
                gain_leave: gain_min,
                gain_enter: gain_min,
                probe_steps: patience * usual.probe_steps,
                backoff_steps: patience * usual.backoff_steps,
                ..usual
            }),
            guarded,
            in_use: HashMap::new(),
            head_in_use: HashMap::new(),
        }
    }

    /// What it holds back.
    pub fn guarded(&self) -> Guarded {
        self.guarded
    }

    /// Whether a step that decodes for `batch` requests verifies no drafts but those that were asked for. It tries what is
    /// not in use only where it `may_try`: not while something else is on trial, and not in a step that reads a prompt as
    /// well, which would pay for the trial and be no evidence.
    pub fn withholds(&self, batch: u32, may_try: bool) -> bool {
        match self.gate.passage(batch) {
            passage if may_try => passage.mode() == Mode::Plain,
            passage => !passage.is_in_use(),
        }
    }

    /// Whether drafts, or doing without them, are on trial at this size of batch.
    pub fn is_on_trial(&self, batch: u32) -> bool {
        self.gate.passage(batch).is_trial()
    }

    /// Takes a step into account. What is held now, if the step was any evidence.
    pub fn step_done(&mut self, step: &GuardedStep, head: HeadUse) -> Option<Verdict> {
        let batch = step.batch;
        if batch == 0 {
            return None;
        }
        let known = self.head_in_use.insert(batch_bucket(batch), head.in_use);
        if known.is_some_and(|known| known != head.in_use) {
            // Doing without suffix drafts means something else from now on.
            self.gate.forget(batch);
        }
        if head.on_trial || !step.concerned {
            return None;
        }
        let mode = match step.withheld {
            true => Mode::Plain,
            false => Mode::Fallback,
        };
        self.gate.observe(GateStep {
            batch,
            mode: step.is_clean.then_some(mode),
            tokens: step.tokens,
            seconds: step.seconds,
            draft_seconds: 0.0,
            catch_up_tokens: 0,
        });
        let in_use = self.gate.passage(batch).is_in_use();
        let gain = self.gate.gain(batch);
        let batch = batch_bucket(batch);
        let was_in_use = self.in_use.insert(batch, in_use).unwrap_or(true);
        Some(Verdict {
            batch,
            in_use,
            changed: in_use != was_in_use,
            gain,
        })
    }
}

#[cfg(test)]
mod tests;
