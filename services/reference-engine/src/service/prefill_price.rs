//! The price of reading a context, measured in the steps that read much of one.

use crate::engine::StepReport;

/// Tokens of context in a step from which on its time tells what reading costs. Shorter pieces are a small part of
/// their step, so their share of it says little.
const MEASURED_TOKENS_MIN: usize = 32;

/// The weight of a new measurement.
const WEIGHT: f64 = 0.1;

/// A running mean of what reading a context costs.
#[derive(Debug, Default)]
pub(super) struct PrefillPrice {
    ms_per_1k: Option<f64>,
}

impl PrefillPrice {
    /// Learns from a step that took `seconds` for its rows.
    pub(super) fn learn(&mut self, step: &StepReport, seconds: f64) {
        if step.prefilled_tokens < MEASURED_TOKENS_MIN || step.computed_tokens == 0 {
            return;
        }
        // Every row costs about the same, whatever it is for.
        let ms_per_1k = seconds.max(0.0) * 1e6 / step.computed_tokens as f64;
        let mean = self.ms_per_1k.unwrap_or(ms_per_1k);
        self.ms_per_1k = Some(mean + WEIGHT * (ms_per_1k - mean));
    }

    /// Milliseconds to read a thousand tokens. `None`: not measured yet.
    pub(super) fn ms_per_1k(&self) -> Option<f32> {
        self.ms_per_1k.map(|price| price as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::DraftRows;

    #[test]
    fn only_steps_that_read_much_are_measured() {
        let step = |prefilled_tokens, computed_tokens| StepReport {
            results: Vec::new(),
            computed_tokens,
            prefilled_tokens,
            draft_rows: DraftRows::default(),
            states_dropped: 0,
            near_ties: 0,
        };
        let mut price = PrefillPrice::default();
        price.learn(&step(31, 40), 1.0);
        assert_eq!(price.ms_per_1k(), None);
        price.learn(&step(100, 125), 0.25);
        assert_eq!(price.ms_per_1k(), Some(2_000.0));
        price.learn(&step(100, 125), 0.5);
        assert_eq!(price.ms_per_1k(), Some(2_200.0));
    }
}
