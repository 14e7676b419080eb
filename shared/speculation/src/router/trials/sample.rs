//! The terms of trials: their settings, the two ways that they compare, and a step as evidence.

/// Settings of trials.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialParams {
    /// Steps of a trial that are evidence; at least 3.
    pub trial_steps: u32,
    /// Steps between trials at first.
    pub backoff_steps: u32,
    /// Maximum number of steps between trials, after one clear loss after another.
    pub backoff_steps_max: u32,
    /// Longest time that trials may lose, as a share of all time.
    pub trial_cost_share_max: f64,
    /// Tokens per second with drafts over those without, above which drafts come into use.
    pub gain_enter: f64,
    /// The same ratio, below which they go out of use. It is lower, so that noise does not turn them on and off.
    pub gain_leave: f64,
}

impl Default for TrialParams {
    fn default() -> Self {
        TrialParams {
            trial_steps: 8,
            backoff_steps: 64,
            backoff_steps_max: 4096,
            trial_cost_share_max: 0.01,
            gain_enter: 1.05,
            gain_leave: 1.0,
        }
    }
}

/// One of the two ways that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::router) enum Mode {
    /// Decoding without the drafts in question.
    Without,
    /// Decoding with them.
    With,
}

impl Mode {
    pub(super) fn other(self) -> Mode {
        match self {
            Mode::Without => Mode::With,
            Mode::With => Mode::Without,
        }
    }
}

/// How drafts are used, and whether that is on trial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::router) struct Phase {
    /// Drafts are in use, left out for a trial or not. They are out of use where they are slower or not measured yet.
    pub(in crate::router) in_use: bool,
    /// The way that is not in use is tried.
    pub(in crate::router) on_trial: bool,
}

impl Phase {
    /// How the step goes.
    pub(in crate::router) fn mode(self) -> Mode {
        match self.in_use != self.on_trial {
            true => Mode::With,
            false => Mode::Without,
        }
    }
}

/// A step as evidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::router) struct Sample {
    /// Requests that decoded in it.
    pub(in crate::router) batch: u32,
    /// The way it went; `None` if its requests went different ways, or if it computed anything else.
    pub(in crate::router) mode: Option<Mode>,
    /// Tokens emitted.
    pub(in crate::router) tokens: u32,
    /// Seconds it took.
    pub(in crate::router) seconds: f64,
    /// Seconds of these that the head drafted.
    pub(in crate::router) draft_seconds: f64,
    /// Text that the head had to read first, beyond what the last steps brought, in tokens.
    pub(in crate::router) read_tokens: u32,
}
