//! Counts of steps by a length, in ranges that double.

use serde::Serialize;

use super::counts::Acceptance;

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
    pub(super) fn rows(&self) -> Vec<LengthRow> {
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

impl LengthRow {
    /// The range in words.
    pub fn range(&self) -> String {
        match self.from == self.to {
            true => self.from.to_string(),
            false => format!("{} to {}", self.from, self.to),
        }
    }
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
