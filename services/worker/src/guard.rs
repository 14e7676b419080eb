//! The guard over the drafts of `auto` requests, fed with the loop's steps: its verdicts are told to metrics and log.

use refrain_speculation::{Guard as Rule, Guarded, GuardedStep, HeadUse};

use crate::config::{RouterChoice, SpeculationConfig};
use crate::fallback::{ItemDone, ItemKind, StepDone};
use crate::metrics::WorkerMetrics;

/// Holds drafts of `auto` requests back where they lose.
pub(crate) struct Guard {
    /// `None` if the configuration turns it off.
    rule: Option<Rule>,
    metrics: WorkerMetrics,
}

impl Guard {
    pub(crate) fn new(config: &SpeculationConfig, metrics: WorkerMetrics) -> Self {
        let guarded = match config.router {
            RouterChoice::Score => Guarded::SuffixDrafts,
            RouterChoice::Goodput => Guarded::AllDrafts,
        };
        let is_on = config.gain_min > 0.0;
        Guard {
            rule: is_on.then(|| Rule::new(config.gain_min, guarded)),
            metrics,
        }
    }

    /// See [`Rule::withholds`].
    pub(crate) fn withholds(&self, batch: u32, may_try: bool) -> bool {
        let rule = self.rule.as_ref();
        rule.is_some_and(|rule| rule.withholds(batch, may_try))
    }

    /// See [`Rule::is_on_trial`].
    pub(crate) fn is_on_trial(&self, batch: u32) -> bool {
        self.rule
            .as_ref()
            .is_some_and(|rule| rule.is_on_trial(batch))
    }

    /// Takes a step into account; `withheld` is what [`Guard::withholds`] said of it, `head` how it stands with
    /// the engine's head at its size of batch.
    pub(crate) fn step_done(&mut self, step: &StepDone<'_>, withheld: bool, head: HeadUse) {
        let Some(rule) = &mut self.rule else {
            return;
        };
        let guards_head = rule.guarded() == Guarded::AllDrafts;
        let drafted = |item: &ItemDone| match item.kind {
            ItemKind::Suffix => true,
            ItemKind::Fallback | ItemKind::Merged => guards_head,
            ItemKind::Prefill | ItemKind::Plain => false,
        };
        let figures = step.figures(None);
        let guarded = GuardedStep {
            batch: figures.batch,
            tokens: figures.tokens,
            seconds: figures.seconds,
            withheld,
            concerned: step
                .items
                .iter()
                .any(|item| item.is_auto && (withheld || drafted(item))),
            is_clean: step.is_clean(),
        };
        let Some(verdict) = rule.step_done(&guarded, head) else {
            return;
        };
        self.metrics
            .guard_gate(verdict.batch, verdict.in_use, verdict.gain);
        if verdict.changed {
            tracing::info!(
                batch = verdict.batch,
                in_use = verdict.in_use,
                gain = verdict.gain,
                "use of drafts changed"
            );
        }
    }
}
