//! What one request offers the engine in a step: a suffix draft, a draft of the engine's own, both, or nothing.

use std::time::Instant;

use refrain_draft_replica::{DraftIndex, DraftQuery};
use refrain_protocol::chunk::{self, DraftScope, DraftShare, DraftSource};
use refrain_protocol::engine::{Draft, DrafterKind, SelfDraft, StepOutput};
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_speculation::draft::{Candidate, Lookup, ProposeParams, Scope, Source, propose};
use refrain_speculation::router::{Asked, Decision, Fallback, Found, Pace, Priority, Route, RouteReason};
use refrain_suffix_index::Cursor;

use super::{ActiveRequest, EngineLimits, OWN, Routing};
use crate::router::asked;

/// What a request could have verified in a step that samples for it.
#[derive(Clone, Debug)]
pub(crate) struct Prospect {
    pub(crate) namespace: NamespaceId,
    /// Length of its text.
    pub(crate) context_tokens: u32,
    pub(crate) asked: Asked,
    /// Most draft tokens that it can use.
    pub(crate) draft_max: u32,
    /// Most draft tokens of a step that the engine takes of it, wherever they lead.
    pub(crate) merged_max: u32,
    /// The best suffix draft, of at most so many.
    pub(crate) candidate: Option<Candidate>,
    /// What each node of it is worth, where the router goes by that.
    pub(crate) chances: Vec<f32>,
    /// Nobody looked for one: drafts do not pay.
    pub(crate) withheld: bool,
    /// How it stands with the fallback for this request.
    pub(crate) fallback: Fallback,
    /// Text that the head would have to read first.
    pub(crate) unread_tokens: u32,
    pub(crate) priority: Priority,
    /// How it stands with the time that it wants between its tokens, if it wants one.
    pub(crate) pace: Option<Pace>,
}

impl Prospect {
    /// Takes a suffix draft that was found elsewhere, if it is better and one was looked for here.
    pub(crate) fn consider(&mut self, other: &Candidate) {
        let looks = matches!(self.asked, Asked::Auto | Asked::Suffix) && !self.withheld;
        if self.draft_max == 0 || !looks {
            return;
        }
        let mut other = other.clone();
        other.tree.truncate(self.draft_max as usize);
        other.score = other.tree.score();
        let is_better = |candidate: &Candidate| other.score > candidate.score;
        if self.candidate.as_ref().is_none_or(is_better) {
            self.candidate = Some(other);
        }
    }

    pub(crate) fn found(&self) -> Found {
        match &self.candidate {
            Some(candidate) => Found::Score(candidate.score),
            None if self.withheld => Found::Withheld,
            None => Found::Nothing,
        }
    }
}

/// What the router made of a prospect.
#[derive(Clone, Debug)]
pub(crate) struct Allotment {
    pub(crate) decision: Decision,
    pub(crate) offer: Offer,
    pub(crate) lesson: Lesson,
}

impl Allotment {
    pub(crate) fn plain(reason: RouteReason, prospect: Prospect) -> Self {
        let route = Route::Plain;
        Allotment {
            decision: Decision { route, reason },
            offer: Offer::Nothing,
            lesson: Lesson {
                found: prospect.candidate,
                ..Lesson::default()
            },
        }
    }
}

/// What there is to learn from a step of a request, once it is known what was said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lesson {
    /// The suffix draft that was found, whatever of it was verified.
    pub(crate) found: Option<Candidate>,
    /// The head was asked for a draft this deep, after so many tokens of context.
    pub(crate) asked_head: Option<AskedHead>,
    /// Accepted tokens that the router expected; of a merged tree, beside those of the head.
    pub(crate) expected: Option<f32>,
    /// The same of the head in a merged tree.
    pub(crate) expected_of_head: Option<f32>,
}

/// See [`Lesson`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct AskedHead {
    pub(crate) context_tokens: u32,
    /// Of them, those that it had to read first.
    pub(crate) unread_tokens: u32,
    pub(crate) depth: u32,
    /// Whether it drafted anything, once that is known: with much to read it may take some steps until it does.
    pub(crate) drafted: bool,
    /// Tokens of its draft that were accepted, once that is known.
    pub(crate) accepted: u32,
}

