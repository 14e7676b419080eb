//! What an engine that verifies drafts is asked and answers: capabilities, sessions, batched steps.
//!
//! A *session* is a sequence of tokens (its *text*) with a KV cache. Text grows by the tokens that a step
//! brings and by those it emits. The last token of the text is always one whose forward pass is still owed,
//! so a step with no new tokens decodes on from where the last one ended.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{ApiError, EngineSessionId, NamespaceId, TokenId};

/// What an engine can do and how much of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineCapabilities {
    /// Public name of the model it serves.
    pub model: String,
    /// Tokenizer identity (see [`crate::Namespace::tokenizer`]).
    pub tokenizer: String,
    /// Vocabulary size; token ids are below it.
    pub vocab_size: u32,
    /// Longest text of a session, tokens.
    pub max_context: u32,
    /// Most sessions in one step.
    pub max_batch: u32,
    /// Most tokens (new context and draft nodes) of all items of one step. What drafts inside the engine reads no more text in
    /// one step either.
    pub max_step_tokens: u32,
    /// Most sessions that may exist at once, running or kept for reuse.
    pub max_sessions: u32,
    /// Whether drafts may branch; if not, only chains.
    pub tree_drafts: bool,
    /// Most draft nodes of one item.
    pub max_draft_tokens: u32,
    /// Ids that end an output when the request says nothing else.
    pub eos_token_ids: Vec<TokenId>,
    /// What drafts inside it, if anything does: steps may then carry [`StepItem::self_draft`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<DrafterCapabilities>,
}

/// What drafts inside an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrafterKind {
    /// An EAGLE-3 head, which reads the target's hidden states.
    Eagle3,
    /// A smaller model of the same vocabulary.
    DraftModel,
}

impl DrafterKind {
    /// The value of the `source` label.
    pub fn as_str(self) -> &'static str {
        match self {
            DrafterKind::Eagle3 => "eagle3",
            DrafterKind::DraftModel => "draft_model",
        }
    }
}

/// What an engine's drafter may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterCapabilities {
    /// What it is.
    pub kind: DrafterKind,
    /// Deepest draft.
    pub depth_max: u32,
    /// Most children of a node.
    pub top_k_max: u32,
}

/// How the target samples. Every field at its default is greedy decoding.
///
/// Noise is keyed by (`seed`, `choice`, absolute position), so the output depends neither on chunks, nor
/// on the batch, nor on drafts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities sum to at least this.
    pub top_p: f32,
    /// Keep tokens at least this many times as likely as the most likely one.
    pub min_p: f32,
    /// Fixed by the gateway, so that a continuation elsewhere draws the same noise.
    pub seed: u64,
    /// Which of the request's `n` choices this is; part of the noise key.
    pub choice: u32,
    /// Added to the logits before anything else.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens that end the output. The stop token is emitted, as the last one.
    pub stop_token_ids: Vec<TokenId>,
    /// How many most likely tokens to report beside each emitted one; `None` reports nothing.
    pub top_logprobs: Option<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            logit_bias: Vec::new(),
            stop_token_ids: Vec::new(),
            top_logprobs: None,
        }
    }
}

/// A draft that the engine is to make by itself, with its EAGLE-3 head or draft model, and verify in the same step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfDraft {
    /// Longest path, tokens (at least 1).
    pub depth: u32,
    /// Most children of a node, and most nodes of one depth that are followed further (at least 1).
    pub top_k: u32,
    /// Most nodes that are verified, beside those of [`StepItem::draft`]; the ones with the highest path probability stay.
    pub tokens_max: u32,
    /// Paths that the drafter itself thinks less likely than this are neither followed nor verified.
    pub path_prob_min: f32,
    /// Draw each token from the drafter's distribution, as the session samples, instead of taking the likeliest: accepted
    /// with chance min(1, p / q), more often than a fixed token is. The output then has the target's law but is
    /// not, token for token, that of plain decoding. Only chains (`top_k` 1), whose last token may be less likely than
    /// `path_prob_min`; of no effect at temperature 0.
    #[serde(default)]
    pub sampled: bool,
}

