//! Drafts from the draft store's own index: for a worker whose memory does not hold all of a namespace. One call for
//! all requests of a step. These types cross in bincode.

use serde::{Deserialize, Serialize};

use crate::{DocumentId, SignedNamespace, TokenId};

/// Asks for drafts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LookupRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// How to draft.
    pub rules: LookupRules,
    /// The ends of the contexts, and the most tokens that may be drafted after each.
    pub contexts: Vec<LookupContext>,
}

/// The worker's own rules of drafting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LookupRules {
    /// A match of p tokens may draft alpha * p + offset tokens.
    pub alpha: f32,
    /// See `alpha`.
    pub offset: f32,
    /// Less probable tokens are left out.
    pub min_token_prob: f32,
    /// Shortest pattern that counts.
    pub min_match_tokens: u32,
    /// Longest pattern that is looked for.
    pub max_pattern_tokens: u32,
    /// Trees, or chains only.
    pub tree: bool,
}

/// What is to be continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupContext {
    /// Its last tokens; more than the longest pattern are not read.
    pub tokens: Vec<TokenId>,
    /// Most tokens of the draft.
    pub draft_tokens_max: u32,
}

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LookupReply {
    /// One for each context, in that order; `None` where nothing was found.
    pub drafts: Vec<Option<FoundDraft>>,
}

/// A draft tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundDraft {
    /// SCORE: expected tokens of the step, the target's own included.
    pub score: f32,
    /// Length of the pattern that it was found under.
    pub match_len: u32,
    /// Parents before children.
    pub nodes: Vec<FoundNode>,
}

/// One draft token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundNode {
    /// The token.
    pub token: TokenId,
    /// Place in the list of the token that it follows; `None` for the context's last.
    pub parent: Option<u32>,
    /// D(N).
    pub probability: f32,
    /// How often it was seen there.
    pub count: u32,
    /// Where it was read, and before how many tokens of that output.
    pub place: Option<(DocumentId, u32)>,
}
