//! The course of a replay, in windows of calls.

use serde::Serialize;

use super::counts::Acceptance;
use super::setup::Outcome;
use crate::text_table::{number, text_table};

/// A window of consecutive calls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Window {
    /// Calls that had ended by the end of the window.
    pub docs: u64,
    /// Output tokens per step within the window.
    pub tokens_per_step: Option<f64>,
    /// Accepted / drafted tokens within the window.
    pub acceptance_rate: Option<f64>,
}

impl Window {
    /// The windows of a replay.
    pub(crate) fn of(outcome: &Outcome) -> Vec<Window> {
        let mut before = Acceptance::default();
        let ends = outcome.tally.windows.iter();
        ends.map(|(docs, total)| {
            let within = total.since(&before);
            before = *total;
            Window {
                docs: *docs,
                tokens_per_step: within.accepted_length(),
                acceptance_rate: within.acceptance_rate(),
            }
        })
        .collect()
    }
}

/// The windows as a table for people; empty if there are none.
pub(super) fn table(name: &str, windows: &[Window]) -> String {
    if windows.is_empty() {
        return String::new();
    }
    let head = [name, "calls", "tokens per step", "acceptance rate"];
    let rows = windows.iter().map(|window| {
        vec![
            String::new(),
            window.docs.to_string(),
            number(window.tokens_per_step, 3),
            number(window.acceptance_rate, 3),
        ]
    });
    format!("\n{}", text_table(1, &head, rows))
}