/// What a new session is. Sent with its first step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// KV is reused only from sessions of the same namespace.
    pub namespace: NamespaceId,
    /// Fixed for the life of the session.
    pub sampling: Sampling,
    /// Whether steps may carry [`StepItem::self_draft`]: the engine then keeps what its drafter reads.
    #[serde(default)]
    pub self_drafts: bool,
}

/// Candidate tokens as a tree under the session's last token. A chain is a tree of width one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// Token of each node.
    pub tokens: Vec<TokenId>,
    /// Parent of each node: `None` for a child of the session's last token, else the index of a node that
    /// stands before it. As long as `tokens`.
    pub parents: Vec<Option<u32>>,
}

impl Draft {
    /// Adds the nodes of `other` that are not there yet, after those that are. Gives the place of each of its nodes, in
    /// their order. Both are valid, and so is what comes of them.
    pub fn merge(&mut self, other: &Draft) -> Vec<u32> {
        let mut children: HashMap<(Option<u32>, TokenId), u32> = (0u32..)
            .zip(self.parents.iter().zip(&self.tokens))
            .map(|(node, (parent, token))| ((*parent, *token), node))
            .collect();
        let mut places: Vec<u32> = Vec::with_capacity(other.tokens.len());
        for (token, parent) in other.tokens.iter().zip(&other.parents) {
            let parent = parent.map(|parent| places[parent as usize]);
            let place = *children.entry((parent, *token)).or_insert_with(|| {
                self.tokens.push(*token);
                self.parents.push(parent);
                self.tokens.len() as u32 - 1
            });
            places.push(place);
        }
        places
    }

    /// Checks shape: equal lengths, parents before children, no two siblings with the same token.
    pub fn validate(&self) -> Result<(), ApiError> {
        if self.tokens.len() != self.parents.len() {
            return Err(ApiError::invalid(
                "draft.parents",
                "draft.parents must be as long as draft.tokens",
            ));
        }
        let mut edges = HashSet::with_capacity(self.tokens.len());
        for (node, (parent, token)) in self.parents.iter().zip(&self.tokens).enumerate() {
            if parent.is_some_and(|parent| parent as usize >= node) {
                return Err(ApiError::invalid(
                    "draft.parents",
                    format!("node {node} stands before its parent"),
                ));
            }
            if !edges.insert((*parent, *token)) {
                return Err(ApiError::invalid(
                    "draft.tokens",
                    format!("node {node} repeats a sibling's token"),
                ));
            }
        }
        Ok(())
    }
}

/// One session's part of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepItem {
    /// The session.
    pub session: EngineSessionId,
    /// Present when the session is to be opened by this step (`keep_len` is then 0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<SessionSpec>,
    /// Length of the session's text that this item builds on. Shorter than the text truncates it (always
    /// legal); longer is an error.
    pub keep_len: u32,
    /// Appended to the kept text. Must leave the text non-empty.
    pub tokens: Vec<TokenId>,
    /// Whether to sample after them. `false` for all but the last piece of a long prompt.
    pub sample: bool,
    /// Verified under the text's last token; only with `sample`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<Draft>,
    /// The engine drafts by itself; only with `sample`, in sessions opened for it. It may come to no draft at all, for
    /// example when a head has seen none of the text. Beside a `draft` what it comes to is merged into that (see
    /// [`Draft::merge`]), and both are verified as one tree; tokens that are drawn cannot be merged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub self_draft: Option<SelfDraft>,
    /// At most this many tokens are emitted (at least 1).
    pub max_emit: u32,
}

/// A batch. Items are of distinct sessions; sessions join and leave between steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// The items, at most `max_batch`.
    pub items: Vec<StepItem>,
}

