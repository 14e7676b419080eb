//! Algorithm 1 of SuffixDecoding: the best draft over all sources and all pattern lengths.

use std::cell::RefCell;

use refrain_suffix_index::{Cursor, Index, Match, SearchLimits, Token};

use super::expand::{Drafted, Expander, Expansion, Limits, ceiling};
use super::{DraftNode, DraftTree, Origin, Scope, Source};

/// The sizes of drafts, and the limits of the search for them.
#[derive(Clone, Debug, PartialEq)]
pub struct ProposeParams {
    /// Chain or tree.
    pub expansion: Expansion,
    /// A pattern of p tokens may draft alpha * p + offset tokens. The paper uses 1 to 4 for agents.
    pub alpha: f32,
    /// See `alpha`.
    pub offset: f32,
    /// Most draft tokens of one proposal, for every pattern length.
    pub max_spec_tokens: usize,
    /// Nodes with D(N) below this are not drafted.
    pub min_token_prob: f32,
    /// D of the first level is multiplied by n / (n + 1), where n is the number of continuations seen after the
    /// pattern. So a single copy is worth 1/2, not 1. Without it D is as in the paper.
    pub shrinks: bool,
    /// Shortest pattern that counts as a match (at least 1).
    pub min_match_len: u32,
    /// Longest pattern; longer matches count as matches of this length.
    pub max_pattern: u32,
    /// Most tokens of a pattern and its draft together. This is the rule of indexes of limited depth, where a long
    /// match leaves little to draft; it is only for comparison with such an index.
    pub match_plus_draft_cap: Option<u32>,
    /// Nodes with more different continuations than this in the live part of an index are not expanded there. They
    /// are short patterns such as a comma, which predict little. Reading all their continuations would be most of the
    /// cost of a proposal.
    pub max_fan_out: usize,
    /// Most occurrences of a pattern that are read in sealed text. If a pattern occurs more often, evenly spaced
    /// occurrences are read.
    pub samples_max: usize,
}

impl Default for ProposeParams {
    fn default() -> Self {
        ProposeParams {
            expansion: Expansion::Tree,
            alpha: 1.0,
            offset: 0.0,
            max_spec_tokens: 128,
            min_token_prob: 0.1,
            shrinks: true,
            min_match_len: 1,
            max_pattern: 64,
            match_plus_draft_cap: None,
            max_fan_out: 256,
            samples_max: 24,
        }
    }
}

impl ProposeParams {
    /// MAX_SPEC(p) in draft tokens, without the root. The caller can use at most `room` tokens.
    pub fn max_spec(&self, pattern_len: u32, room: usize) -> usize {
        // A negative or NaN alpha counts as 0, so that without a cap a longer pattern never drafts less. The cast
        // saturates: negative numbers and NaN become 0.
        let wanted = self.alpha.max(0.0) * pattern_len as f32 + self.offset;
        let left = match self.match_plus_draft_cap {
            Some(cap) => cap.saturating_sub(pattern_len) as usize,
            None => usize::MAX,
        };
        (wanted as usize)
            .min(left)
            .min(self.max_spec_tokens)
            .min(room)
    }

    /// Among the pattern lengths above `shorter` and up to `len`, the one that may draft most tokens, and that
    /// number. The longest one wins ties.
    fn best_spec(&self, len: u32, shorter: u32, room: usize) -> (u32, usize) {
        let shortest = shorter.max(self.min_match_len.max(1) - 1) + 1;
        let longest = (len, self.max_spec(len, room));
        if self.match_plus_draft_cap.is_none() {
            return longest;
        }
        (shortest..len).rev().fold(longest, |best, len| {
            let spec = self.max_spec(len, room);
            if spec > best.1 { (len, spec) } else { best }
        })
    }

    /// Most nodes of a draft with paths of at most `depth_max`.
    fn nodes_max(&self, depth_max: usize, room: usize) -> usize {
        let paths = match self.expansion {
            Expansion::Linear | Expansion::Tree => 1,
            Expansion::Paths(paths) => paths.max(1),
        };
        depth_max
            .saturating_mul(paths)
            .min(self.max_spec_tokens)
            .min(room)
    }

    fn search_limits(&self) -> SearchLimits {
        SearchLimits {
            len_max: self.max_pattern,
            samples_max: self.samples_max,
            fan_out_max: self.max_fan_out,
        }
    }

    fn limits(&self, found: &Match, room: usize) -> Limits {
        let (match_len, depth_max) = self.best_spec(found.len, found.next_len, room);
        Limits {
            expansion: self.expansion,
            match_len,
            depth_max,
            nodes_max: self.nodes_max(depth_max, room),
            min_token_prob: self.min_token_prob,
            shrinks: self.shrinks,
        }
    }
}

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
        let best = best_of(lookups, params, room, expander)?;
        Some(best.into_candidate(&expander.best))
    })
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
                let len = search.next_len();
                let (_, most) = params.best_spec(len, 0, room);
                if len < params.min_match_len
                    || most == 0
                    || ceiling(1.0, most, params.nodes_max(most, room)) <= beat
                {
                    break;
                }
                let Some(found) = search.next_match() else {
                    break;
                };
                let limits = params.limits(&found, room);
                if limits.depth_max == 0 || ceiling(1.0, limits.depth_max, limits.nodes_max) <= beat
                {
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

struct Best<'a> {
    score: f32,
    match_len: u32,
    lookup: Lookup<'a>,
}

impl Best<'_> {
    fn into_candidate(self, drafted: &[Drafted]) -> Candidate {
        let Best {
            score,
            match_len,
            lookup:
                Lookup {
                    source,
                    scope,
                    index,
                    ..
                },
        } = self;
        let node = |drafted: &Drafted| DraftNode {
            token: drafted.token,
            parent: drafted.parent,
            probability: drafted.probability,
            count: drafted.count,
            origin: Origin {
                source,
                scope,
                place: index.origin(drafted.sighting),
            },
        };
        let tree = DraftTree::from_nodes(drafted.iter().map(node).collect());
        Candidate {
            tree,
            score,
            match_len,
            source,
            scope,
        }
    }
}
