//! The calls that an experiment needs.

/// The calls of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// Recorded calls; without a trace they are generated.
    Calls,
    /// Recorded calls, and those of another workload as --warm.
    OtherCalls,
    /// Recorded samples of prompts, many of each.
    Groups,
    /// Recorded samples of prompts; without a trace the lengths of Seer's three workloads are drawn.
    Rollouts,
    /// None.
    Nothing,
}

impl Needs {
    /// The calls, in words.
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Needs::Calls => "calls",
            Needs::OtherCalls => "calls, and others as --warm",
            Needs::Groups => "samples of prompts",
            Needs::Rollouts => "samples of prompts, or nothing",
            Needs::Nothing => "nothing",
        }
    }
}
