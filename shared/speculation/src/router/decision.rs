//! The terms of a decision: the drafts that a request asked for, the way that it goes, and why.

/// The drafts that a request asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// Whatever serves it best.
    Auto,
    /// Suffix drafts only.
    Suffix,
    /// The fallback's drafts only.
    Fallback,
    /// No drafts.
    Off,
}

/// Whether the engine's own drafter can draft for a request in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadState {
    /// There is none, or the request's session was opened without it.
    Absent,
    /// It cannot yet: the step ends a prompt, of which the head has read nothing.
    Blind,
    /// It can.
    Ready {
        /// Text that it would have to read first, in tokens.
        unread_tokens: u32,
    },
}

/// The way in which a step decodes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// It verifies the suffix draft.
    Suffix,
    /// The fallback drafts.
    Fallback,
    /// It verifies the suffix draft and one of the fallback as one tree.
    Merged,
    /// It decodes without a draft.
    Plain,
}

impl Route {
    /// The label of metrics. The caller knows which drafter the fallback is.
    pub fn as_str(self) -> &'static str {
        match self {
            Route::Suffix => "suffix",
            Route::Fallback => "fallback",
            Route::Merged => "merged",
            Route::Plain => "plain",
        }
    }
}

/// The reason of a route; a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteReason {
    /// The suffix draft's SCORE exceeds the threshold.
    AboveThreshold,
    /// It does not.
    BelowThreshold,
    /// The budget of the batch has room for the draft, or for its best part.
    WithinBudget,
    /// It has none: other tokens are worth more, or the draft takes longer than it is worth. Without a budget: no
    /// token of the draft is worth its price.
    OverBudget,
    /// The batch is larger than those that drafts are made for.
    LargeBatch,
    /// No suffix draft was found.
    NoMatch,
    /// Suffix drafts would be slower.
    SuffixNotPaying,
    /// The request asked for it.
    Asked,
    /// The fallback is on trial.
    Probe,
    /// The fallback is left out for a trial of plain decoding.
    Pause,
    /// The fallback would be slower.
    NotPaying,
    /// The request asked for the fallback, and there is none.
    NoFallback,
    /// The step ends a prompt: the fallback has read nothing yet.
    Prompt,
    /// The request asked for no drafts.
    Off,
    /// The step has no room for a draft.
    NoRoom,
}

impl RouteReason {
    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            RouteReason::AboveThreshold => "above_threshold",
            RouteReason::BelowThreshold => "below_threshold",
            RouteReason::WithinBudget => "within_budget",
            RouteReason::OverBudget => "over_budget",
            RouteReason::LargeBatch => "large_batch",
            RouteReason::NoMatch => "no_match",
            RouteReason::SuffixNotPaying => "suffix_not_paying",
            RouteReason::Asked => "asked",
            RouteReason::Probe => "probe",
            RouteReason::Pause => "pause",
            RouteReason::NotPaying => "not_paying",
            RouteReason::NoFallback => "no_fallback",
            RouteReason::Prompt => "prompt",
            RouteReason::Off => "off",
            RouteReason::NoRoom => "no_room",
        }
    }
}

/// A route and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The way in which the step decodes the request.
    pub route: Route,
    /// Why.
    pub reason: RouteReason,
}

/// A draft that the engine's head is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDraft {
    /// Maximum number of passes, which is the depth.
    pub depth: u32,
    /// Maximum number of tokens.
    pub tokens_max: u32,
}
