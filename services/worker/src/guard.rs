//! Whether suffix drafts pay at a size of batch: steps that may verify them against steps that may not.
//!
//! Alone, a request's drafts are verified with arithmetic that would lie idle; in a full batch they are not, and
//! drafts that are often refused make everybody slower. No clock and no I/O: the decode loop says what each
//! step was made of and what came of it.

use std::collections::HashMap;

use refrain_speculation::{Gate, GateStep, Mode, Passage, batch_bucket};

use crate::config::SpeculationConfig;
use crate::fallback::{ItemDone, ItemKind};
use crate::metrics::WorkerMetrics;

/// Holds suffix drafts of `auto` requests back where they lose.
pub(crate) struct SuffixGuard {
    /// `None` if the configuration turns it off.
    gate: Option<Gate>,
    /// By the largest batch measured together.
    in_use: HashMap<u32, bool>,
    metrics: WorkerMetrics,
}

impl SuffixGuard {
    pub(crate) fn new(config: &SpeculationConfig, metrics: WorkerMetrics) -> Self {
        SuffixGuard {
            gate: config.suffix_gate().map(Gate::new),
            in_use: HashMap::new(),
            metrics,
        }
    }

    /// Whether a step that decodes for `batch` requests verifies no suffix drafts but those that were asked for.
    pub(crate) fn withholds(&self, batch: u32) -> bool {
        self.gate
            .as_ref()
            .is_some_and(|gate| matches!(gate.passage(batch), Passage::Shut | Passage::Pause))
    }

    /// Takes a step into account; `withheld` is what [`SuffixGuard::withholds`] said of it.
    pub(crate) fn step_done(&mut self, items: &[ItemDone], withheld: bool, step_s: f64) {
        let Some(gate) = &mut self.gate else {
            return;
        };
        // A step without a request that the guard speaks for says nothing of either way.
        let speaks = items.iter().any(|item| item.is_auto);
        let is_clean = items
            .iter()
            .all(|item| item.kind != ItemKind::Prefill && item.emitted.is_some());
        let batch = items
            .iter()
            .filter(|item| item.kind != ItemKind::Prefill)
            .count() as u32;
        if !speaks || batch == 0 {
            return;
        }
        let mode = if withheld {
            Mode::Plain
        } else {
            Mode::Fallback
        };
        gate.observe(GateStep {
            batch,
            mode: is_clean.then_some(mode),
            tokens: items.iter().filter_map(|item| item.emitted).sum(),
            seconds: step_s,
            draft_seconds: 0.0,
            catch_up_tokens: 0,
        });
        let in_use = matches!(gate.passage(batch), Passage::Open | Passage::Pause);
        let gain = gate.gain(batch);
        let batch = batch_bucket(batch);
        self.metrics.suffix_gate(batch, in_use, gain);
        let was_in_use = self.in_use.insert(batch, in_use).unwrap_or(true);
        if in_use != was_in_use {
            tracing::info!(batch, in_use, gain, "use of suffix drafts changed");
        }
    }
}
