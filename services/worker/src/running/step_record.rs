//! The result of a step for one request.

use refrain_protocol::DocumentId;
use refrain_protocol::chunk::{ChunkEndReason, DraftScope, DraftSource, StepCounts, StepMessage};
use refrain_protocol::document::FinishReason;
use refrain_speculation::router::Offer;

/// The result of a step for one request.
pub(crate) struct Absorbed {
    /// The message to the reader.
    pub(crate) message: StepMessage,
    /// The same result for the store, the metrics and the router.
    pub(crate) record: StepRecord,
    /// The reason for which the chunk has ended, if it has.
    pub(crate) end: Option<ChunkEndReason>,
}

/// The result of a step for the store, the metrics and the router.
pub(crate) struct StepRecord {
    /// The message to the reader without log-probabilities.
    pub(crate) step: StepMessage,
    /// Length of the output before these tokens.
    pub(super) prev_len: u32,
    /// How the output ended with these tokens, if it has.
    pub(super) finish: Option<FinishReason>,
    /// Documents of the namespace whose draft tokens were accepted.
    pub(crate) credited: Vec<DocumentId>,
    /// The router's offer, if it decided.
    pub(crate) offer: Option<Offer>,
    /// The engine's own drafter drafted at least one token.
    pub(crate) head_drafted: bool,
    /// Accepted tokens that it drafted.
    pub(crate) head_accepted: u32,
}

impl StepRecord {
    /// The counts of the step by the source of its drafts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (DraftSource, DraftScope, StepCounts)> {
        let StepMessage { source, scope, .. } = self.step;
        let counts = self.step.counts(self.step.tokens.len());
        counts.map(move |(of, counts)| {
            // Drafts of the engine come from no text, so they have no scope.
            let is_first = of == source;
            (of, if is_first { scope } else { DraftScope::None }, counts)
        })
    }
}
