//! The protocol of engines that verify drafts: capabilities, sessions, batched steps.
//!
//! A *session* is a sequence of tokens, its *text*, with a KV cache. The text grows by the tokens that a step adds
//! and by those that it emits. The forward pass of the last token of the text is always still to come, so a step
//! without new tokens decodes on from the end of the last step.

mod output_form;
mod sampling;

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{ApiError, EngineSessionId, NamespaceId, TenantId, TokenId};

pub use output_form::{
    ArgumentsForm, CallForm, CallsForm, FormPart, OutputForm, TextForm, call_trigger,
};
pub use sampling::Sampling;

/// The abilities and limits of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineCapabilities {
    /// Public name of the model that it serves.
    pub model: String,
    /// Identity of the tokenizer (see [`crate::Namespace::tokenizer`]).
    pub tokenizer: String,
    /// Size of the vocabulary. Token ids are below it.
    pub vocab_size: u32,
    /// Longest text of a session in tokens.
    pub max_context: u32,
    /// Most sessions in one step.
    pub max_batch: u32,
    /// Most tokens of all items of one step: new context and draft nodes. A drafter inside the engine reads no more
    /// text in one step either.
    pub max_step_tokens: u32,
    /// Most sessions that exist at once, open or kept for reuse.
    pub max_sessions: u32,
    /// Whether drafts may be trees; otherwise only chains.
    pub tree_drafts: bool,
    /// Most draft nodes of one item.
    pub max_draft_tokens: u32,
    /// Ids that end an output, unless the request names others.
    pub eos_token_ids: Vec<TokenId>,
    /// Whether sessions may have a [`Sampling::form`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub output_forms: bool,
    /// Whether [`SessionSpec::ahead`] is of use to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_ahead: bool,
    /// Whether steps may carry their tokens behind their JSON (see [`crate::token_body`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub token_bodies: bool,
    /// Its own drafter, if it has one. Steps may then have a [`StepItem::self_draft`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<DrafterCapabilities>,
}

/// The kind of drafter inside an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DrafterKind {
    /// An EAGLE-3 head, which reads the hidden states of the target.
    Eagle3,
    /// A smaller model with the same vocabulary.
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

/// The limits of the drafter inside an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrafterCapabilities {
    /// Its kind.
    pub kind: DrafterKind,
    /// Depth of the deepest draft.
    pub depth_max: u32,
    /// Most children of a node.
    pub top_k_max: u32,
}

/// Asks the engine to draft with its EAGLE-3 head or draft model, and to verify the draft in the same step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelfDraft {
    /// Longest path in tokens, at least 1.
    pub depth: u32,
    /// Most children of a node, and most nodes of one depth that are expanded, at least 1.
    pub top_k: u32,
    /// Most nodes that are verified beside those of [`StepItem::draft`]. Those with the highest path probability are
    /// kept.
    pub tokens_max: u32,
    /// Paths with a lower probability, as the drafter sees it, are neither expanded nor verified.
    pub path_prob_min: f32,
    /// Whether to sample each token from the drafter's distribution instead of taking the most likely one. A sampled
    /// token is accepted with probability min(1, p / q), more often than a fixed one. The output then has the
    /// distribution of the target, but is not the same, token for token, as without drafts. It works only for chains
    /// (`top_k` 1), whose last token may be less likely than `path_prob_min`, and has no effect at temperature 0.
    #[serde(default)]
    pub sampled: bool,
}

/// The properties of a new session, sent with its first step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// Its namespace. KV caches are reused only within a namespace.
    pub namespace: NamespaceId,
    /// The tenant of the namespace. An engine forgets what it holds by it.
    #[serde(default)]
    pub tenant: TenantId,
    /// How to sample, which never changes during a session.
    pub sampling: Sampling,
    /// Length of the prompt: the text after it is output, which penalties count.
    #[serde(default)]
    pub prompt_len: u32,
    /// Whether steps may have a [`StepItem::self_draft`]. The engine then keeps the states that its drafter reads.
    #[serde(default)]
    pub self_drafts: bool,
    /// Text that later pieces will bring, for engines with [`EngineCapabilities::reads_ahead`]. It is a hint: the
    /// engine may load keys and values of it from elsewhere, and refuses the item with a delay meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ahead: Vec<TokenId>,
}

/// Draft tokens as a tree under the last token of the session. A chain is a tree of width one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// Token of each node.
    pub tokens: Vec<TokenId>,
    /// Parent of each node: the index of an earlier node, or `None` for a child of the session's last token. As long
    /// as `tokens`.
    pub parents: Vec<Option<u32>>,
}

impl Draft {
    /// Appends the nodes of `other` that this draft lacks. Returns the index of each node of `other` in the merged
    /// draft. If both are valid, so is the merged draft.
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

