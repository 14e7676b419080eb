//! Algorithm 1 of SuffixDecoding: the best draft over all sources and all pattern lengths.

use std::cell::RefCell;

use refrain_suffix_index::{Cursor, Index, Token};

use super::expand::Expander;
use super::params::{Limits, ProposeParams};
use super::{DraftNode, DraftTree, Origin, Scope, Source};

/// One place to search for a draft: an index, and the position of the context in it.
#[derive(Clone, Copy)]
pub struct Lookup<'a> {
    /// Source of the drafts that it finds.
    pub source: Source,
    /// The text that it searches; more local scopes win ties.
    pub scope: Scope,
    /// The index.
    pub index: &'a Index,
    /// The context's cursor in it.
    pub cursor: Cursor,
    /// The end of the context itself, for parts of the index that are searched by text rather than by a cursor. Its
    /// last tokens are enough, as many as the index's `pattern_tokens_max`, since earlier ones are not read.
    pub context: &'a [Token],
}

/// The best draft that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The draft tokens to verify; not empty.
    pub tree: DraftTree,
    /// SCORE: the expected tokens of the step, including the target's own; more than 1.
    pub score: f32,
    /// Length of the pattern under which it was found, in tokens.
    pub match_len: u32,
    /// The source that found it.
    pub source: Source,
    /// The text that it was read from.
    pub scope: Scope,
}

impl Candidate {
    /// A draft of these nodes; `None` if they are none, or no tree: a parent does not stand before its child, or two
    /// siblings have one token.
    pub fn new(
        nodes: Vec<DraftNode>,
        match_len: u32,
        source: Source,
        scope: Scope,
    ) -> Option<Self> {
        let tree = DraftTree::of_nodes(nodes).filter(|tree| !tree.is_empty())?;
        Some(Candidate {
            score: tree.score(),
            tree,
            match_len,
            source,
            scope,
        })
    }

    /// The part of the draft that has these nodes, ascending. A node whose parent is left out is left out as well.
    pub fn part(&self, nodes: &[u32]) -> Candidate {
        let tree = self.tree.select(nodes);
        Candidate {
            score: tree.score(),
            tree,
            ..*self
        }
    }
}

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
    thread_local! {
        /// Each thread has one, so that its buffers do not grow anew in every proposal.
        static EXPANDER: RefCell<Expander> = RefCell::default();
    }
    EXPANDER.with_borrow_mut(|expander| {
        let Best {
            score,
            match_len,
            lookup,
        } = best_of(lookups, params, room, expander)?;
        let Lookup { source, scope, .. } = lookup;
        let nodes = expander.best.iter().map(|drafted| DraftNode {
            token: drafted.token,
            parent: drafted.parent,
            probability: drafted.probability,
            count: drafted.count,
            origin: Origin {
                source,
                scope,
                place: lookup.index.origin(drafted.sighting),
            },
        });
        Some(Candidate {
            tree: DraftTree::of_sound_nodes(nodes.collect()),
            score,
            match_len,
            source,
            scope,
        })
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
    params: &ProposeParams,
    room: usize,
    expander: &mut Expander,
) -> Option<Best<'a>> {
    let mut best: Option<Best<'a>> = None;
    for scope in Scope::ALL {
        for lookup in lookups.iter().filter(|lookup| lookup.scope == scope) {
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
    }
    best
}
