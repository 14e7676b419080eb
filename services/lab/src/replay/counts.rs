//! Counters of drafted, accepted and emitted tokens.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use refrain_speculation::draft::{Scope, Source};

/// Counters of some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Acceptance {
    /// Engine steps.
    pub(crate) steps: u64,
    /// Draft tokens verified.
    pub(crate) drafted: u64,
    /// Draft tokens accepted.
    pub(crate) accepted: u64,
    /// Tokens emitted: the accepted ones and the target's own, less those that a stop rule cut.
    pub(crate) emitted: u64,
}

impl Acceptance {
    /// The counts of one step.
    pub(crate) fn of_step(drafted: usize, accepted: usize, emitted: usize) -> Self {
        Acceptance {
            steps: 1,
            drafted: drafted as u64,
            accepted: accepted as u64,
            emitted: emitted as u64,
        }
    }

    /// The counts since `earlier`, an earlier state of these counters.
    pub(crate) fn since(&self, earlier: &Acceptance) -> Acceptance {
        Acceptance {
            steps: self.steps - earlier.steps,
            drafted: self.drafted - earlier.drafted,
            accepted: self.accepted - earlier.accepted,
            emitted: self.emitted - earlier.emitted,
        }
    }

    /// A sum over the steps, per step; `None` without steps.
    pub(crate) fn per_step(&self, sum: f64) -> Option<f64> {
        (self.steps > 0).then(|| sum / self.steps as f64)
    }

    /// Accepted draft tokens per draft token; `None` without draft tokens.
    pub(crate) fn acceptance_rate(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens per step, including the target's own (tau in papers); `None` without steps.
    pub(crate) fn accepted_length(&self) -> Option<f64> {
        self.per_step(self.emitted as f64)
    }
}

impl AddAssign for Acceptance {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.emitted += other.emitted;
    }
}

/// Counters by source and scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AcceptanceTable {
    cells: BTreeMap<(Source, Scope), Acceptance>,
}

impl AcceptanceTable {
    /// Adds the counts of a step.
    pub(crate) fn record(&mut self, (source, scope): (Source, Scope), counts: Acceptance) {
        *self.cells.entry((source, scope)).or_default() += counts;
    }

    /// The counters of all sources that had a step.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Source, Scope, &Acceptance)> {
        let cells = self.cells.iter();
        cells.map(|((source, scope), counts)| (*source, *scope, counts))
    }

    /// The sum of all counters.
    pub(crate) fn total(&self) -> Acceptance {
        let mut total = Acceptance::default();
        for counts in self.cells.values() {
            total += *counts;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_add_up() {
        let mut table = AcceptanceTable::default();
        let rates = |of: &Acceptance| (of.acceptance_rate(), of.accepted_length());
        assert_eq!(rates(&table.total()), (None, None));
        let (group, none) = (
            (Source::Suffix, Scope::Group),
            (Source::None, Scope::Request),
        );
        table.record(none, Acceptance::of_step(0, 0, 1));
        table.record(group, Acceptance::of_step(8, 3, 4));
        table.record(group, Acceptance::of_step(4, 0, 1));
        let seen: Vec<_> = table
            .iter()
            .map(|(source, scope, counts)| ((source, scope), rates(counts)))
            .collect();
        let expected = [(group, (Some(0.25), Some(2.5))), (none, (None, Some(1.0)))];
        assert_eq!(seen, expected);
        let expected = Acceptance {
            steps: 3,
            drafted: 12,
            accepted: 3,
            emitted: 6,
        };
        assert_eq!(table.total(), expected);
    }
}
