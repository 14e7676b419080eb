//! The sizes of drafts: what a caller sets, and what follows from it for one match.

use refrain_suffix_index::SearchLimits;

use super::values::Values;

/// How a match is expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expansion {
    /// A chain: the best path with a price, else most frequent tokens.
    Linear,
    /// A tree, best first.
    Tree,
    /// At most this many chains (Seer, arXiv 2511.14617). With a price they are the best paths of the tree; without
    /// one they are the most probable ones at every depth. MAX_SPEC limits the length of each chain, so all chains
    /// together have at most this many times MAX_SPEC nodes. One chain is [`Linear`](Self::Linear).
    Paths(usize),
}

impl Expansion {
    /// How many times MAX_SPEC nodes a draft may have at most.
    pub(super) fn paths(self) -> usize {
        match self {
            Expansion::Linear | Expansion::Tree => 1,
            Expansion::Paths(paths) => paths.max(1),
        }
    }
}

/// The sizes of drafts, and the limits of the search for them.
#[derive(Clone, Debug, PartialEq)]
pub struct ProposeParams {
    /// Chain or tree.
    pub expansion: Expansion,
    /// A pattern of p tokens may draft alpha * p + offset tokens. The paper uses 1 to 4 for agents.
    pub alpha: f32,
    /// See `alpha`.
    pub offset: f32,
    /// Maximum number of draft tokens of one proposal, for every pattern length.
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
    /// Maximum number of tokens of a pattern and its draft together. This is the rule of indexes of limited depth,
    /// where a long match leaves little to draft; it is only for comparison with such an index.
    pub match_plus_draft_cap: Option<u32>,
    /// Nodes with more different continuations than this in the live part of an index are not expanded there. They
    /// are short patterns such as a comma, which predict little. Reading all their continuations would be most of the
    /// cost of a proposal.
    pub max_fan_out: usize,
    /// Maximum number of occurrences of a pattern that are read in sealed text. If a pattern occurs more often,
    /// evenly spaced occurrences are read.
    pub samples_max: usize,
    /// The cost of a draft token, as a share of the worth of a token. With it, nodes are worth what is learnt about
    /// such nodes instead of D(N), and a draft is drawn from several matches: see
    /// [`propose_valued`](super::propose_valued).
    pub price: Option<f32>,
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
            price: None,
        }
    }
}

impl ProposeParams {
    /// MAX_SPEC(p) in draft tokens, without the root. The caller can use at most `room` tokens.
    fn max_spec(&self, pattern_len: u32, room: usize) -> usize {
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

    pub(super) fn search_limits(&self) -> SearchLimits {
        SearchLimits {
            len_max: self.max_pattern,
            samples_max: self.samples_max,
            fan_out_max: self.max_fan_out,
        }
    }

    /// The limits of the largest draft after a match whose pattern may be longer than `shorter` and is at most `len`
    /// tokens long, whose nodes are valued by D(N).
    pub(super) fn limits(&self, len: u32, shorter: u32, room: usize) -> Limits<'_> {
        let (match_len, depth_max) = self.best_spec(len, shorter, room);
        let nodes_max = depth_max
            .saturating_mul(self.expansion.paths())
            .min(self.max_spec_tokens)
            .min(room);
        Limits {
            params: self,
            match_len,
            depth_max,
            nodes_max,
            values: Values::Counts,
        }
    }
}

/// Limits of the draft after one match.
#[derive(Clone, Copy)]
pub(super) struct Limits<'a> {
    pub(super) params: &'a ProposeParams,
    /// The pattern's length.
    pub(super) match_len: u32,
    /// MAX_SPEC(p): the longest path.
    pub(super) depth_max: usize,
    /// Maximum number of draft tokens; equal to `depth_max` unless there are several paths.
    pub(super) nodes_max: usize,
    /// The worth of nodes.
    pub(super) values: Values<'a>,
}

impl Limits<'_> {
    /// D of the pattern itself, after which `total` continuations were seen.
    pub(super) fn root_probability(&self, total: u64) -> f32 {
        match self.params.shrinks {
            true => total as f32 / (total as f32 + 1.0),
            false => 1.0,
        }
    }

    /// Children of a node of a path, the most frequent first, of which the next one of the path may be any.
    pub(super) fn children_max(&self) -> usize {
        match self.values {
            Values::Counts => self.params.expansion.paths(),
            Values::Learnt { .. } => usize::MAX,
        }
    }

    /// The highest SCORE of a tree within these limits whose levels' probabilities each add up to at most `d`. The
    /// second factor covers the rounding errors of the sum.
    pub(super) fn ceiling(&self, d: f32) -> f32 {
        (1.0 + self.depth_max as f32 * d) * (1.0 + (self.nodes_max as f32 + 4.0) * f32::EPSILON)
    }
}
