//! The cost of a step of several tokens, from the times of whole calls.
//!
//! A draft pays where it brings more tokens than its step costs, so this explains a speed-up below 1.

/// Sums of a least-squares fit of `decode_s` by `step_s * steps + token_s * drafted`, over calls that had the engine
/// for themselves.
#[derive(Clone, Debug, Default)]
pub(super) struct StepCostFit {
    steps_steps: f64,
    steps_drafted: f64,
    drafted_drafted: f64,
    steps_seconds: f64,
    drafted_seconds: f64,
}

impl StepCostFit {
    /// Adds a call: the steps after the one that read its prompt, its draft tokens, and the seconds of these steps.
    pub(super) fn add(&mut self, steps: u64, drafted: u64, seconds: f64) {
        let (steps, drafted) = (steps as f64, drafted as f64);
        self.steps_steps += steps * steps;
        self.steps_drafted += steps * drafted;
        self.drafted_drafted += drafted * drafted;
        self.steps_seconds += steps * seconds;
        self.drafted_seconds += drafted * seconds;
    }

    /// Time of a step of `tokens` tokens over that of one token; `None` where the calls do not tell.
    pub(super) fn ratio(&self, tokens: u32) -> Option<f64> {
        let determinant =
            self.steps_steps * self.drafted_drafted - self.steps_drafted * self.steps_drafted;
        // Calls with the same draft tokens per step tell nothing of either.
        if determinant <= 1e-6 * self.steps_steps * self.drafted_drafted {
            return None;
        }
        let step_s =
            self.steps_seconds * self.drafted_drafted - self.drafted_seconds * self.steps_drafted;
        let token_s =
            self.drafted_seconds * self.steps_steps - self.steps_seconds * self.steps_drafted;
        let more = f64::from(tokens.saturating_sub(1));
        (step_s > 0.0).then(|| (step_s + more * token_s) / step_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_tokens_is_found_from_whole_calls() {
        let mut fit = StepCostFit::default();
        assert_eq!(fit.ratio(8), None);
        // A step takes 1 ms, and 0.1 ms more for each draft token.
        let mut call = |steps: u64, drafted: u64| {
            fit.add(steps, drafted, 1e-3 * steps as f64 + 1e-4 * drafted as f64);
            fit.ratio(8)
        };
        assert_eq!(call(30, 0), None);
        assert_eq!(call(20, 0), None);
        assert!((call(5, 40).unwrap() - 1.7).abs() < 1e-9);
        call(7, 20);
        assert!((fit.ratio(16).unwrap() - 2.5).abs() < 1e-9);
        assert!((fit.ratio(1).unwrap() - 1.0).abs() < 1e-9);
    }
}
