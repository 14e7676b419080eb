//! When the next trial is due.

/// The wait between trials: a number of steps, and the time that the next trial may cost.
///
/// Times are in any one unit, such as seconds, or steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::router) struct Schedule {
    waited_steps: u32,
    waited: f64,
    wait_steps: u32,
}

impl Schedule {
    /// The first trial is due after `wait_steps`.
    pub(in crate::router) fn new(wait_steps: u32) -> Self {
        Schedule {
            waited_steps: 0,
            waited: 0.0,
            wait_steps,
        }
    }

    /// A step went by without a trial, and took so long.
    pub(in crate::router) fn step(&mut self, time: f64) {
        self.waited_steps = self.waited_steps.saturating_add(1);
        self.waited += time;
    }

    /// Steps since the last trial.
    pub(in crate::router) fn waited_steps(&self) -> u32 {
        self.waited_steps
    }

    /// Whether enough steps went by, and so much time that `cost` is no more than `cost_share_max` of it.
    pub(in crate::router) fn is_due(&self, cost: f64, cost_share_max: f64) -> bool {
        self.waited_steps >= self.wait_steps && self.waited * cost_share_max >= cost
    }

    /// Starts to wait anew, for as long as before.
    pub(in crate::router) fn restart(&mut self) {
        *self = Schedule::new(self.wait_steps);
    }

    /// Starts to wait anew, for twice as long as before and no longer than `wait_steps_max`.
    pub(in crate::router) fn back_off(&mut self, wait_steps_max: u32) {
        *self = Schedule::new(self.wait_steps.saturating_mul(2).min(wait_steps_max));
    }
}
