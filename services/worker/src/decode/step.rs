//! The requests of a step.

/// The requests that move in a step.
pub(super) struct Movers {
    /// In the order of the step's items.
    pub(super) parts: Vec<Part>,
    /// Maximum number of draft tokens beside the tokens that the requests owe.
    pub(super) room: u32,
    /// Number of requests that decode.
    pub(super) decoding: u32,
    /// The guard holds drafts back.
    pub(super) withholds: bool,
}

/// A request that moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Place in the batch.
    pub(super) place: usize,
    /// Tokens that it brings of those that it owes.
    pub(super) context: u32,
    /// It decodes; otherwise the item is a piece of a prompt.
    pub(super) decodes: bool,
}
