//! The draft of one request in a step: the search for it, its form on the wire, and the check of the engine's answer.

use std::time::Instant;

use refrain_draft_replica::{DraftIndex, DraftQuery};
use refrain_protocol::chunk::{self, DraftScope, DraftShare, DraftSource};
use refrain_protocol::engine::{Draft, DrafterKind, StepOutput};
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_speculation::draft::{Candidate, Lookup, ProposeParams, Scope, Source, propose};
use refrain_speculation::router::{Asked, HeadState, Offer, Pace, Priority, Prospect};
use refrain_suffix_index::Cursor;

use super::{ActiveRequest, EngineLimits, OWN};
use crate::routing::{asked, drafts_from_indexes};

/// The draft tokens of a step, and how many of them were accepted.
pub(super) struct DraftCounts {
    /// Tokens of the step's main source.
    pub(super) drafted: u32,
    /// Accepted tokens of the step's main source.
    pub(super) accepted: u32,
    /// The engine's share in a merged tree.
    pub(super) merged: Option<DraftShare>,
}

impl DraftCounts {
    /// The counts of an offer. `drafter` is the drafter inside the engine.
    pub(super) fn new(
        offer: Option<&Offer>,
        drafter: Option<DrafterKind>,
        output: &StepOutput,
    ) -> Self {
        let accepted = output.accepted_nodes.len() as u32;
        let sent = offer.map_or(0, Offer::sent_tokens);
        let is_merged = sent > 0 && offer.is_some_and(|offer| offer.head().is_some());
        let Some(kind) = drafter.filter(|_| is_merged) else {
            return DraftCounts {
                drafted: sent + output.self_drafted,
                accepted,
                merged: None,
            };
        };
        let by_engine = output.accepted_nodes.iter().filter(|node| **node >= sent);
        let by_engine = by_engine.count() as u32;
        DraftCounts {
            drafted: sent,
            accepted: accepted - by_engine,
            merged: Some(DraftShare {
                source: kind.into(),
                drafted: output.self_drafted,
                accepted: by_engine,
            }),
        }
    }

    /// Draft tokens of all sources.
    pub(super) fn drafted_in_all(&self) -> u32 {
        self.drafted + self.merged.map_or(0, |share| share.drafted)
    }
}

/// The suffix draft of an offer on the wire.
pub(super) fn wire_draft(offer: Option<&Offer>) -> Option<Draft> {
    offer?.suffix().map(|candidate| Draft {
        tokens: candidate.tree.tokens().collect(),
        parents: candidate.tree.parents().collect(),
    })
}

/// Checks that the engine verified what it was offered.
///
/// # Errors
/// The engine drafted by itself without being asked, or more than it was asked for.
pub(super) fn check_draft(offer: Option<&Offer>, output: &StepOutput) -> Result<(), &'static str> {
    let drafted_max = offer.and_then(Offer::head).map(|head| head.tokens_max);
    let sent = offer.map_or(0, Offer::sent_tokens);
    match drafted_max {
        None if output.self_drafted > 0 || !output.agreed_nodes.is_empty() => {
            Err("a step drafted without being asked")
        }
        Some(most) if output.self_drafted > most => {
            Err("a step drafted more than it was asked for")
        }
        _ if output.agreed_nodes.iter().any(|node| *node >= sent) => {
            Err("a step drafted a node that was not sent")
        }
        _ => Ok(()),
    }
}

/// Accepted tokens that the engine drafted, whether they were also sent to it or not.
pub(super) fn accepted_of_head(offer: Option<&Offer>, output: &StepOutput) -> u32 {
    if offer.and_then(Offer::head).is_none() {
        return 0;
    }
    let sent = offer.map_or(0, Offer::sent_tokens);
    let drafted = |node: &&u32| **node >= sent || output.agreed_nodes.contains(node);
    output.accepted_nodes.iter().take_while(drafted).count() as u32
}

/// The labels of a step. A draft of the engine reads the request and nothing else, but it was found in no text, so it
/// has no scope.
pub(super) fn step_labels(
    offer: Option<&Offer>,
    drafter: Option<DrafterKind>,
) -> (DraftSource, DraftScope) {
    match (
        offer.and_then(Offer::suffix),
        offer.and_then(Offer::head),
        drafter,
    ) {
        (Some(candidate), _, _) => labels(candidate),
        (None, Some(_), Some(kind)) => (kind.into(), DraftScope::None),
        (None, _, _) => (DraftSource::None, DraftScope::None),
    }
}

/// The labels of a suffix draft.
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

/// The documents of the namespace that accepted nodes were read from, without the request's own.
pub(super) fn credited(
    offer: Option<&Offer>,
    accepted: &[u32],
    own: DocumentId,
) -> Vec<DocumentId> {
    // The outputs of a group belong to the namespace, too.
    let candidate = offer
        .and_then(Offer::suffix)
        .filter(|candidate| candidate.scope != Scope::Request);
    let Some(candidate) = candidate else {
        return Vec::new();
    };
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

impl ActiveRequest {
    /// The query for a remote look-up, while the request decodes and its namespace has no complete replica here.
    pub(crate) fn remote_query(&self, context_tokens: usize) -> Option<DraftQuery> {
        let memory = &self.sources.as_ref()?.memory;
        if !drafts_from_indexes(self.request.speculation)
            || !self.is_decoding()
            || !memory.is_partial()
        {
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

    /// What the request could have verified in a step with room for `room` draft tokens. With `withholds`, drafts of
    /// `auto` requests are held back.
    pub(crate) fn prospect(
        &self,
        room: u32,
        limits: EngineLimits,
        params: &ProposeParams,
        withholds: bool,
        now: Instant,
    ) -> Prospect<NamespaceId> {
        let asked = asked(self.request.speculation);
        let draft_max = self.draft_max(room, limits);
        let withheld = withholds && asked == Asked::Auto;
        let looks = draft_max > 0 && !withheld && drafts_from_indexes(self.request.speculation);
        Prospect {
            namespace: self.namespace,
            asked,
            context_tokens: self.text.len() as u32,
            draft_max,
            tree_max: room.min(limits.max_draft_tokens),
            candidate: looks
                .then(|| self.suffix_draft(draft_max, params))
                .flatten(),
            path_probabilities: Vec::new(),
            withheld,
            head: self.head_state(),
            priority: match self.request.urgency.priority {
                chunk::Priority::Low => Priority::Low,
                chunk::Priority::Normal => Priority::Normal,
                chunk::Priority::High => Priority::High,
            },
            pace: self.pace(now),
        }
    }

    /// The request's target between tokens, counted from the first token of the chunk. Earlier chunks ran elsewhere,
    /// and the request waited between them.
    fn pace(&self, now: Instant) -> Option<Pace> {
        let tpot_ms = self.request.urgency.tpot_ms?;
        let first = self.first_token_at?;
        Some(Pace {
            tpot_s: f64::from(tpot_ms) / 1e3,
            elapsed_s: now.saturating_duration_since(first).as_secs_f64(),
            tokens: self.emitted().saturating_sub(1),
        })
    }

    /// Whether the engine's own drafter can draft for the request in this step.
    fn head_state(&self) -> HeadState {
        if !self.self_drafts {
            HeadState::Absent
        } else if self.engine_len == 0 || !self.is_decoding() {
            HeadState::Blind
        } else {
            HeadState::Ready {
                unread_tokens: self.unread_tokens(),
            }
        }
    }

    /// The best draft over all suffix indexes that the request may read.
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
        // Comes first, so that ties are credited to the client's prediction.
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
        // A group of one holds only the request's own output.
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
