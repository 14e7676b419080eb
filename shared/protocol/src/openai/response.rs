//! Answers, whole or as events of a stream, and the list of models.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::SourceCounts;

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of all prompts, each once.
    pub prompt_tokens: u64,
    /// Tokens of all outputs, end tokens included; drafts that were rejected are not among them.
    pub completion_tokens: u64,
    /// Both.
    pub total_tokens: u64,
    /// More on the prompts.
    pub prompt_tokens_details: PromptTokensDetails,
    /// More on the outputs, of requests that predicted theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// More on the outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionTokensDetails {
    /// Tokens of the prediction that were offered as drafts and became output.
    pub accepted_prediction_tokens: u64,
    /// Those that were offered and did not. They are not part of `completion_tokens`.
    pub rejected_prediction_tokens: u64,
}

/// More on the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was found in a cache.
    pub cached_tokens: u64,
}

/// The mesh's own figures beside `usage`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResponseMetrics {
    /// What drafts did for it.
    pub speculative_decoding: SpeculativeDecoding,
    /// Where the time went.
    pub timings: Timings,
}

/// `metrics.speculative_decoding`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpeculativeDecoding {
    /// Engine steps.
    pub steps: u64,
    /// Draft tokens offered.
    pub drafted: u64,
    /// Of them accepted.
    pub accepted: u64,
    /// The same, by where the draft came from.
    pub by_source: SourceCounts,
}

/// `metrics.timings`, sums over all choices and chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Seconds from the start of a chunk to its first token.
    pub prefill_s: f64,
    /// Seconds from its first token to its last.
    pub decode_s: f64,
    /// Tokens that came in that time: all but those of a chunk's first step.
    pub decode_tokens: u64,
    /// Chunks.
    pub chunks: u64,
}

/// Why an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A stop text or an end token.
    Stop,
    /// A length limit.
    Length,
}

/// A chat answer (`chat.completion`), or an event of one (`chat.completion.chunk`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer<'a, C> {
    /// The same in all events.
    pub id: Cow<'a, str>,
    /// What this is.
    pub object: Cow<'a, str>,
    /// Unix seconds, the same in all events.
    pub created: u64,
    /// Public model name.
    pub model: Cow<'a, str>,
    /// By index.
    pub choices: Vec<C>,
    /// `None`: the key is left out. `Some(None)`: null.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    pub usage: Option<Option<Usage>>,
    /// The mesh's own figures, where usage is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<ResponseMetrics>,
}

/// Tells a null from a missing key.
fn present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<Usage>>, D::Error> {
    Option::<Usage>::deserialize(deserializer).map(Some)
}

/// One choice of a chat answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    /// Which.
    pub index: u32,
    /// What the model said.
    pub message: AnswerMessage,
    /// If asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: Option<FinishReason>,
}

/// The model's message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerMessage {
    /// `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
    /// Always null: nothing here refuses.
    pub refusal: Option<String>,
}

/// One choice of an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatChunkChoice {
    /// Which.
    pub index: u32,
    /// What is new.
    pub delta: Delta,
    /// Of the tokens of this event.
    pub logprobs: Option<ChatLogprobs>,
    /// In the choice's last event.
    pub finish_reason: Option<FinishReason>,
}

/// What is new in a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    /// In the choice's first event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// More text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// Log-probabilities of chat answers: one entry per token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// One per token.
    pub content: Vec<ChatTokenLogprob>,
    /// Always null: nothing here refuses.
    pub refusal: Option<Vec<ChatTokenLogprob>>,
}

/// One token's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// The token's text.
    pub token: String,
    /// Natural logarithm; -9999 for the very unlikely.
    pub logprob: f64,
    /// Its bytes, which may be half a character.
    pub bytes: Vec<u8>,
    /// The most likely tokens in its place.
    #[serde(default)]
    pub top_logprobs: Vec<TopLogprob>,
}

/// One of the most likely tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The token's text.
    pub token: String,
    /// As above.
    pub logprob: f64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// One choice of a text completion, whole or of an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    /// Which.
    pub index: u32,
    /// The text, or what is new of it.
    pub text: String,
    /// If asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why it ended, once it has.
    pub finish_reason: Option<FinishReason>,
}

/// Log-probabilities of text completions: parallel lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Text of each token; `bytes:\x..` where it is not UTF-8.
    pub tokens: Vec<String>,
    /// Of each token.
    pub token_logprobs: Vec<f64>,
    /// The most likely tokens in each place.
    pub top_logprobs: Vec<BTreeMap<String, f64>>,
    /// Where each token's text begins, in characters of the choice's text.
    pub text_offset: Vec<u64>,
}

/// `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// `GET /v1/models/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Public name.
    pub id: String,
    /// `model`.
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    /// Who offers it.
    pub owned_by: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_missing_null_or_there() {
        let mut answer = Answer::<ChatChunkChoice> {
            id: "i".into(),
            object: "o".into(),
            created: 1,
            model: "m".into(),
            choices: Vec::new(),
            usage: None,
            metrics: None,
        };
        for (usage, key) in [(None, None), (Some(None), Some(serde_json::Value::Null))] {
            answer.usage = usage;
            let json = serde_json::to_value(&answer).unwrap();
            assert_eq!(json.get("usage").cloned(), key);
            assert_eq!(
                serde_json::from_value::<Answer<'_, ChatChunkChoice>>(json).unwrap(),
                answer
            );
        }
    }
}
