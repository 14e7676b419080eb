//! The report to the router about a step that the engine made.

use refrain_suffix_index::Token;

use super::cost::HeadWork;
use super::{HeadDraft, Route};

/// A step that the engine made.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// One part per request.
    pub items: Vec<StepPart>,
    /// Seconds that the engine took.
    pub seconds: f64,
    /// Seconds of these that its head drafted.
    pub draft_seconds: f64,
    /// Seconds that it took before, to find drafts and to compose the step. Doing without drafts saves them, too.
    pub compose_seconds: f64,
    /// Tokens of all drafts that were found, whether they were verified or not.
    pub found_tokens: u32,
    /// The guard held drafts back: see [`Router::withholds`](super::Router::withholds).
    pub withheld: bool,
}

/// The part of one request in a step.
#[derive(Clone, Copy, Debug)]
pub struct StepPart {
    /// How it decoded; `None` for a piece of a prompt, whether it samples or not.
    pub route: Option<Route>,
    /// The router chose for it.
    pub is_auto: bool,
    /// The router could have chosen the head for it.
    pub may_use_head: bool,
    /// See [`Offer::predictability`](super::Offer::predictability).
    pub predictability: f32,
    /// Context tokens that were computed for it.
    pub context_tokens: u32,
    /// Length of its text after the step, in tokens.
    pub text_tokens: u32,
    /// Draft tokens that were verified, the head's included.
    pub draft_tokens: u32,
    /// The draft that the head was asked for.
    pub head: Option<HeadDraft>,
    /// Tokens that the head drafted for it.
    pub head_drafted: u32,
    /// Text that the head read first, beyond what the last steps brought, in tokens.
    pub read_tokens: u32,
    /// Tokens emitted; `None` if the request failed.
    pub emitted: Option<u32>,
}

/// The outcome of a step for one request.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// The emitted tokens; never empty.
    pub emitted: &'a [Token],
    /// The head drafted at least one token. With much text to read it may take some steps until it does.
    pub head_drafted: bool,
    /// Accepted tokens that the head drafted, whether a suffix draft had them as well or not.
    pub head_accepted: u32,
}

impl Step {
    /// Requests that decoded.
    pub fn batch(&self) -> u32 {
        self.decoding().count() as u32
    }

    /// Whether all of it was decoding, and nothing failed.
    pub(super) fn is_clean(&self) -> bool {
        self.items
            .iter()
            .all(|item| item.route.is_some() && item.emitted.is_some())
    }

    /// Tokens emitted by requests that decoded.
    pub(super) fn emitted(&self) -> u32 {
        self.decoding().filter_map(|item| item.emitted).sum()
    }

    /// Tokens that were computed. A request that brings nothing has the pass over its last token done.
    pub(super) fn tokens(&self) -> u32 {
        let tokens = |item: &StepPart| item.context_tokens.max(1) + item.draft_tokens;
        self.items.iter().map(tokens).sum()
    }

    /// The work of the head for all requests together.
    pub(super) fn head_work(&self) -> HeadWork {
        let mut work = HeadWork::default();
        for item in &self.items {
            if let Some(draft) = item.head {
                work.requests += 1;
                work.depth = work.depth.max(draft.depth);
                work.tokens_max += draft.tokens_max;
                work.drafted += item.head_drafted;
            }
        }
        work
    }

    /// Text that the head read, beyond what the last steps brought, in tokens.
    pub(super) fn read_tokens(&self) -> u32 {
        self.items.iter().map(|item| item.read_tokens).sum()
    }

    /// The route of all items, if they all decoded in the same way.
    pub(super) fn only_route(&self) -> Option<Route> {
        let route = self.items.first()?.route?;
        let is_same = |item: &StepPart| item.route == Some(route) && item.emitted.is_some();
        self.items.iter().all(is_same).then_some(route)
    }

    fn decoding(&self) -> impl Iterator<Item = &StepPart> {
        self.items.iter().filter(|item| item.route.is_some())
    }
}