/// The draft of the step in progress.
#[derive(Clone, Debug, Default)]
pub(crate) enum Offer {
    /// None.
    #[default]
    Nothing,
    /// What the index found.
    Suffix(Candidate),
    /// Whatever the engine's own drafter comes up with.
    Own {
        /// What it is.
        kind: DrafterKind,
        /// Its limits.
        wanted: SelfDraft,
    },
    /// Both, verified as one tree.
    Merged {
        /// What the index found.
        found: Candidate,
        /// What drafts inside the engine.
        kind: DrafterKind,
        /// Its limits.
        wanted: SelfDraft,
    },
}

impl Offer {
    /// What of it the index found.
    fn found(&self) -> Option<&Candidate> {
        match self {
            Offer::Suffix(found) | Offer::Merged { found, .. } => Some(found),
            Offer::Nothing | Offer::Own { .. } => None,
        }
    }

    /// What of it the engine is to draft.
    pub(crate) fn wanted(&self) -> Option<SelfDraft> {
        match self {
            Offer::Own { wanted, .. } | Offer::Merged { wanted, .. } => Some(*wanted),
            Offer::Nothing | Offer::Suffix(_) => None,
        }
    }

    /// Its part of the wire's item.
    pub(super) fn wire(&self) -> (Option<Draft>, Option<SelfDraft>) {
        let draft = self.found().map(|found| Draft {
            tokens: found.tree.tokens().collect(),
            parents: found.tree.parents().collect(),
        });
        (draft, self.wanted())
    }

    /// Tokens that it may take of a step.
    pub(crate) fn tokens_max(&self) -> u32 {
        self.sent() + self.wanted().map_or(0, |wanted| wanted.tokens_max)
    }

    /// Draft tokens that go along with the step.
    pub(super) fn sent(&self) -> u32 {
        self.found().map_or(0, |found| found.tree.len() as u32)
    }

