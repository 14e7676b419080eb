//! A draft on its way to the engine and back: its form on the wire, the check of the engine's answer, and its counts.

use refrain_protocol::DocumentId;
use refrain_protocol::chunk::{DraftScope, DraftShare, DraftSource, StepMessage};
use refrain_protocol::engine::{Draft, DrafterKind, StepOutput};
use refrain_speculation::draft::{Candidate, DraftNode, Scope, Source};
use refrain_speculation::router::Offer;

/// A suffix draft on the wire.
pub(crate) fn wire_draft(candidate: &Candidate) -> Draft {
    Draft {
        tokens: candidate.tree.tokens().collect(),
        parents: candidate.tree.parents().collect(),
    }
}

/// Whether the engine's own drafter drafted at least one token.
pub(super) fn head_drafted(output: &StepOutput) -> bool {
    output.self_drafted > 0 || !output.agreed_nodes.is_empty()
}

/// Checks that the engine verified what it was offered.
///
/// # Errors
/// The engine drafted by itself without being asked, or more than it was asked for; or it accepted more tokens than
/// it could.
pub(super) fn check_draft(offer: Option<&Offer>, output: &StepOutput) -> Result<(), &'static str> {
    let drafted_max = offer.and_then(Offer::head).map(|head| head.tokens_max);
    let sent = offer.map_or(0, Offer::sent_tokens);
    let accepted_max = (sent + output.self_drafted).min(output.emitted.len() as u32);
    match drafted_max {
        None if head_drafted(output) => Err("a step drafted without being asked"),
        Some(most) if output.self_drafted > most => {
            Err("a step drafted more than it was asked for")
        }
        _ if output.agreed_nodes.iter().any(|node| *node >= sent) => {
            Err("a step drafted a node that was not sent")
        }
        _ if output.accepted_nodes.len() as u32 > accepted_max => {
            Err("a step accepted more tokens than were drafted or emitted")
        }
        _ => Ok(()),
    }
}

/// The message about a step, without its tokens and log-probabilities. `drafter` is the drafter inside the engine.
pub(super) fn step_message(
    sequence: u64,
    weight_version: u64,
    offer: Option<&Offer>,
    drafter: Option<DrafterKind>,
    output: &StepOutput,
) -> StepMessage {
    let sent = offer.map_or(0, Offer::sent_tokens);
    let head = offer.and_then(Offer::head).and(drafter);
    let (source, scope) = match (offer.and_then(Offer::suffix), head) {
        (Some(candidate), _) => labels(candidate),
        // A draft of the engine reads the request and nothing else, but it was found in no text, so it has no scope.
        (None, Some(kind)) => (kind.into(), DraftScope::None),
        (None, None) => (DraftSource::None, DraftScope::None),
    };
    let accepted = output.accepted_nodes.len() as u32;
    let by_engine = output.accepted_nodes.iter().filter(|node| **node >= sent);
    let merged = head.filter(|_| sent > 0).map(|kind| DraftShare {
        source: kind.into(),
        drafted: output.self_drafted,
        accepted: by_engine.count() as u32,
    });
    // Where the form forced the whole draft, it is the source.
    let forced = offer
        .and_then(Offer::suffix)
        .filter(|_| source != DraftSource::Grammar);
    let forced = forced.and_then(|candidate| forced_share(candidate, &output.accepted_nodes));
    let others = |count: fn(&DraftShare) -> u32| {
        let shares = merged.iter().chain(&forced);
        shares.map(count).sum::<u32>()
    };
    StepMessage {
        sequence,
        tokens: Vec::new(),
        logprobs: None,
        weight_version,
        source,
        scope,
        drafted: sent + output.self_drafted - others(|share| share.drafted),
        accepted: accepted - others(|share| share.accepted),
        merged,
        forced,
    }
}

/// The part of a sent draft that the form of the output forced.
fn forced_share(candidate: &Candidate, accepted: &[u32]) -> Option<DraftShare> {
    let nodes = candidate.tree.nodes();
    let is_forced = |node: &DraftNode| node.origin.source == Source::Grammar;
    let drafted = nodes.iter().filter(|node| is_forced(node)).count() as u32;
    let accepted = accepted.iter().filter_map(|node| nodes.get(*node as usize));
    (drafted > 0).then(|| DraftShare {
        source: DraftSource::Grammar,
        drafted,
        accepted: accepted.filter(|node| is_forced(node)).count() as u32,
    })
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

/// The labels of a suffix draft.
fn labels(candidate: &Candidate) -> (DraftSource, DraftScope) {
    match candidate.source {
        Source::Prediction => return (DraftSource::Prediction, DraftScope::Request),
        Source::Grammar => return (DraftSource::Grammar, DraftScope::None),
        Source::Suffix | Source::Eagle3 | Source::None => {}
    }
    let scope = match candidate.scope {
        Scope::Request => DraftScope::Request,
        Scope::Group => DraftScope::Group,
        Scope::Tenant => DraftScope::Tenant,
    };
    (DraftSource::Suffix, scope)
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
