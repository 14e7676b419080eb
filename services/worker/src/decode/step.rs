//! A step while it is composed, and its members while the engine computes it.

use refrain_protocol::engine::{StepItem, StepRequest};
use refrain_speculation::router::Decision;

use crate::running::ActiveRequest;

/// A step that is ready for the engine.
#[derive(Default)]
pub(super) struct Composed {
    pub(super) request: StepRequest,
    /// The requests of the items, in the order of the items.
    pub(super) members: Vec<Member>,
    /// Seconds that the search for a draft took, for each request that samples.
    pub(super) propose_seconds: Vec<f64>,
}

/// The requests that move in a step.
pub(super) struct Movers {
    pub(super) parts: Vec<Part>,
    /// Most draft tokens beside the tokens that the requests owe.
    pub(super) room: u32,
    /// Number of requests that decode.
    pub(super) decoding: u32,
    /// The guard holds drafts back.
    pub(super) withholds: bool,
}

/// The request of an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Place in the batch.
    pub(super) place: usize,
    pub(super) sampled: bool,
    /// It decodes; otherwise the item is a piece of a prompt.
    pub(super) decodes: bool,
    /// The router's decision; `None` for a piece of a prompt that does not sample.
    pub(super) decision: Option<Decision>,
    /// Context tokens of the item.
    pub(super) context: u32,
    /// Tokens that the head has to read at once.
    pub(super) catch_up_tokens: u32,
}

/// A request that moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) place: usize,
    /// Tokens that it brings of those that it owes.
    pub(super) context: u32,
    pub(super) decodes: bool,
}

impl Composed {
    pub(super) fn push(
        &mut self,
        part: Part,
        decision: Option<Decision>,
        item: StepItem,
        running: &ActiveRequest,
    ) {
        self.members.push(Member {
            place: part.place,
            sampled: item.sample,
            decodes: part.decodes,
            decision,
            context: item.tokens.len() as u32,
            catch_up_tokens: running.catch_up_tokens(),
        });
        self.request.items.push(item);
    }
}
