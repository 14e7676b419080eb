//! The lengths by which a replay counts its steps.

use clap::ValueEnum;
use serde::Serialize;

use super::by_length::LengthRow;
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

impl Breakdown {
    /// The rows of this length.
    pub(crate) fn rows(self, tally: &Tally) -> Vec<LengthRow> {
        match self {
            Breakdown::MatchLength => tally.by_match_len.rows(),
            Breakdown::Position => tally.by_position.rows(),
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
