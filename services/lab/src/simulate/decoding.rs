//! The requests of a step, and what drafts bring them.

/// A request that takes part in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decoding {
    pub(super) job: usize,
    /// Output tokens so far.
    pub(super) known: u32,
    pub(super) context_tokens: usize,
}

/// The drafts of a run of steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Drafted {
    /// Tokens per step of each request.
    pub(super) gains: Vec<f64>,
    /// Draft tokens of a step, of all requests together.
    pub(super) draft_tokens: usize,
    /// Time of the host to propose them, before the step, seconds.
    pub(super) host_s: f64,
    /// The run has at most so many steps.
    pub(super) steps_max: u32,
}
