//! A draft on its way to the engine and back: its form on the wire, the check of the engine's answer, and its counts.

use refrain_protocol::DocumentId;
use refrain_protocol::chunk::{DraftScope, DraftShare, DraftSource};
use refrain_protocol::engine::{Draft, DrafterKind, StepOutput};
use refrain_speculation::draft::{Candidate, Scope, Source};
use refrain_speculation::router::Offer;

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
