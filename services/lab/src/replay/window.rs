//! How a replay went as the calls went by.

use std::fmt::Write;

use refrain_speculation::verify::Acceptance;
use serde::Serialize;

use super::compare::Outcome;

/// Some calls, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Window {
    /// Calls that had ended at its end.
    pub docs: u64,
    /// Output tokens per step within it.
    pub tokens_per_step: Option<f64>,
    /// Accepted / drafted within it.
    pub acceptance_rate: Option<f64>,
}

impl Window {
    /// Those of a replay.
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

/// The windows for people; nothing, if there are none.
pub(super) fn table(name: &str, windows: &[Window]) -> String {
    let mut text = String::new();
    if windows.is_empty() {
        return text;
    }
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
    let _ = writeln!(
        text,
        "\n{name:<16} {:>10} {:>16} {:>16}",
        "calls", "tokens per step", "acceptance rate"
    );
    for window in windows {
        let _ = writeln!(
            text,
            "{:<16} {:>10} {:>16} {:>16}",
            "",
            window.docs,
            number(window.tokens_per_step),
            number(window.acceptance_rate)
        );
    }
    text
}