/// Log-probability of one emitted token (natural log, of the distribution after bias, before truncation by
/// temperature, top-k, top-p or min-p: OpenAI's meaning).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Of the emitted token.
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// What one item came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Accepted draft tokens and then the target's own; empty without `sample`. A stop id ends it.
    pub emitted: Vec<TokenId>,
    /// Indices of the draft nodes that were accepted, root first. `emitted` starts with their tokens. Nodes that the engine
    /// drafted count on from those of [`StepItem::draft`].
    pub accepted_nodes: Vec<u32>,
    /// Nodes that the engine drafted by itself and verified, apart from `agreed_nodes`.
    #[serde(default)]
    pub self_drafted: u32,
    /// Indices of the nodes of [`StepItem::draft`] that the engine drafted as well, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agreed_nodes: Vec<u32>,
    /// Length of the session's text now, emitted tokens included.
    pub text_len: u32,
    /// Tokens whose KV was found in the cache instead of computed (only when the session was opened).
    pub cached_tokens: u32,
    /// Whether `emitted` ends with a stop id.
    pub stopped: bool,
    /// One per emitted token, if the session asked for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// One item's result: an error of one item leaves the others alone. A session the engine no longer knows
/// gives [`crate::ErrorKind::NotFound`]: open it again with the whole text.
pub type StepResult = Result<StepOutput, ApiError>;

/// Results in the order of the items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepResponse {
    /// One per item.
    pub results: Vec<StepResult>,
    /// Seconds the engine took: drafting by itself, forward pass, sampling.
    pub step_s: f64,
    /// Of them, seconds its drafter took, catching up on the text included.
    #[serde(default)]
    pub draft_s: f64,
    /// Version of the weights that ran it; grows when weights are replaced.
    pub weight_version: u64,
}

/// Ends sessions. With `keep_kv` their KV stays for reuse, least recently used first out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CloseRequest {
    /// Unknown ones are ignored.
    pub sessions: Vec<EngineSessionId>,
    /// Whether a later session with the same beginning may reuse the KV.
    pub keep_kv: bool,
}

/// Drops sessions and whatever is being computed for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbortRequest {
    /// Unknown ones are ignored.
    pub sessions: Vec<EngineSessionId>,
}

/// How busy an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// Sessions open now.
    pub sessions_open: u32,
    /// Finished sessions whose KV is kept.
    pub sessions_kept: u32,
    /// KV tokens in use, kept ones included.
    pub kv_tokens: u64,
    /// Most KV tokens.
    pub kv_tokens_max: u64,
    /// Steps that wait for the one in progress.
    pub steps_waiting: u32,
}

/// Text to tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// What to encode; special tokens written in it are not recognised.
    pub text: String,
}

/// Tokens, either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokensBody {
    /// Token ids.
    pub tokens: Vec<TokenId>,
}

/// Tokens to text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text, with U+FFFD where bytes are not UTF-8.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(nodes: &[(TokenId, Option<u32>)]) -> Draft {
        let (tokens, parents) = nodes.iter().copied().unzip();
        Draft { tokens, parents }
    }

    #[test]
    fn drafts_merge_what_they_share() {
        let mut merged = draft(&[(1, None), (2, Some(0)), (3, Some(1))]);
        let other = draft(&[
            (1, None),
            (4, None),
            (2, Some(0)),
            (5, Some(0)),
            (6, Some(2)),
            (2, Some(1)),
        ]);
        assert_eq!(merged.merge(&other), [0, 3, 1, 4, 5, 6]);
        let nodes = [
            (1, None),
            (2, Some(0)),
            (3, Some(1)),
            (4, None),
            (5, Some(0)),
            (6, Some(1)),
            (2, Some(3)),
        ];
        assert_eq!(merged, draft(&nodes));
        merged.validate().unwrap();
        assert!(merged.merge(&Draft::default()).is_empty());
        let mut empty = Draft::default();
        assert_eq!(empty.merge(&merged), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(empty, merged);
    }
}
