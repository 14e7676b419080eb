//! What the router answers: the draft that a request verifies, and why.

use super::Prospect;
use crate::draft::Candidate;

/// What a step does for a request.
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
    /// It has none: other tokens are worth more, or the draft takes longer than it is worth.
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
    /// What the step does for the request.
    pub route: Route,
    /// Why.
    pub reason: RouteReason,
}

/// A draft that the engine's head is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDraft {
    /// Most passes, which is the depth.
    pub depth: u32,
    /// Most tokens.
    pub tokens_max: u32,
}

/// The draft of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Draft {
    /// None.
    #[default]
    None,
    /// A suffix draft, or a part of one.
    Suffix(Candidate),
    /// A draft that the engine makes by itself.
    Head(HeadDraft),
    /// Both, verified as one tree.
    Merged(Candidate, HeadDraft),
}

/// What a request verifies in a step, with what the router needs to learn from the outcome.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The route, and why.
    pub decision: Decision,
    /// The draft.
    pub draft: Draft,
    /// Accepted tokens that the router expects of the draft, if it reckoned; of a merged draft, beside those of the
    /// head.
    pub expected: Option<f32>,
    /// Accepted tokens that it expects of the head in a merged draft.
    pub expected_of_head: Option<f32>,
    /// Accepted tokens that the whole candidate was expected to bring: how predictable the text is here.
    pub predictability: f32,
    /// The candidate of the prospect, whatever part of it is verified: all of it is learnt from.
    pub(super) found: Option<Candidate>,
    /// Length of the text, in tokens.
    pub(super) context_tokens: u32,
    /// Part of it that the head has to read first.
    pub(super) unread_tokens: u32,
}

impl Offer {
    /// An offer for a prospect. A route whose draft is empty verifies nothing.
    pub(super) fn new<N>(decision: Decision, draft: Draft, prospect: Prospect<N>) -> Self {
        Offer {
            decision,
            draft,
            expected: None,
            expected_of_head: None,
            predictability: prospect.path_probabilities.iter().sum(),
            context_tokens: prospect.context_tokens,
            unread_tokens: prospect.unread_tokens(),
            found: prospect.candidate,
        }
    }

    /// No draft, for this reason.
    pub(super) fn plain<N>(reason: RouteReason, prospect: Prospect<N>) -> Self {
        let route = Route::Plain;
        Offer::new(Decision { route, reason }, Draft::None, prospect)
    }

    /// Length of the text that the draft continues, in tokens.
    pub fn context_tokens(&self) -> u32 {
        self.context_tokens
    }

    /// The suffix draft that is sent to the engine.
    pub fn suffix(&self) -> Option<&Candidate> {
        match &self.draft {
            Draft::Suffix(candidate) | Draft::Merged(candidate, _) => Some(candidate),
            Draft::None | Draft::Head(_) => None,
        }
    }

    /// The draft that the engine makes by itself.
    pub fn head(&self) -> Option<HeadDraft> {
        match self.draft {
            Draft::Head(head) | Draft::Merged(_, head) => Some(head),
            Draft::None | Draft::Suffix(_) => None,
        }
    }

    /// Draft tokens that are sent to the engine.
    pub fn sent_tokens(&self) -> u32 {
        self.suffix()
            .map_or(0, |candidate| candidate.tree.len() as u32)
    }

    /// An offer that no router made: the whole candidate is verified. Nothing is learnt from it.
    pub fn of_candidate(candidate: Candidate) -> Self {
        Offer {
            decision: Decision {
                route: Route::Suffix,
                reason: RouteReason::Asked,
            },
            draft: Draft::Suffix(candidate),
            expected: None,
            expected_of_head: None,
            predictability: 0.0,
            found: None,
            context_tokens: 0,
            unread_tokens: 0,
        }
    }

    /// Whether a budget decided on the suffix draft.
    pub fn is_budgeted(&self) -> bool {
        matches!(
            self.decision.reason,
            RouteReason::WithinBudget | RouteReason::OverBudget
        )
    }

    /// Tokens of the candidate that are left out, if the head does not draft instead.
    pub fn rejected_tokens(&self) -> u32 {
        match (&self.found, self.head()) {
            (Some(found), None) => found.tree.len() as u32 - self.sent_tokens(),
            _ => 0,
        }
    }

    /// Most draft tokens that the step needs room for.
    pub fn tokens_max(&self) -> u32 {
        self.sent_tokens() + self.head().map_or(0, |head| head.tokens_max)
    }
}
