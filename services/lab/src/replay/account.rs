//! The account of a policy: expected and accepted tokens, and the time on the modelled engine.

use serde::Serialize;

/// Buckets of expected probability: tenths.
const BUCKETS: usize = 10;

/// The account of one policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    /// Modelled time of all steps, seconds.
    pub(crate) engine_s: f64,
    /// The part of it in which the head drafted, seconds.
    pub(super) head_s: f64,
    /// Sum of the acceptance probabilities that were expected when drafts were chosen.
    pub(super) accepted_expected: f64,
    /// Tokens beside the accepted ones: one a step, but none where a recording ends with an accepted token.
    pub(super) bonus_tokens: u64,
    /// Steps in which the head drafted.
    pub(crate) head_steps: u64,
    buckets: [Bucket; BUCKETS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    nodes: u64,
    expected: f64,
    accepted: u64,
}

/// Drafted tokens with about the same expected probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reliability {
    /// Lower bound of the expected probability; the upper bound is a tenth more.
    pub from: f64,
    /// Verified tokens.
    pub drafted: u64,
    /// Mean expected probability.
    pub expected: f64,
    /// Share of the tokens that was accepted.
    pub accepted: f64,
}

impl Account {
    /// Counts a drafted token with this expected probability of acceptance.
    pub(super) fn record(&mut self, probability: f32, accepted: bool) {
        let probability = f64::from(probability);
        self.accepted_expected += probability;
        let bucket = ((probability * BUCKETS as f64) as usize).min(BUCKETS - 1);
        let cell = &mut self.buckets[bucket];
        cell.nodes += 1;
        cell.expected += probability;
        cell.accepted += u64::from(accepted);
    }

    /// Expected and observed acceptance of the buckets that are not empty.
    pub(super) fn reliability(&self) -> Vec<Reliability> {
        let cells = self.buckets.iter().enumerate();
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
    fn expected_probabilities_are_compared_with_acceptance() {
        let mut account = Account::default();
        for (probability, accepted) in [(0.25, true), (0.21, false), (1.0, true), (0.0, false)] {
            account.record(probability, accepted);
        }
        assert!((account.accepted_expected - 1.46).abs() < 1e-6);
        let rows = account.reliability();
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.from, row.drafted, row.accepted))
            .collect();
        assert_eq!(found, [(0.0, 1, 0.0), (0.2, 2, 0.5), (0.9, 1, 1.0)]);
        assert!((rows[1].expected - 0.23).abs() < 1e-6);
    }
}
