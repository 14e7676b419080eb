//! The router's settings, fitted to what the engine can do, and its rule for one request by itself; the one for a whole
//! batch stands in `goodput`.

use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::{DrafterKind, EngineCapabilities, SelfDraft};
use refrain_speculation::draft::{Expansion, ProposeParams};
use refrain_speculation::router::{Asked, Decision, Route, RouteReason, Threshold, route_by_score};

use crate::config::{FallbackChoice, SpeculationConfig};
use crate::running::{Allotment, AskedHead, Lesson, Offer, Prospect};

/// What requests may draft from, and how much.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    pub(crate) params: ProposeParams,
    pub(crate) threshold: Threshold,
    /// What drafts inside the engine, if it is the fallback.
    own: Option<OwnDrafter>,
    /// Whether the engine verifies its own drafts and others as one tree.
    pub(crate) merges: bool,
}

/// What drafts inside the engine, and what it is asked for.
#[derive(Clone, Copy, Debug)]
struct OwnDrafter {
    kind: DrafterKind,
    wanted: SelfDraft,
}

impl Router {
    pub(crate) fn new(config: &SpeculationConfig, capabilities: &EngineCapabilities) -> Self {
        let mut params = config.params();
        if !capabilities.tree_drafts {
            params.expansion = Expansion::Linear;
        }
        let drafter = capabilities
            .drafter
            .filter(|_| config.fallback == FallbackChoice::Own);
        let own = drafter.map(|drafter| OwnDrafter {
            kind: drafter.kind,
            wanted: SelfDraft {
                depth: config.eagle3.depth.min(drafter.depth_max),
                top_k: if capabilities.tree_drafts {
                    config.eagle3.top_k.min(drafter.top_k_max)
                } else {
                    1
                },
                tokens_max: config.eagle3.tokens_max,
                path_prob_min: config.eagle3.path_prob_min,
                sampled: config.eagle3.sampled,
            },
        });
        Router {
            params,
            threshold: config.score_threshold.into(),
            own,
            // Drawn tokens are judged by another rule than found ones.
            merges: capabilities.tree_drafts && !config.eagle3.sampled,
        }
    }

    /// What drafts inside the engine, if it is the fallback.
    pub(crate) fn drafter(&self) -> Option<DrafterKind> {
        self.own.map(|own| own.kind)
    }

    /// Whether sessions of such requests are opened for drafts of the engine: they cost it memory.
    pub(crate) fn self_drafts(&self, speculation: Speculation) -> bool {
        match speculation {
            Speculation::Auto => self.own.is_some() && self.threshold.allows_fallback(),
            Speculation::Eagle3 => self.drafter() == Some(DrafterKind::Eagle3),
            Speculation::DraftModel => self.drafter() == Some(DrafterKind::DraftModel),
            Speculation::Suffix | Speculation::Off => false,
        }
    }

    /// What was decided, as metric labels.
    pub(crate) fn labels(&self, routed: Routed) -> (&'static str, &'static str) {
        let Routed::Decided(Decision { route, reason }) = routed else {
            return ("prefill", "prompt");
        };
        let decision = match (route, self.drafter()) {
            (Route::Fallback, Some(kind)) => kind.as_str(),
            _ => route.as_str(),
        };
        (decision, reason.as_str())
    }

    /// SuffixDecoding's rule, for a request by itself: it may draft at most `room` tokens.
    pub(crate) fn by_score(&self, prospect: Prospect, room: u32) -> Allotment {
        let draft_max = prospect.draft_max.min(room);
        if draft_max == 0 && prospect.asked != Asked::Off {
            return Allotment::plain(RouteReason::NoRoom, prospect);
        }
        let found = prospect.found();
        let decision = route(prospect.asked, found, self.threshold, prospect.fallback);
        self.carry_out(decision, prospect, draft_max)
    }

    /// Makes the drafts of a decision, of at most `draft_max` tokens.
    pub(crate) fn carry_out(
        &self,
        decision: Decision,
        prospect: Prospect,
        draft_max: u32,
    ) -> Allotment {
        let offer = match decision.route {
            Route::Suffix => prospect.candidate.clone().map(|mut candidate| {
                candidate.tree.truncate(draft_max as usize);
                Offer::Suffix(candidate)
            }),
            Route::Fallback => self
                .self_draft(draft_max)
                .zip(self.drafter())
                .map(|(wanted, kind)| Offer::Own { kind, wanted }),
            Route::Merged => self.merged(&prospect, draft_max),
            Route::Plain => None,
        };
        let asked_head = offer
            .as_ref()
            .and_then(Offer::wanted)
            .map(|wanted| AskedHead {
                context_tokens: prospect.context_tokens,
                unread_tokens: prospect.unread_tokens,
                depth: wanted.depth,
                drafted: false,
                accepted: 0,
            });
        Allotment {
            decision,
            offer: offer.unwrap_or_default(),
            lesson: Lesson {
                found: prospect.candidate,
                asked_head,
                ..Lesson::default()
            },
        }
    }

    /// What was found, and a draft of the engine of at most `draft_max` tokens.
    fn merged(&self, prospect: &Prospect, draft_max: u32) -> Option<Offer> {
        let mut found = prospect.candidate.clone()?;
        let (wanted, kind) = (self.self_draft(draft_max)?, self.drafter()?);
        let room = prospect.merged_max.saturating_sub(wanted.tokens_max);
        found.tree.truncate(room as usize);
        Some(match found.tree.is_empty() {
            true => Offer::Own { kind, wanted },
            false => Offer::Merged {
                found,
                kind,
                wanted,
            },
        })
    }

    /// What to ask the engine's drafter for, where at most `draft_max` tokens are of use.
    pub(crate) fn self_draft(&self, draft_max: u32) -> Option<SelfDraft> {
        let wanted = self.own.filter(|_| draft_max > 0)?.wanted;
        Some(SelfDraft {
            depth: wanted.depth.min(draft_max),
            tokens_max: wanted.tokens_max.min(draft_max),
            ..wanted
        })
    }
}

/// What a request asked for, in the router's words.
pub(crate) fn asked(speculation: Speculation) -> Asked {
    match speculation {
        Speculation::Auto => Asked::Auto,
        Speculation::Suffix => Asked::Suffix,
        Speculation::Eagle3 | Speculation::DraftModel => Asked::Fallback,
        Speculation::Off => Asked::Off,
    }
}

/// Whether requests that ask for this draft from what is remembered.
pub(crate) fn drafts_from_memory(speculation: Speculation) -> bool {
    matches!(asked(speculation), Asked::Auto | Asked::Suffix)
}

/// What was decided for an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routed {
    /// A piece of a prompt: there is nothing to decide.
    Prefill,
    /// The router's word.
    Decided(Decision),
}

impl Routed {
    pub(crate) fn route(self) -> Option<Route> {
        match self {
            Routed::Prefill => None,
            Routed::Decided(decision) => Some(decision.route),
        }
    }
}
