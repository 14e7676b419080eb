//! What one request offers the engine in a step: a suffix draft, a draft of the engine's own head, or nothing.

use refrain_protocol::DocumentId;
use refrain_protocol::chunk::{DraftScope, DraftSource, Speculation};
use refrain_protocol::engine::{Draft, SelfDraft, StepOutput};
use refrain_speculation::{
    Candidate, Decision, Fallback, Found, Lookup, Route, RouteReason, Scope, Source, propose, route,
};
use refrain_suffix_index::{Cursor, DocumentKey};

use super::{OWN, Routing, Running};
use crate::memory::Drafts;
use crate::router::{Router, asked};

/// The draft of the step in progress.
#[derive(Clone, Debug, Default)]
pub(super) enum Offer {
    /// None.
    #[default]
    Nothing,
    /// What the index found.
    Suffix(Candidate),
    /// Whatever the engine's head comes up with, within these limits.
    Own(SelfDraft),
}

impl Offer {
    /// Its part of the wire's item.
    pub(super) fn wire(&self) -> (Option<Draft>, Option<SelfDraft>) {
        match self {
            Offer::Nothing => (None, None),
            Offer::Suffix(candidate) => {
                let draft = Draft {
                    tokens: candidate.tree.tokens().collect(),
                    parents: candidate.tree.parents().collect(),
                };
                (Some(draft), None)
            }
            Offer::Own(limits) => (None, Some(*limits)),
        }
    }

    /// Tokens that it may take of a step.
    pub(super) fn tokens_max(&self) -> u32 {
        match self {
            Offer::Nothing => 0,
            Offer::Suffix(candidate) => candidate.tree.len() as u32,
            Offer::Own(limits) => limits.tokens_max,
        }
    }

    /// Draft tokens that were verified.
    ///
    /// # Errors
    /// The engine drafted by itself unasked, or more than it was to.
    pub(super) fn drafted(&self, output: &StepOutput) -> Result<u32, &'static str> {
        match self {
            Offer::Own(limits) if output.self_drafted <= limits.tokens_max => {
                Ok(output.self_drafted)
            }
            Offer::Own(_) => Err("a step drafted more than it may"),
            _ if output.self_drafted > 0 => Err("a step drafted unasked"),
            other => Ok(other.tokens_max()),
        }
    }

    /// The labels of its step. The head reads the request and nothing else, but it is no text that was found
    /// somewhere: it has no scope.
    pub(super) fn labels(&self) -> (DraftSource, DraftScope) {
        match self {
            Offer::Nothing => (DraftSource::None, DraftScope::None),
            Offer::Suffix(candidate) => (DraftSource::Suffix, wire_scope(candidate.scope)),
            Offer::Own(_) => (DraftSource::Eagle3, DraftScope::None),
        }
    }

    /// The documents of the namespace that accepted nodes were read from, less the request's own.
    pub(super) fn credited(&self, accepted: &[u32], own: DocumentId) -> Vec<DocumentId> {
        let Offer::Suffix(candidate) = self else {
            return Vec::new();
        };
        // A group's outputs are the namespace's.
        if candidate.scope == Scope::Request {
            return Vec::new();
        }
        let nodes = candidate.tree.nodes();
        let mut documents: Vec<DocumentId> = accepted
            .iter()
            .filter_map(|node| nodes.get(*node as usize)?.origin.place)
            .map(|place| DocumentId(place.document.0))
            .filter(|document| *document != own)
            .collect();
        documents.sort_unstable();
        documents.dedup();
        documents
    }
}

impl Running {
    /// Looks for a draft of at most `draft_max` tokens and lets the router decide.
    pub(super) fn draft(&mut self, draft_max: u32, routing: Routing<'_>) -> Decision {
        let Routing {
            router,
            fallback,
            withholds_suffix,
            decisions_kept,
        } = routing;
        let asked = asked(self.request.speculation);
        if draft_max == 0 && self.request.speculation != Speculation::Off {
            return Decision {
                route: Route::Plain,
                reason: RouteReason::NoRoom,
            };
        }
        let withheld = withholds_suffix && self.request.speculation == Speculation::Auto;
        let candidate = match self.request.speculation {
            Speculation::Auto | Speculation::Suffix if !withheld => {
                self.suffix_draft(draft_max, router)
            }
            _ => None,
        };
        let found = match &candidate {
            Some(candidate) => Found::Score(candidate.score),
            None if withheld => Found::Withheld,
            None => Found::Nothing,
        };
        let decision = route(asked, found, router.threshold, self.usable(fallback));
        self.recent.push(decision.route, decisions_kept);
        self.offered = match decision.route {
            Route::Suffix => candidate.map_or(Offer::Nothing, Offer::Suffix),
            Route::Fallback => router
                .self_draft(draft_max)
                .map_or(Offer::Nothing, Offer::Own),
            Route::Plain => Offer::Nothing,
        };
        decision
    }

    /// How it stands with the fallback for this request.
    fn usable(&self, fallback: Fallback) -> Fallback {
        if !self.self_drafts {
            Fallback::Absent
        } else if self.engine_len == 0 || !self.is_decoding() {
            Fallback::Blind
        } else {
            fallback
        }
    }

    fn suffix_draft(&self, draft_max: u32, router: &Router) -> Option<Candidate> {
        let drafts = self.memory.lock();
        let group = self.group.as_ref().map(|member| member.group().lock());
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.text,
        };
        let mut lookups = Vec::with_capacity(3);
        lookups.extend(
            self.own
                .tip(OWN)
                .map(|cursor| lookup(Scope::Request, &self.own, cursor)),
        );
        // Alone in its group it would read its own output again.
        if let Some(group) = group.as_ref().filter(|group| group.index.documents() > 1) {
            lookups.push(lookup(Scope::Group, &group.index, self.cursor_in(group)));
        }
        lookups.push(lookup(
            Scope::Tenant,
            &drafts.index,
            self.cursor_in(&drafts),
        ));
        propose(&lookups, &router.params, draft_max as usize)
    }

    /// Where the text stands. A document that was removed while it runs ends elsewhere or is gone; then the end of the
    /// text is looked up afresh.
    fn cursor_in(&self, drafts: &Drafts) -> Cursor {
        let is_whole = drafts.len_of(self.document()) == Some(self.output().len() as u32);
        let key = DocumentKey(self.document().0);
        let tip = drafts.index.tip(key).filter(|_| is_whole);
        tip.unwrap_or_else(|| drafts.index.start(&self.text))
    }
}

fn wire_scope(scope: Scope) -> DraftScope {
    match scope {
        Scope::Request => DraftScope::Request,
        Scope::Group => DraftScope::Group,
        Scope::Tenant => DraftScope::Tenant,
    }
}
