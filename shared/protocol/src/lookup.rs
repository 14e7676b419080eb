//! Remote look-ups of drafts in the index of the draft store, for workers whose replica has only a part of a
//! namespace.
//!
//! One call covers all requests of a step. These types travel in bincode.

use serde::{Deserialize, Serialize};

use crate::{DocumentId, SignedNamespace, TokenId};

/// Asks for drafts after some contexts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LookupRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The rules of the search.
    pub rules: LookupRules,
    /// The contexts.
    pub contexts: Vec<LookupContext>,
}

/// The drafting rules of the worker (SuffixDecoding paper, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LookupRules {
    /// A match of p tokens allows a draft of `alpha * p + offset` tokens.
    pub alpha: f32,
    /// The constant part of that length.
    pub offset: f32,
    /// Tokens with a lower estimated probability are left out.
    pub min_token_prob: f32,
    /// Shortest match, tokens.
    pub min_match_tokens: u32,
    /// Longest pattern of the search, tokens.
    pub max_pattern_tokens: u32,
    /// Whether drafts may be trees; otherwise they are chains.
    pub tree: bool,
}

/// A context that a draft should continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupContext {
    /// Its last tokens. More than the longest pattern are not read.
    pub tokens: Vec<TokenId>,
    /// Most tokens of the draft.
    pub draft_tokens_max: u32,
}

/// The answer to [`LookupRequest`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LookupReply {
    /// One entry for each context, in that order; `None` if nothing was found.
    pub drafts: Vec<Option<FoundDraft>>,
}

/// A draft tree that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundDraft {
    /// SCORE of the SuffixDecoding paper: the expected tokens of the step, the bonus token included.
    pub score: f32,
    /// Length of the match, tokens.
    pub match_len: u32,
    /// The nodes, parents before children.
    pub nodes: Vec<FoundNode>,
}

/// A node of a draft tree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundNode {
    /// The token.
    pub token: TokenId,
    /// Index of the parent; `None` for a child of the last token of the context.
    pub parent: Option<u32>,
    /// D(N) of the SuffixDecoding paper: the estimated probability that the path to this node is accepted.
    pub probability: f32,
    /// Number of occurrences of the token there.
    pub count: u32,
    /// The document that it was read from, and the offset in its output.
    pub place: Option<(DocumentId, u32)>,
}