    /// Checks that what was verified is what was offered.
    ///
    /// # Errors
    /// The engine drafted by itself unasked, or more than it was to.
    pub(super) fn check(&self, output: &StepOutput) -> Result<(), &'static str> {
        let most = self.wanted().map(|wanted| wanted.tokens_max);
        let sent = self.sent();
        match most {
            None if output.self_drafted > 0 || !output.agreed_nodes.is_empty() => {
                Err("a step drafted unasked")
            }
            Some(most) if output.self_drafted > most => Err("a step drafted more than it may"),
            _ if output.agreed_nodes.iter().any(|node| *node >= sent) => {
                Err("a step drafted a node that was not sent")
            }
            _ => Ok(()),
        }
    }

    /// Tokens drafted and accepted, by the source of the step and, in a merged tree, by the engine.
    pub(super) fn credit(&self, output: &StepOutput) -> (u32, u32, Option<DraftShare>) {
        let accepted = output.accepted_nodes.len() as u32;
        match self {
            Offer::Merged { kind, .. } => {
                let sent = self.sent();
                let own = output.accepted_nodes.iter().filter(|node| **node >= sent);
                let own = own.count() as u32;
                let share = DraftShare {
                    source: (*kind).into(),
                    drafted: output.self_drafted,
                    accepted: own,
                };
                (sent, accepted - own, Some(share))
            }
            _ => (self.sent() + output.self_drafted, accepted, None),
        }
    }

    /// Accepted tokens that the engine drafted, whether they had been sent as well or not.
    pub(super) fn accepted_of_engine(&self, output: &StepOutput) -> u32 {
        let sent = self.sent();
        let drafted = |node: &&u32| **node >= sent || output.agreed_nodes.contains(node);
        output.accepted_nodes.iter().take_while(drafted).count() as u32
    }

    /// The labels of its step. The engine's drafter reads the request and nothing else, but it is no text that was
    /// found somewhere: it has no scope.
    pub(super) fn labels(&self) -> (DraftSource, DraftScope) {
        match self {
            Offer::Nothing => (DraftSource::None, DraftScope::None),
            Offer::Suffix(found) | Offer::Merged { found, .. } => labels(found),
            Offer::Own { kind, .. } => ((*kind).into(), DraftScope::None),
        }
    }

    /// The documents of the namespace that accepted nodes were read from, less the request's own.
    pub(super) fn credited(&self, accepted: &[u32], own: DocumentId) -> Vec<DocumentId> {
        let Some(candidate) = self.found() else {
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

impl ActiveRequest {
    /// What to ask the store for: while it decodes and not all of its namespace is here.
    pub(crate) fn wanted_elsewhere(&self, context_tokens: usize) -> Option<DraftQuery> {
        let asks = matches!(asked(self.request.speculation), Asked::Auto | Asked::Suffix);
        let memory = &self.sources.as_ref()?.memory;
        if !asks || !self.is_decoding() || !memory.is_partial() {
            return None;
        }
        let from = self.text.len().saturating_sub(context_tokens);
        Some(DraftQuery {
            replica: memory.clone(),
            document: self.document(),
            context: self.text[from..].to_vec(),
        })
    }

    /// Most draft tokens that the request can use in a step with room for `room`.
    pub(crate) fn draft_max(&self, room: u32, limits: EngineLimits) -> u32 {
        room.min(limits.max_draft_tokens)
            .min(self.emit_left(limits).saturating_sub(1))
    }

    /// What the request could do in a step with room for `room` draft tokens.
    pub(crate) fn prospect(
        &self,
        room: u32,
        limits: EngineLimits,
        routing: Routing<'_>,
        now: Instant,
    ) -> Prospect {
        let asked = asked(self.request.speculation);
        let draft_max = self.draft_max(room, limits);
        let withheld = routing.withholds && asked == Asked::Auto;
        let looks = draft_max > 0 && !withheld && matches!(asked, Asked::Auto | Asked::Suffix);
        Prospect {
            namespace: self.namespace,
            context_tokens: self.text.len() as u32,
            asked,
            draft_max,
            merged_max: room.min(limits.max_draft_tokens),
            candidate: looks
                .then(|| self.suffix_draft(draft_max, &routing.router.params))
                .flatten(),
            chances: Vec::new(),
            withheld,
            fallback: self.usable(routing.fallback),
            unread_tokens: self.unread_tokens(),
            priority: match self.request.urgency.priority {
                chunk::Priority::Low => Priority::Low,
                chunk::Priority::Normal => Priority::Normal,
                chunk::Priority::High => Priority::High,
            },
            pace: self.pace(now),
        }
    }

    /// Counted from the first token of the chunk: what came before it ran elsewhere or waited for its turn.
    fn pace(&self, now: Instant) -> Option<Pace> {
        let tpot_ms = self.request.urgency.tpot_ms?;
        let first = self.first_token_at?;
        Some(Pace {
            tpot_s: f64::from(tpot_ms) / 1e3,
            elapsed_s: now.saturating_duration_since(first).as_secs_f64(),
            tokens: self.emitted().saturating_sub(1),
        })
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

    pub(super) fn suffix_draft(&self, draft_max: u32, params: &ProposeParams) -> Option<Candidate> {
        let sources = self.sources.as_ref()?;
        let drafts = sources.memory.read();
        let group = sources.group.as_ref().map(|member| member.group().read());
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.text,
        };
        let mut lookups = Vec::with_capacity(4);
        // First: where it says the same as others, it is what the client wants to be told of.
        lookups.extend(sources.predicted.as_ref().map(|predicted| Lookup {
            source: Source::Prediction,
            ..lookup(Scope::Request, predicted, predicted.start(&self.text))
        }));
        lookups.extend(
            sources
                .own
                .tip(OWN)
                .map(|cursor| lookup(Scope::Request, &sources.own, cursor)),
        );
        // Alone in its group it would read its own output again.
        if let Some(group) = group.as_ref().filter(|group| group.index().documents() > 1) {
            lookups.push(lookup(Scope::Group, group.index(), self.cursor_in(group)));
        }
        lookups.push(lookup(
            Scope::Tenant,
            drafts.index(),
            self.cursor_in(&drafts),
        ));
        propose(&lookups, params, draft_max as usize)
    }

    fn cursor_in(&self, drafts: &DraftIndex) -> Cursor {
        drafts.cursor(self.document(), self.output().len() as u32, &self.text)
    }
}

/// The labels of a draft that was found.
pub(crate) fn labels(candidate: &Candidate) -> (DraftSource, DraftScope) {
    match candidate.source {
        Source::Prediction => (DraftSource::Prediction, DraftScope::Request),
        _ => (DraftSource::Suffix, wire_scope(candidate.scope)),
    }
}

fn wire_scope(scope: Scope) -> DraftScope {
    match scope {
        Scope::Request => DraftScope::Request,
        Scope::Group => DraftScope::Group,
        Scope::Tenant => DraftScope::Tenant,
    }
}
