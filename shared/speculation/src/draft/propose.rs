//! Algorithm 1 of SuffixDecoding: the best draft over all sources and all pattern lengths.

use std::cell::RefCell;

use refrain_suffix_index::Token;

use super::expand::Expander;
use super::merge::Merge;
use super::params::{Expansion, Limits, ProposeParams};
use super::values::Values;
use super::{Candidate, DraftNode, DraftTree, Lookup, Scope};
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
    propose_best(lookups, params, None, room)
}

/// As [`propose`], but nodes are worth what the statistics say about such nodes, less [`ProposeParams::price`], and a
/// tree is drawn from the best matches of all lookups. It is the candidate of a router that admits the nodes of a
/// draft by the same statistics. Without statistics a node is worth its share, and without a price this is
/// [`propose`].
///
/// The three longest matches of each lookup are read. On recorded calls with one request at once, one match
/// brought 3 % less, and eight brought nothing more.
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
    if params.expansion != Expansion::Tree {
        return propose_best(lookups, params, Some((statistics, price)), room);
    }
    with_expander(|expander| {
        let mut merge = Merge::default();
        for lookup in by_scope(lookups) {
            let mut search =
                lookup
                    .index
                    .search(lookup.cursor, lookup.context, params.search_limits());
            for _ in 0..MATCHES_MAX {
                if search.next_len() < params.min_match_len {
                    break;
                }
                let Some(found) = search.next_match() else {
                    break;
                };
                let limits = params.limits(found.len, found.next_len, room);
                let limits = valued(limits, lookup, Some((statistics, price)));
                if limits.depth_max == 0 {
                    break;
                }
                let score = expander.expand(&mut search, &found, &limits, 0.0);
                if score > 0.0 {
                    merge.take(expander.drafted(), score, *lookup, limits);
                }
            }
        }
        let candidate = merge.candidate(room.min(params.max_spec_tokens))?;
        Some(candidate.following(last_token(lookups)))
    })
}

/// The token that a draft follows. All lookups are of one context.
fn last_token(lookups: &[Lookup<'_>]) -> Option<Token> {
    lookups
        .iter()
        .find_map(|lookup| lookup.context.last().copied())
}

/// Matches of a lookup from which a tree is drawn.
const MATCHES_MAX: usize = 3;

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

/// The limits with the values of a lookup's nodes.
fn valued<'a>(
    limits: Limits<'a>,
    lookup: &Lookup<'_>,
    learnt: Option<(&'a AcceptanceStatistics, f32)>,
) -> Limits<'a> {
    let values = learnt.map_or(Values::Counts, |(statistics, price)| Values::Learnt {
        under_match: statistics.under_match(lookup.source, lookup.scope, limits.match_len),
        price,
    });
    Limits { values, ..limits }
}

fn propose_best(
    lookups: &[Lookup<'_>],
    params: &ProposeParams,
    learnt: Option<(&AcceptanceStatistics, f32)>,
    room: usize,
) -> Option<Candidate> {
    with_expander(|expander| {
        let Best {
            match_len, lookup, ..
        } = best_of(lookups, params, learnt, room, expander)?;
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
    learnt: Option<(&'a AcceptanceStatistics, f32)>,
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
            let limits = valued(limits, lookup, learnt);
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
