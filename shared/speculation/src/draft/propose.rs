//! The search for drafts: Algorithm 1 of SuffixDecoding, and drafts by what is learnt about their nodes.

use std::cell::RefCell;

use refrain_suffix_index::Token;

use super::Lookup;
use super::expand::Expander;
use super::merge::Merge;
use super::params::{Expansion, Limits, ProposeParams};
use super::paying::best_paths;
use super::values::{Values, worth};
use crate::candidate::{Candidate, DraftNode, DraftTree, Scope};
use crate::statistics::AcceptanceStatistics;

/// The tree with the highest SCORE over all lookups and pattern lengths; `None` if nothing follows any
/// pattern.
///
/// Sources are compared and never summed, since several of them contain the same text. Ties go to the most local
/// scope, then to the earlier lookup, then to the longer pattern.
///
/// The paper's loop over p = 1..P visits each set of occurrences once here, with its longest pattern: shorter
/// patterns of the same set draft a part of the same tree. The loop goes from long to short patterns and stops when
/// no shorter pattern can win: the D of nodes of one depth add up to at most 1, so SCORE <= 1 + MAX_SPEC(p).
pub fn propose(lookups: &[Lookup<'_>], params: &ProposeParams, room: usize) -> Option<Candidate> {
    with_expander(|expander| {
        let Best {
            match_len, lookup, ..
        } = best_of(lookups, params, room, expander)?;
        let nodes = expander.best.iter().map(|drafted| DraftNode {
            token: drafted.token,
            parent: drafted.parent,
            probability: drafted.probability,
            count: drafted.count,
            match_len,
            witnesses: None,
            origin: lookup.origin(drafted.sighting),
        });
        let tree = DraftTree::of_sound_nodes(nodes.collect());
        let Lookup { source, scope, .. } = lookup;
        let candidate = Candidate::of_tree(tree, match_len, source, scope);
        Some(candidate.following(last_token(lookups)))
    })
}

/// A draft from the best matches of all lookups, whose nodes are worth what the statistics say about such nodes, less
/// [`ProposeParams::price`]. Nodes are in it that cost a little more than they are worth, for a router that chooses
/// among them, or for [`Candidate::paying`]; all of them are to be learnt from. Chains are the best paths of the
/// merged tree. Without statistics a node is worth its share, and without a price this is [`propose`].
pub fn propose_valued(
    lookups: &[Lookup<'_>],
    params: &ProposeParams,
    statistics: Option<&AcceptanceStatistics>,
    room: usize,
) -> Option<Candidate> {
    let Some(price) = params.price else {
        return propose(lookups, params, room);
    };
    let unknown = AcceptanceStatistics::default();
    let statistics = statistics.unwrap_or(&unknown);
    let merged = merged(lookups, params, (statistics, price), room)?;
    let merged = merged.following(last_token(lookups));
    if params.expansion == Expansion::Tree {
        return Some(merged);
    }
    let nodes = merged.tree.nodes();
    let parents = merged.tree.parents().skip(1);
    let mut paths = if (0..).zip(parents).all(|(above, of)| of == Some(above)) {
        // All matches agree. That is frequent, and an estimate of the tree takes as long as its search.
        (0..nodes.len() as u32).collect()
    } else {
        let probabilities = statistics.path_probabilities(&merged);
        let worth = probabilities.iter().map(|of| worth(*of, price));
        best_paths(nodes, &Vec::from_iter(worth), params.expansion.paths())
    };
    paths.truncate(room.min(params.max_spec_tokens));
    // The match that begins them may be another one than the best.
    let DraftNode {
        match_len, origin, ..
    } = nodes[*paths.first()? as usize];
    Some(Candidate {
        match_len,
        source: origin.source,
        scope: origin.scope,
        ..merged.part(&paths)
    })
}

/// The drafts of the best matches of all lookups as one tree. A draft of a match has at most `room` tokens, and so
/// has the tree unless chains are still to be chosen from it.
fn merged(
    lookups: &[Lookup<'_>],
    params: &ProposeParams,
    (statistics, price): (&AcceptanceStatistics, f32),
    room: usize,
) -> Option<Candidate> {
    let room = room.min(params.max_spec_tokens);
    let (matches_max, sure, tree_max) = match params.expansion {
        Expansion::Tree => (MATCHES_MAX, f32::INFINITY, room),
        Expansion::Linear | Expansion::Paths(_) => (CHAIN_MATCHES_MAX, SURE, usize::MAX),
    };
    with_expander(|expander| {
        let mut merge = Merge::default();
        for lookup in by_scope(lookups) {
            let mut search =
                lookup
                    .index
                    .search(lookup.cursor, lookup.context, params.search_limits());
            for _ in 0..matches_max {
                if search.next_len() < params.min_match_len {
                    break;
                }
                let Some(found) = search.next_match() else {
                    break;
                };
                let limits = params.limits(found.len, found.next_len, room);
                let under_match =
                    statistics.under_match(lookup.source, lookup.scope, limits.match_len);
                let limits = Limits {
                    values: Values::Learnt { under_match, price },
                    ..limits
                };
                if limits.depth_max == 0 {
                    break;
                }
                let score = expander.expand(&mut search, &found, &limits, 0.0);
                if score > 0.0 {
                    merge.take(expander.drafted(), score, *lookup, limits);
                }
                let first = expander.drafted().first();
                if first.is_some_and(|first| first.value >= sure) {
                    break;
                }
            }
        }
        merge.candidate(tree_max)
    })
}

/// The token that a draft follows. All lookups are of one context.
fn last_token(lookups: &[Lookup<'_>]) -> Option<Token> {
    lookups
        .iter()
        .find_map(|lookup| lookup.context.last().copied())
}

/// Matches of a lookup from which a tree is drawn. On recorded calls with one request at once, one match brought 3 %
/// less, and eight brought nothing more.
const MATCHES_MAX: usize = 3;
/// Matches of a lookup from which chains are drawn. A third one brought nothing.
const CHAIN_MATCHES_MAX: usize = 2;
/// A shorter match is not read for a chain whose first token is accepted with this probability: it takes as long as
/// the first one, and seldom changes the chain.
const SURE: f32 = 0.5;

fn with_expander<A>(work: impl FnOnce(&mut Expander) -> A) -> A {
    thread_local! {
        /// Each thread has one, so that its buffers do not grow anew in every proposal.
        static EXPANDER: RefCell<Expander> = RefCell::default();
    }
    EXPANDER.with_borrow_mut(work)
}

/// The lookups, the most local ones first.
fn by_scope<'a, 'b>(lookups: &'b [Lookup<'a>]) -> impl Iterator<Item = &'b Lookup<'a>> {
    let of_scope = |scope| lookups.iter().filter(move |lookup| lookup.scope == scope);
    Scope::ALL.into_iter().flat_map(of_scope)
}

/// The best draft, whose tree stands in the expander.
struct Best<'a> {
    score: f32,
    match_len: u32,
    lookup: Lookup<'a>,
}

/// Finds the best draft and leaves its tree in the expander.
fn best_of<'a>(
    lookups: &[Lookup<'a>],
    params: &'a ProposeParams,
    room: usize,
    expander: &mut Expander,
) -> Option<Best<'a>> {
    let mut best: Option<Best<'a>> = None;
    for lookup in by_scope(lookups) {
        let limits = params.search_limits();
        let mut search = lookup.index.search(lookup.cursor, lookup.context, limits);
        loop {
            let beat = best.as_ref().map_or(0.0, |best| best.score);
            let wins = |limits: &Limits<'_>| limits.depth_max > 0 && limits.ceiling(1.0) > beat;
            let len = search.next_len();
            if len < params.min_match_len || !wins(&params.limits(len, 0, room)) {
                break;
            }
            let Some(found) = search.next_match() else {
                break;
            };
            let limits = params.limits(found.len, found.next_len, room);
            if !wins(&limits) {
                continue;
            }
            let score = expander.expand(&mut search, &found, &limits, beat);
            if score > beat {
                expander.keep();
                best = Some(Best {
                    score,
                    match_len: limits.match_len,
                    lookup: *lookup,
                });
            }
        }
    }
    best
}
