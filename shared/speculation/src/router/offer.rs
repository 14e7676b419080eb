//! The router's answer: the draft that a request verifies, and the reason.

use std::borrow::Cow;

use super::decision::{Asked, Decision, HeadDraft, Route, RouteReason};
use super::params::RouterParams;
use super::prospect::Prospect;
use super::score::{Fallback, route_by_score};
use crate::candidate::Candidate;

/// The draft of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum OfferedDraft {
    /// None.
    #[default]
    None,
    /// A suffix draft.
    Suffix(SuffixDraft),
    /// A draft that the engine makes by itself.
    Head(HeadDraft),
    /// Both, verified as one tree.
    Merged(SuffixDraft, HeadDraft),
}

/// The suffix draft of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SuffixDraft {
    /// All of the candidate that was found; it is not copied.
    Whole,
    /// A part of it, or another one.
    Part(Candidate),
}

impl SuffixDraft {
    /// These nodes of the candidate that was found, ascending.
    pub(super) fn of(found: &Candidate, nodes: &[u32]) -> Self {
        if nodes.len() == found.tree.len() {
            SuffixDraft::Whole
        } else {
            SuffixDraft::Part(found.part(nodes))
        }
    }
}

/// The draft that a request verifies in a step, with the data that the router needs to learn from the outcome.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The route, and why.
    pub decision: Decision,
    /// The draft.
    pub(super) draft: OfferedDraft,
    /// Accepted tokens that the router expects of the draft, if it computed them. For a merged draft they come in
    /// addition to those of the head.
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
    pub(super) fn new<N>(
        route: Route,
        reason: RouteReason,
        draft: Option<OfferedDraft>,
        prospect: Prospect<N>,
    ) -> Self {
        Offer {
            decision: Decision { route, reason },
            draft: draft.unwrap_or_default(),
            expected: None,
            expected_of_head: None,
            predictability: prospect.predictability(),
            context_tokens: prospect.context_tokens,
            unread_tokens: prospect.unread_tokens(),
            found: prospect.candidate,
        }
    }

    /// Decides and makes the draft of one request, which may have at most `room` tokens.
    pub(super) fn by_score<N>(
        prospect: Prospect<N>,
        room: u32,
        fallback: Fallback,
        params: &RouterParams,
    ) -> Offer {
        let draft_max = prospect.draft_max.min(room);
        if draft_max == 0 && prospect.asked != Asked::Off {
            return Offer::plain(RouteReason::NoRoom, prospect);
        }
        let fallback = fallback.of(prospect.head);
        let part = prospect.whole();
        let found = prospect.found(part.as_deref());
        let Decision { route, reason } =
            route_by_score(prospect.asked, found, params.threshold, fallback);
        let draft = match route {
            Route::Suffix => part.map(|part| {
                if matches!(part, Cow::Borrowed(_)) && part.tree.len() <= draft_max as usize {
                    return OfferedDraft::Suffix(SuffixDraft::Whole);
                }
                let mut part = part.into_owned();
                part.tree.truncate(draft_max as usize);
                OfferedDraft::Suffix(SuffixDraft::Part(part))
            }),
            Route::Fallback => params
                .head
                .and_then(|head| head.within(draft_max))
                .map(OfferedDraft::Head),
            Route::Merged | Route::Plain => None,
        };
        Offer::new(route, reason, draft, prospect)
    }

    /// No draft, for this reason.
    pub(super) fn plain<N>(reason: RouteReason, prospect: Prospect<N>) -> Self {
        Offer::new(Route::Plain, reason, None, prospect)
    }

    /// The suffix draft that is sent to the engine.
    pub fn suffix(&self) -> Option<&Candidate> {
        match &self.draft {
            OfferedDraft::Suffix(draft) | OfferedDraft::Merged(draft, _) => match draft {
                SuffixDraft::Whole => self.found.as_ref(),
                SuffixDraft::Part(part) => Some(part),
            },
            OfferedDraft::None | OfferedDraft::Head(_) => None,
        }
    }

    /// The draft that the engine makes by itself.
    pub fn head(&self) -> Option<HeadDraft> {
        match self.draft {
            OfferedDraft::Head(head) | OfferedDraft::Merged(_, head) => Some(head),
            OfferedDraft::None | OfferedDraft::Suffix(_) => None,
        }
    }

    /// Tokens of the suffix draft that was found, whatever part of it is verified.
    pub fn found_tokens(&self) -> u32 {
        let found = self.found.as_ref();
        found.map_or(0, |found| found.tree.len() as u32)
    }

    /// Draft tokens that are sent to the engine.
    pub fn sent_tokens(&self) -> u32 {
        self.suffix()
            .map_or(0, |candidate| candidate.tree.len() as u32)
    }

    /// Tokens of the candidate that a budget admitted and that it left out. None count as left out where the head
    /// drafts instead, or where no budget decided.
    pub fn budgeted_tokens(&self) -> (u32, u32) {
        match self.decision.reason {
            RouteReason::WithinBudget | RouteReason::OverBudget => {}
            _ => return (0, 0),
        }
        let sent = self.sent_tokens();
        match (&self.found, self.head()) {
            (Some(found), None) => (sent, found.tree.len() as u32 - sent),
            _ => (sent, 0),
        }
    }

    /// Maximum number of draft tokens that the step needs room for.
    pub(super) fn tokens_max(&self) -> u32 {
        self.sent_tokens() + self.head().map_or(0, |head| head.tokens_max)
    }
}
