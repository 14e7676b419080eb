//! The terms of trials: their settings, the two ways that they compare, and a step as evidence.

/// Settings of trials.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialParams {
    /// The way in use before anything was measured.
    pub starts_with: Mode,
    /// Steps of a trial that are evidence; at least 3.
    pub trial_steps: u32,
    /// Steps between trials at first.
    pub backoff_steps: u32,
    /// Most steps between trials, after one clear loss after another.
    pub backoff_steps_max: u32,
    /// Most time that trials may lose, as a share of all time.
    pub trial_cost_share_max: f64,
    /// Tokens per second with drafts over those without, above which drafts come into use.
    pub gain_enter: f64,
    /// The same ratio, below which they go out of use. It is lower, so that noise does not turn them on and off.
    pub gain_leave: f64,
}

impl Default for TrialParams {
    fn default() -> Self {
        TrialParams {
            starts_with: Mode::Without,
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
pub enum Mode {
    /// Decoding without the drafts in question.
    Without,
    /// Decoding with them.
    With,
}

/// How a step goes, and whether that is a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Drafts are out of use: slower, or not measured yet.
    Without,
    /// They are out of use, and are tried.
    TryWith,
    /// They are in use.
    With,
    /// They are in use, and doing without them is tried.
    TryWithout,
}

impl Phase {
    /// How the step goes.
    pub fn mode(self) -> Mode {
        match self {
            Phase::Without | Phase::TryWithout => Mode::Without,
            Phase::TryWith | Phase::With => Mode::With,
        }
    }

    /// Whether drafts are in use, left out for a trial or not.
    pub fn is_in_use(self) -> bool {
        matches!(self, Phase::With | Phase::TryWithout)
    }

    /// Whether the step tries the way that is not in use.
    pub fn is_trial(self) -> bool {
        matches!(self, Phase::TryWith | Phase::TryWithout)
    }
}

/// A step as evidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Requests that decoded in it.
    pub batch: u32,
    /// The way it went; `None` if its requests went different ways, or if it computed anything else.
    pub mode: Option<Mode>,
    /// Tokens emitted.
    pub tokens: u32,
    /// Seconds it took.
    pub seconds: f64,
    /// Seconds of these that the head drafted.
    pub draft_seconds: f64,
    /// Text that the head had to read first, beyond what the last steps brought, in tokens.
    pub read_tokens: u32,
}
