//! What steps were expected to bring, what they brought, and what they took on the modelled engine.

use serde::Serialize;

/// Chances are told apart by tenths.
const BUCKETS: usize = 10;

/// The account of one policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    /// Modelled time of all steps, seconds.
    pub(crate) engine_s: f64,
    /// Of it, the head's drafting.
    pub(super) head_s: f64,
    /// Draft tokens that were expected to be accepted, at the time of drafting.
    pub(super) accepted_expected: f64,
    /// Tokens beside the accepted ones: one a step, but none where a recording ends with an accepted token.
    pub(super) bonus_tokens: u64,
    /// Steps in which the head drafted.
    pub(super) head_steps: u64,
    chances: [Chances; BUCKETS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Chances {
    nodes: u64,
    expected: f64,
    accepted: u64,
}

/// Drafted tokens of which about the same was expected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reliability {
    /// They were held to be accepted with a chance from this up to a tenth more.
    pub from: f64,
    /// How many were verified.
    pub drafted: u64,
    /// Mean chance that was expected.
    pub expected: f64,
    /// Share that was accepted.
    pub accepted: f64,
}

impl Account {
    /// Takes a drafted token into account that was held to be accepted with this chance.
    pub(super) fn record(&mut self, chance: f32, accepted: bool) {
        let chance = f64::from(chance);
        self.accepted_expected += chance;
        let bucket = ((chance * BUCKETS as f64) as usize).min(BUCKETS - 1);
        let cell = &mut self.chances[bucket];
        cell.nodes += 1;
        cell.expected += chance;
        cell.accepted += u64::from(accepted);
    }

    /// Expected and observed shares, where something was drafted.
    pub(super) fn reliability(&self) -> Vec<Reliability> {
        let cells = self.chances.iter().enumerate();
        cells
            .filter(|(_, cell)| cell.nodes > 0)
            .map(|(bucket, cell)| Reliability {
                from: bucket as f64 / BUCKETS as f64,
                drafted: cell.nodes,
                expected: cell.expected / cell.nodes as f64,
                accepted: cell.accepted as f64 / cell.nodes as f64,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_held_against_what_came() {
        let mut account = Account::default();
        for (chance, accepted) in [(0.25, true), (0.21, false), (1.0, true), (0.0, false)] {
            account.record(chance, accepted);
        }
        assert!((account.accepted_expected - 1.46).abs() < 1e-6);
        let rows = account.reliability();
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.from, row.drafted, row.accepted))
            .collect();
        assert_eq!(told, [(0.0, 1, 0.0), (0.2, 2, 0.5), (0.9, 1, 1.0)]);
        assert!((rows[1].expected - 0.23).abs() < 1e-6);
    }
}