    /// Checks the shape: equal lengths, parents before children, and no two siblings with the same token.
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

/// The part of one session in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepItem {
    /// The session.
    pub session: EngineSessionId,
    /// The properties of the session, if this step opens it. `keep_len` is then 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<SessionSpec>,
    /// Length of the text that this item builds on. A value below the length of the text truncates it, which is
    /// always allowed. A value above is an error.
    pub keep_len: u32,
    /// Tokens that are appended to the kept text. The result must not be empty.
    pub tokens: Vec<TokenId>,
    /// Whether to sample after them; `false` for all pieces of a long prompt but the last.
    pub sample: bool,
    /// A draft to verify under the last token of the text; only with `sample`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<Draft>,
    /// Asks the engine to draft by itself; only with `sample`, in sessions that were opened for it. The result may be
    /// no draft at all, for example if a head has seen none of the text. If the item also has a `draft`, the engine's
    /// draft is merged into it (see [`Draft::merge`]), and both are verified as one tree. Sampled drafts cannot be
    /// merged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub self_draft: Option<SelfDraft>,
    /// Most tokens to emit, at least 1.
    pub max_emit: u32,
}

/// A batched step. Its items are of different sessions, which may join and leave between steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    /// The items, at most `max_batch`.
    pub items: Vec<StepItem>,
}

/// Log-probability of one emitted token. As with OpenAI, it is the natural logarithm in the distribution after biases
/// and before temperature, top-k, top-p and min-p.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Log-probability of the emitted token.
    pub logprob: f32,
    /// The most likely tokens, the best one first.
    pub top: Vec<(TokenId, f32)>,
}

/// The result of one item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepOutput {
    /// Accepted draft tokens, then the bonus token; empty without `sample`. A stop id is the last one.
    pub emitted: Vec<TokenId>,
    /// Indices of the accepted draft nodes, root first. `emitted` starts with their tokens. The indices of nodes that
    /// the engine drafted follow those of [`StepItem::draft`].
    pub accepted_nodes: Vec<u32>,
    /// Nodes that the engine drafted and verified, without `agreed_nodes`.
    #[serde(default)]
    pub self_drafted: u32,
    /// Indices of the nodes of [`StepItem::draft`] that the engine drafted as well, in ascending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agreed_nodes: Vec<u32>,
    /// Length of the text after the step, emitted tokens included.
    pub text_len: u32,
    /// Tokens whose KV was found in the cache, in the step that opened the session.
    pub cached_tokens: u32,
    /// Whether `emitted` ends with a stop id.
    pub stopped: bool,
    /// One entry per emitted token, if the session asked for log-probabilities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// The result of one item. An error of one item does not affect the others. A session that the engine no longer has
/// gives [`crate::ErrorKind::NotFound`]: open it again with the whole text.
pub type StepResult = Result<StepOutput, ApiError>;

/// The results of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepResponse {
    /// One result per item, in that order.
    pub results: Vec<StepResult>,
    /// Seconds of the step: drafting by the engine, forward pass and sampling.
    pub step_s: f64,
    /// Seconds of `step_s` that the drafter took, reading the text included.
    #[serde(default)]
    pub draft_s: f64,
    /// Version of the weights, which grows when they are replaced.
    pub weight_version: u64,
}

/// Closes sessions. With `keep_kv` their KV caches stay for reuse until the least recently used ones are evicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CloseRequest {
    /// The sessions. Unknown ones are ignored.
    pub sessions: Vec<EngineSessionId>,
    /// Whether a later session with the same beginning may reuse the KV caches.
    pub keep_kv: bool,
    /// The requests of these sessions go on soon: the sessions stay open and as they are, and the next step of each
    /// needs only what is new. They yield to other requests when the engine needs room, and after some time; a step
    /// then finds them closed. An engine that does not know of this closes them at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub parks: bool,
}

/// Drops sessions and stops the work for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbortRequest {
    /// The sessions. Unknown ones are ignored.
    pub sessions: Vec<EngineSessionId>,
}

/// The load of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// Open sessions.
    pub sessions_open: u32,
    /// Open sessions that are parked.
    #[serde(default)]
    pub sessions_parked: u32,
    /// Closed sessions whose KV caches are kept.
    pub sessions_kept: u32,
    /// Tokens in KV caches, kept ones included.
    pub kv_tokens: u64,
    /// Most tokens in KV caches.
    pub kv_tokens_max: u64,
    /// Steps that wait for the present one.
    pub steps_waiting: u32,
}

/// Turns a text into tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// The text. Special tokens that are written in it are not recognised.
    pub text: String,
}

/// Tokens, as a request or a response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokensBody {
    /// Token ids.
    pub tokens: Vec<TokenId>,
}

/// A text that was made of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text, with U+FFFD in place of bytes that are not UTF-8.
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
    fn merged_drafts_share_their_common_nodes() {
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
