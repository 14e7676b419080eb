//! When a head that the budget does not choose is tried all the same: only asking it shows what it brings.

use crate::router::trials::Schedule;

/// Rejections in a row after which the head is tried for the first time, in steps.
const PATIENCE_STEPS_MIN: u32 = 4;
/// The greatest wait between trials, in steps.
const PATIENCE_STEPS_MAX: u32 = 4096;
/// Share of the time since the last trial that the next one may take. An expensive head is thus not tried every few
/// steps.
const COST_SHARE_MAX: f64 = 0.02;

/// Trials of the head in one namespace: a head may disappoint one namespace and serve another.
///
/// A step counts once however many requests are in it, since all of them wait while the head drafts for one. After
/// each trial the next one waits twice as long and takes in twice as many requests: a pass of the head that is too
/// expensive for one request may pay for many. A head that convinces needs no further trial, because the budget then
/// chooses it by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadExploration {
    /// Steps in a row in which the head could have drafted and was not chosen. The unit of time is one step.
    schedule: Schedule,
    /// Requests that take part in the next trial, if there are so many.
    width: u32,
}

impl Default for HeadExploration {
    fn default() -> Self {
        HeadExploration {
            schedule: Schedule::new(PATIENCE_STEPS_MIN),
            width: 1,
        }
    }
}

impl HeadExploration {
    /// Whether a trial is due that takes `cost` times as long as a step.
    pub(super) fn is_due(&self, cost: f64) -> bool {
        self.schedule.is_due(cost, COST_SHARE_MAX)
    }

    /// Maximum number of requests of the next trial.
    pub(super) fn width(&self) -> u32 {
        self.width
    }

    /// A trial is made.
    pub(super) fn tried(&mut self) {
        self.schedule.back_off(PATIENCE_STEPS_MAX);
        self.width = self.width.saturating_mul(2);
    }

    /// The head could have drafted in a step: whether the budget chose it for any request.
    pub(super) fn offered(&mut self, chosen: bool) {
        match chosen {
            true => self.schedule.restart(),
            false => self.schedule.step(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_thin_out_up_to_a_limit() {
        let mut trials = HeadExploration::default();
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
    fn an_expensive_trial_waits_until_it_is_a_small_share() {
        let mut trials = HeadExploration::default();
        let refused = (0..).take_while(|_| {
            let waits = !trials.is_due(3.0);
            trials.offered(false);
            waits
        });
        assert_eq!(refused.count(), 150);
    }

    #[test]
    fn a_head_that_the_budget_chooses_needs_no_trial() {
        let mut trials = HeadExploration::default();
        for step in 0..100 {
            trials.offered(step % 4 == 3);
            assert!(!trials.is_due(0.0));
        }
    }
}
