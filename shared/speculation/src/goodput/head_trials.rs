//! When a head that the budget does not choose is tried all the same: what it brings is only seen by asking it.

/// Refusals after which it is tried the first time, steps.
const PATIENCE_STEPS_MIN: u32 = 4;
/// The same at most, however often it disappointed.
const PATIENCE_STEPS_MAX: u32 = 4096;
/// Share of the time since the last trial that the next one may take, as far as it is known what it takes: a dear head is not
/// tried every few steps.
const COST_SHARE_MAX: f64 = 0.02;

/// The refusals of a head, of one namespace: what it disappoints the one by, it may serve the other with.
///
/// A step counts once, however many requests were in it: all of them wait while the head drafts for one. Each trial makes the
/// next one wait twice as long, and is of twice as many requests: a pass of the head that is too dear for one may pay for
/// many, and what it takes for many is not seen in what it takes for one. One that convinces needs no next one: the budget then
/// chooses the head by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadTrials {
    /// Steps in a row in which it could have drafted and something else was better.
    refused_steps: u32,
    /// As many as bring the next trial.
    patience_steps: u32,
    /// Requests that take part in it, if there are so many.
    width: u32,
}

impl Default for HeadTrials {
    fn default() -> Self {
        HeadTrials {
            refused_steps: 0,
            patience_steps: PATIENCE_STEPS_MIN,
            width: 1,
        }
    }
}

impl HeadTrials {
    /// Whether it is time for a trial, which takes `cost` times what a step takes.
    pub(super) fn is_due(&self, cost: f64) -> bool {
        self.refused_steps >= self.patience_steps
            && f64::from(self.refused_steps) * COST_SHARE_MAX >= cost
    }

    /// Requests that the next trial is of at most.
    pub(super) fn width(&self) -> u32 {
        self.width
    }

    /// Requests try it.
    pub(super) fn tried(&mut self) {
        self.refused_steps = 0;
        self.patience_steps = (self.patience_steps * 2).min(PATIENCE_STEPS_MAX);
        self.width = self.width.saturating_mul(2);
    }

    /// A step went by in which it could have drafted: whether the budget chose it for anybody.
    pub(super) fn offered(&mut self, chosen: bool) {
        self.refused_steps = if chosen {
            0
        } else {
            self.refused_steps.saturating_add(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_thin_out_up_to_a_limit() {
        let mut trials = HeadTrials::default();
        let mut at = Vec::new();
        for step in 0..40_000u32 {
            if trials.is_due(0.0) {
                at.push(step);
                assert_eq!(trials.width(), 1 << (at.len() - 1));
                trials.tried();
            } else {
                trials.offered(false);
            }
        }
        let waits: Vec<u32> = at.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(at[0], 4);
        assert_eq!(waits[..5], [8, 16, 32, 64, 128]);
        assert_eq!(waits[waits.len() - 2..], [4096, 4096]);
    }

    #[test]
    fn a_dear_trial_waits_until_it_is_a_small_share() {
        let mut trials = HeadTrials::default();
        let refused = (0..).take_while(|_| {
            let waits = !trials.is_due(3.0);
            trials.offered(false);
            waits
        });
        assert_eq!(refused.count(), 150);
    }

    #[test]
    fn what_the_budget_chooses_needs_no_trial() {
        let mut trials = HeadTrials::default();
        for step in 0..100 {
            trials.offered(step % 4 == 3);
            assert!(!trials.is_due(0.0));
        }
    }
}
