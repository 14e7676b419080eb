//! Whether drafts pay at a size of batch: steps that may verify them against steps that may not. Of the score router these
//! are suffix drafts, since the head has a gate of its own; of the goodput router, all.
//!
//! Alone, a request's drafts are verified with arithmetic that would lie idle; in a full batch they are not, and
//! drafts that are often refused make everybody slower. No clock and no I/O: the decode loop says what each
//! step was made of and what came of it.

use std::collections::HashMap;

use refrain_speculation::{Gate, GateStep, Mode, batch_bucket};

use crate::config::{RouterChoice, SpeculationConfig};
use crate::fallback::{ItemDone, ItemKind, StepDone};
use crate::metrics::WorkerMetrics;

/// How it stands with the engine's head at a size of batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadUse {
    /// It, or doing without it, is on trial.
    pub(crate) on_trial: bool,
    pub(crate) in_use: bool,
}

/// Holds drafts of `auto` requests back where they lose.
pub(crate) struct Guard {
    /// `None` if the configuration turns it off.
    gate: Option<Gate>,
    /// Drafts of the engine's head are held back as well.
    guards_head: bool,
    /// By the largest batch measured together.
    in_use: HashMap<u32, bool>,
    head_in_use: HashMap<u32, bool>,
    metrics: WorkerMetrics,
}

impl Guard {
    pub(crate) fn new(config: &SpeculationConfig, metrics: WorkerMetrics) -> Self {
        Guard {
            gate: config.guard_gate().map(Gate::new),
            guards_head: config.router == RouterChoice::Goodput,
            in_use: HashMap::new(),
            head_in_use: HashMap::new(),
            metrics,
        }
    }

    /// Whether a step that decodes for `batch` requests verifies no drafts but those that were asked for. While
    /// something else is on trial, this is not.
    pub(crate) fn withholds(&self, batch: u32, others_try: bool) -> bool {
        self.gate
            .as_ref()
            .is_some_and(|gate| match gate.passage(batch) {
                passage if others_try => !passage.is_in_use(),
                passage => passage.mode() == Mode::Plain,
            })
    }

    /// Whether drafts, or doing without them, are on trial at this size of batch.
    pub(crate) fn is_on_trial(&self, batch: u32) -> bool {
        self.gate
            .as_ref()
            .is_some_and(|gate| gate.passage(batch).is_trial())
    }

    /// Takes a step into account; `withheld` is what [`Guard::withholds`] said of it, `head` how it stands with
    /// the engine's head at its size of batch.
    pub(crate) fn step_done(&mut self, step: &StepDone<'_>, withheld: bool, head: HeadUse) {
        let Some(gate) = &mut self.gate else {
            return;
        };
        let batch = step.batch();
        if batch == 0 {
            return;
        }
        let known = self.head_in_use.insert(batch_bucket(batch), head.in_use);
        if known.is_some_and(|known| known != head.in_use) {
            // Doing without suffix drafts means something else from now on.
            gate.forget(batch);
        }
        // Steps that had no draft to verify are the same with and without; one that withheld may have had some.
        let guards_head = self.guards_head;
        let drafted = |item: &ItemDone| match item.kind {
            ItemKind::Suffix => true,
            ItemKind::Fallback => guards_head,
            ItemKind::Prefill | ItemKind::Plain => false,
        };
        let speaks = |item: &ItemDone| item.is_auto && (withheld || drafted(item));
        if head.on_trial || !step.items.iter().any(speaks) {
            return;
        }
        let mode = if withheld {
            Mode::Plain
        } else {
            Mode::Fallback
        };
        gate.observe(GateStep {
            draft_seconds: 0.0,
            catch_up_tokens: 0,
            ..step.figures(step.is_clean().then_some(mode))
        });
        let in_use = gate.passage(batch).is_in_use();
        let gain = gate.gain(batch);
        let batch = batch_bucket(batch);
        self.metrics.guard_gate(batch, in_use, gain);
        let was_in_use = self.in_use.insert(batch, in_use).unwrap_or(true);
        if in_use != was_in_use {
            tracing::info!(batch, in_use, gain, "use of drafts changed");
        }
    }
}
