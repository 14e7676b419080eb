//! A run of steps of one batch. Each takes a little longer than the one before it, by the contexts that have grown,
//! so the time of many steps has a closed form.

/// A run of equal steps.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) start_s: f64,
    pub(super) steps: u32,
    pub(super) step_s: f64,
    /// How much longer each step takes than the one before.
    pub(super) growth_s: f64,
    /// Tokens per step of each seat.
    pub(super) gains: Vec<f64>,
    /// The seats that read, and how much.
    pub(super) reads: Vec<(usize, u32)>,
    /// The instance only waits until this time.
    pub(super) idle_until_s: Option<f64>,
}

impl Plan {
    pub(super) fn after(&self, steps: u32) -> f64 {
        let steps = f64::from(steps);
        self.start_s + steps * self.step_s + self.growth_s * steps * (steps - 1.0) / 2.0
    }

    pub(super) fn end_s(&self) -> f64 {
        self.idle_until_s.unwrap_or_else(|| self.after(self.steps))
    }

    /// The first step that ends at this time or later.
    pub(super) fn steps_until(&self, time_s: f64) -> u32 {
        let (mut low, mut high) = (1, self.steps.max(1));
        while low < high {
            let middle = (low + high) / 2;
            if self.after(middle) >= time_s {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }
}
