//! Algorithm 1 of SuffixDecoding: the best draft over all sources and all pattern lengths.

use refrain_suffix_index::{Cursor, Index, Token};

use crate::expand::{Drafted, Expander, Limits, ceiling};
use crate::{DraftNode, DraftTree, Origin, Scope, Source};

/// How a match is expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// A chain of most frequent tokens.
    Linear,
    /// A tree, best first.
    Tree,
}

/// How much is drafted, and from what.
#[derive(Clone, Debug, PartialEq)]
pub struct ProposeParams {
    /// Chain or tree.
    pub expansion: Expansion,
    /// A pattern of p tokens may draft alpha * p + offset tokens. The paper: 1 to 4 for agents.
    pub alpha: f32,
    /// See `alpha`.
    pub offset: f32,
    /// Most draft tokens of one proposal, whatever the pattern.
    pub max_spec_tokens: usize,
    /// Nodes with D(N) below this are not drafted.
    pub min_token_prob: f32,
    /// Shortest pattern that counts as a match (at least 1).
    pub min_match_len: u32,
    /// Longest pattern; longer matches are taken for matches of this length.
    pub max_pattern: u32,
    /// Nodes with more different continuations than this are not expanded. They are short patterns such as a
    /// comma, which predict little; reading all that ever followed one would be most of the cost of
    /// a proposal.
    pub max_fan_out: usize,
}

impl Default for ProposeParams {
    fn default() -> Self {
        ProposeParams {
            expansion: Expansion::Tree,
            alpha: 1.0,
            offset: 0.0,
            max_spec_tokens: 32,
            min_token_prob: 0.1,
            min_match_len: 1,
            max_pattern: 64,
            max_fan_out: 256,
        }
    }
}

impl ProposeParams {
    /// MAX_SPEC(p), draft tokens (the root is not one), where `room` is all that the caller can use.
    pub fn max_spec(&self, pattern_len: u32, room: usize) -> usize {
        // Never less for a longer pattern (a negative or NaN alpha is 0): the search relies on it. The cast
        // saturates: negative and NaN are 0.
        let wanted = self.alpha.max(0.0) * pattern_len as f32 + self.offset;
        (wanted as usize).min(self.max_spec_tokens).min(room)
    }
}

/// Where to look for a draft: an index and where the context stands in it.
#[derive(Clone, Copy)]
pub struct Lookup<'a> {
    /// Label of what it finds.
    pub source: Source,
    /// Whose text it is; more local ones win ties.
    pub scope: Scope,
    /// The index.
    pub index: &'a Index,
    /// The context's cursor in it.
    pub cursor: Cursor,
    /// The end of the context itself, for what is looked up by its text rather than by a cursor: the index's
    /// `pattern_tokens_max` tokens, or all of it, since what stands before them is not read.
    pub context: &'a [Token],
}

/// The best draft that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// What to verify; not empty.
    pub tree: DraftTree,
    /// SCORE: expected tokens of the step, the target's own included; more than 1.
    pub score: f32,
    /// Length of the pattern it was found under.
    pub match_len: u32,
    /// What found it.
    pub source: Source,
    /// Whose text it is.
    pub scope: Scope,
}

/// The tree with the highest SCORE over all lookups and pattern lengths; `None` if nothing follows any
/// pattern.
///
/// Sources are compared and never summed, since the same text stands in several of them. Ties go to the most
/// local scope, then to the lookup that stands earlier, then to the longer pattern.
///
/// The paper's loop over p = 1..P visits each set of occurrences once here, with its longest pattern: shorter
/// patterns of the same set draft a part of the same tree. It goes from long to short and stops when no shorter
/// pattern may draft enough to win, as SCORE <= 1 + MAX_SPEC(p).
pub fn propose(lookups: &[Lookup<'_>], params: &ProposeParams, room: usize) -> Option<Candidate> {
    let mut expander = Expander::default();
    let mut best: Option<Best<'_>> = None;
    for scope in Scope::ALL {
        for lookup in lookups.iter().filter(|lookup| lookup.scope == scope) {
            for found in lookup
                .index
                .matches(lookup.cursor.at_most(params.max_pattern))
            {
                let nodes_max = params.max_spec(found.len, room);
                let beat = best.as_ref().map_or(0.0, |best| best.score);
                if found.len < params.min_match_len
                    || nodes_max == 0
                    || ceiling(1.0, nodes_max) <= beat
                {
                    break;
                }
                let limits = Limits {
                    expansion: params.expansion,
                    nodes_max,
                    min_token_prob: params.min_token_prob,
                    max_fan_out: params.max_fan_out,
                };
                let score = expander.expand(&found, &limits, beat);
                if score > beat {
                    let drafted = std::mem::take(&mut expander.drafted);
                    if let Some(worse) = best.replace(Best {
                        score,
                        match_len: found.len,
                        lookup: *lookup,
                        drafted,
                    }) {
                        expander.drafted = worse.drafted;
                    }
                }
            }
        }
    }
    best.map(Best::into_candidate)
}

struct Best<'a> {
    score: f32,
    match_len: u32,
    lookup: Lookup<'a>,
    drafted: Vec<Drafted<'a>>,
}

impl Best<'_> {
    fn into_candidate(self) -> Candidate {
        let Best {
            score,
            match_len,
            lookup: Lookup { source, scope, .. },
            drafted,
        } = self;
        let node = |drafted: &Drafted<'_>| DraftNode {
            token: drafted.token,
            parent: drafted.parent,
            probability: drafted.probability,
            origin: Origin {
                source,
                scope,
                place: drafted.node.origin(),
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
