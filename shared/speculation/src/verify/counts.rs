//! Counters of drafted, accepted and emitted tokens.

use std::ops::AddAssign;

use crate::draft::{Scope, Source};

/// Counters of some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    /// Engine steps.
    pub steps: u64,
    /// Draft tokens verified.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Tokens emitted: the accepted ones and the target's own, less those that a stop rule cut.
    pub emitted: u64,
}

impl Acceptance {
    /// Counts one step.
    pub fn record(&mut self, drafted: usize, accepted: usize, emitted: usize) {
        *self += Acceptance {
            steps: 1,
            drafted: drafted as u64,
            accepted: accepted as u64,
            emitted: emitted as u64,
        };
    }

    /// The counts since `earlier`, an earlier state of these counters.
    pub fn since(&self, earlier: &Acceptance) -> Acceptance {
        Acceptance {
            steps: self.steps - earlier.steps,
            drafted: self.drafted - earlier.drafted,
            accepted: self.accepted - earlier.accepted,
            emitted: self.emitted - earlier.emitted,
        }
    }

    /// Accepted draft tokens per draft token; `None` without draft tokens.
    pub fn acceptance_rate(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens per step, including the target's own (tau in papers); `None` without steps.
    pub fn accepted_length(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.emitted as f64 / self.steps as f64)
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptanceTable {
    cells: [[Acceptance; Scope::ALL.len()]; Source::ALL.len()],
}

impl AcceptanceTable {
    /// The counters of one source and scope.
    pub fn get(&self, source: Source, scope: Scope) -> &Acceptance {
        &self.cells[source as usize][scope as usize]
    }

    /// The counters of one source and scope, to be changed.
    pub fn get_mut(&mut self, source: Source, scope: Scope) -> &mut Acceptance {
        &mut self.cells[source as usize][scope as usize]
    }

    /// All counters except those with 0 steps.
    pub fn iter(&self) -> impl Iterator<Item = (Source, Scope, &Acceptance)> {
        Source::ALL
            .into_iter()
            .flat_map(|source| Scope::ALL.map(|scope| (source, scope, self.get(source, scope))))
            .filter(|(_, _, counts)| counts.steps > 0)
    }

    /// The sum of all counters.
    pub fn total(&self) -> Acceptance {
        let mut total = Acceptance::default();
        self.cells
            .iter()
            .flatten()
            .for_each(|counts| total += *counts);
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_add_up() {
        let mut table = AcceptanceTable::default();
        assert_eq!(
            (
                table.total().acceptance_rate(),
                table.total().accepted_length()
            ),
            (None, None)
        );
        table.get_mut(Source::Suffix, Scope::Group).record(8, 3, 4);
        table.get_mut(Source::Suffix, Scope::Group).record(4, 0, 1);
        table.get_mut(Source::None, Scope::Request).record(0, 0, 1);
        let group = table.get(Source::Suffix, Scope::Group);
        assert_eq!(
            (group.acceptance_rate(), group.accepted_length()),
            (Some(0.25), Some(2.5))
        );
        assert_eq!(
            table.get(Source::None, Scope::Request).acceptance_rate(),
            None
        );
        assert_eq!(
            table.total(),
            Acceptance {
                steps: 3,
                drafted: 12,
                accepted: 3,
                emitted: 6
            }
        );
        let seen: Vec<_> = table
            .iter()
            .map(|(source, scope, _)| (source.as_str(), scope.as_str()))
            .collect();
        assert_eq!(seen, [("suffix", "group"), ("none", "request")]);
    }
}
