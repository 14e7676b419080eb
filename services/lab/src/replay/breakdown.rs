//! What drafts brought, by a length: that of the match, or that of the output so far.

use clap::ValueEnum;
use serde::Serialize;

use super::counts::Acceptance;
use super::serve::Tally;
use crate::text_table::{number, text_table};

/// A length by which steps are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Breakdown {
    /// Tokens that matched, for the steps that had a draft from memory.
    MatchLength,
    /// Output tokens before the step, for all steps.
    Position,
}

/// Counters by a length, in ranges that double: 0, 1, 2 to 3, 4 to 7 and so on.
#[derive(Clone, Debug, Default)]
pub(crate) struct AcceptanceByLength {
    ranges: Vec<Acceptance>,
}

/// The steps whose length is in one range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LengthRow {
    /// The shortest length of the range.
    pub from: u64,
    /// The longest one.
    pub to: u64,
    /// Steps.
    pub steps: u64,
    /// Draft tokens per step.
    pub drafted_per_step: Option<f64>,
    /// Accepted draft tokens per step.
    pub accepted_per_step: Option<f64>,
    /// Output tokens per step.
    pub tokens_per_step: Option<f64>,
    /// Accepted / drafted tokens.
    pub acceptance_rate: Option<f64>,
}

impl AcceptanceByLength {
    /// Adds the counts of a step of this length.
    pub(super) fn record(&mut self, length: u64, counts: Acceptance) {
        let range = (u64::BITS - length.leading_zeros()) as usize;
        if self.ranges.len() <= range {
            self.ranges.resize(range + 1, Acceptance::default());
        }
        self.ranges[range] += counts;
    }

    /// The ranges that had a step.
    fn rows(&self) -> Vec<LengthRow> {
        let ranges = (0u32..).zip(&self.ranges);
        let row = |(range, counts): (u32, &Acceptance)| LengthRow {
            from: if range == 0 { 0 } else { 1 << (range - 1) },
            to: (1u64 << range) - 1,
            steps: counts.steps,
            drafted_per_step: counts.per_step(counts.drafted as f64),
            accepted_per_step: counts.per_step(counts.accepted as f64),
            tokens_per_step: counts.accepted_length(),
            acceptance_rate: counts.acceptance_rate(),
        };
        let had_steps = ranges.filter(|(_, counts)| counts.steps > 0);
        had_steps.map(row).collect()
    }
}

impl Breakdown {
    /// The rows of this length.
    pub(crate) fn rows(self, tally: &Tally) -> Vec<LengthRow> {
        match self {
            Breakdown::MatchLength => tally.by_match_len.rows(),
            Breakdown::Position => tally.by_position.rows(),
        }
    }
}

impl LengthRow {
    /// The range in words.
    pub fn range(&self) -> String {
        match self.from == self.to {
            true => self.from.to_string(),
            false => format!("{} to {}", self.from, self.to),
        }
    }
}

/// The rows for people.
pub(super) fn table(what: Breakdown, rows: &[LengthRow]) -> String {
    let name = match what {
        Breakdown::MatchLength => "match, tokens",
        Breakdown::Position => "output before, tokens",
    };
    let head = [name, "steps", "drafted", "accepted", "tokens", "rate"];
    let lines = rows.iter().map(|row| {
        vec![
            row.range(),
            row.steps.to_string(),
            number(row.drafted_per_step, 3),
            number(row.accepted_per_step, 3),
            number(row.tokens_per_step, 3),
            number(row.acceptance_rate, 3),
        ]
    });
    format!("\n{}", text_table(1, &head, lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_in_ranges_that_double() {
        let mut by_length = AcceptanceByLength::default();
        for (length, accepted) in [(0, 0), (1, 1), (2, 1), (3, 3), (64, 9)] {
            by_length.record(length, Acceptance::of_step(10, accepted, accepted + 1));
        }
        let rows = by_length.rows();
        let found: Vec<_> = rows.iter().map(|row| (row.range(), row.steps)).collect();
        let row = |range: &str, steps| (range.to_owned(), steps);
        assert_eq!(
            found,
            [
                row("0", 1),
                row("1", 1),
                row("2 to 3", 2),
                row("64 to 127", 1)
            ]
        );
        assert_eq!(rows[2].accepted_per_step, Some(2.0));
        assert_eq!(rows[2].acceptance_rate, Some(0.2));
    }
}
