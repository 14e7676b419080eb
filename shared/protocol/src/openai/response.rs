//! Answers, whole or as events of a stream, and the list of models.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::TokenId;
use crate::chunk::{DraftScope, DraftSource, SourceCounts};

/// The tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: u64,
    /// Tokens of all outputs, end tokens included and rejected drafts not.
    pub completion_tokens: u64,
    /// The sum of both.
    pub total_tokens: u64,
    /// Details of the prompts.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Details of the outputs, if the request had a prediction or the model reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Details of the outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// Tokens of the reasoning.
    pub reasoning_tokens: u64,
    /// Tokens of the prediction that were drafted and accepted.
    pub accepted_prediction_tokens: u64,
    /// Tokens of the prediction that were drafted and rejected. They are not part of `completion_tokens`.
    pub rejected_prediction_tokens: u64,
}

/// Details of the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was in a cache.
    pub cached_tokens: u64,
}

/// The extension of Refrain beside `usage`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ResponseMetrics {
    /// Counts of drafts.
    pub speculative_decoding: SpeculativeDecoding,
    /// Times of the request.
    pub timings: Timings,
    /// The steps of the request, if it asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_trace: Option<StepTrace>,
}

/// `metrics.step_trace`: the steps of an output, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepTrace {
    /// The steps.
    pub steps: Vec<TracedStep>,
    /// Whether there were further steps, which are left out.
    pub is_cut: bool,
}

/// A step of a [`StepTrace`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TracedStep {
    /// Seconds from the head of the request to the arrival of the step at the gateway.
    pub at_s: f64,
    /// Number of the chunk, from 1.
    pub chunk: u64,
    /// The text that each token completes, which is empty for a part of a character and for special tokens.
    pub tokens: Vec<String>,
    /// Where a suffix draft was found.
    pub scope: DraftScope,
    /// The drafts of the step. Their accepted tokens come first among `tokens`, in this order; the engine chose the
    /// others by itself.
    pub drafts: Vec<TracedDraft>,
}

/// A draft of a [`TracedStep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TracedDraft {
    /// Its source.
    pub source: DraftSource,
    /// Tokens that the engine verified.
    pub drafted: u64,
    /// Those of them that became output.
    pub accepted: u64,
}

/// `metrics.speculative_decoding`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SpeculativeDecoding {
    /// Engine steps.
    pub steps: u64,
    /// Draft tokens offered.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// The same counts by the source of the draft.
    pub by_source: SourceCounts,
}

/// `metrics.timings`: sums over all choices and chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Seconds from the start of each chunk to its first token.
    pub prefill_s: f64,
    /// Seconds from the first to the last token of each chunk.
    pub decode_s: f64,
    /// Tokens emitted in `decode_s`, which are all but those of the first step of each chunk.
    pub decode_tokens: u64,
    /// Number of chunks.
    pub chunks: u64,
}

/// The reason why an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop text or an end token.
    Stop,
    /// A length limit.
    Length,
    /// The model ended its output after it had called tools.
    ToolCalls,
    /// The same for a client of the deprecated `functions`.
    FunctionCall,
    /// The request was aborted, and the output is what it had by then.
    Abort,
}

impl FinishReason {
    /// The reason as answers have it.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::FunctionCall => "function_call",
            FinishReason::Abort => "abort",
        }
    }
}

/// A whole answer, or an event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer<'a, C> {
    /// Id of the answer, the same in all its events.
    pub id: &'a str,
    /// Kind of the object, such as `chat.completion`.
    pub object: &'a str,
    /// Time in Unix seconds, the same in all events.
    pub created: u64,
    /// Public name of the model.
    pub model: &'a str,
    /// The choices.
    pub choices: Vec<C>,
    /// Token ids of the prompt of a chat, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// Log-probabilities of the prompt of a chat, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Usage. `None` leaves the key out, and `Some(None)` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// The extension of Refrain, if the usage is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<ResponseMetrics>,
}

/// One choice of a chat answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Index of the choice.
    pub index: u32,
    /// The message of the model.
    pub message: AnswerMessage,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// The reason of its end.
    pub finish_reason: Option<FinishReason>,
    /// Token ids of the output, or of its new part, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// A message of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AnswerMessage {
    /// `assistant`.
    pub role: &'static str,
    /// The text. It is null where the model only called tools.
    pub content: Option<String>,
    /// Always null, since the gateway refuses no content.
    pub refusal: Option<String>,
    /// The reasoning, if there is any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, under the name that other clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls, if there are any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call, for a client of the deprecated `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionCall>,
}

/// A call of a tool, whole or its new part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// The number of the call in its message. Only events have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// The id by which the result refers to the call, in the first event of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, in the first event of the call.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// The function.
    pub function: FunctionCall,
}

/// The function of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// The name, in the first event of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The arguments as JSON text, or their new part.
    pub arguments: String,
}

/// One choice of an event of a chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Index of the choice.
    pub index: u32,
    /// The new part of the message.
    pub delta: Delta,
    /// Log-probabilities of the tokens of this event, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// The reason of the end, in the last event of the choice.
    pub finish_reason: Option<FinishReason>,
    /// Token ids of the output, or of its new part, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
    /// The steps that brought the tokens of this event, if the request asked for its steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<TracedStep>,
}

/// The new part of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Delta {
    /// The role, in the first event of the choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text. `None` leaves the key out, and `Some(None)` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Option<String>>,
    /// New text of the reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, under the name that other clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// New parts of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The new part of the call, for a client of the deprecated `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionCall>,
}

/// Log-probabilities of a chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One entry per token.
    pub content: Vec<ChatTokenLogprob>,
    /// Always null, since the gateway refuses no content.
    pub refusal: Option<Vec<ChatTokenLogprob>>,
}

/// The log-probability of one token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatTokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    pub chosen: TopLogprob,
    /// The most likely tokens at this position.
    pub top_logprobs: Vec<TopLogprob>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopLogprob {
    /// Text of the token.
    pub token: String,
    /// Natural logarithm of the probability; -9999 for very unlikely tokens.
    pub logprob: f64,
    /// Its bytes, which may be a part of a character.
    pub bytes: Vec<u8>,
}

/// One choice of a text completion, whole or of an event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// Index of the choice.
    pub index: u32,
    /// The text, or its new part.
    pub text: String,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// The reason of its end, once it has ended.
    pub finish_reason: Option<FinishReason>,
    /// Token ids of the output, or of its new part, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
    /// Token ids of the prompt, if asked for; in a stream with the first event of the choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// Log-probabilities of the prompt, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The versions of the weights that sampled the output. Whole answers to trainers have them, and the
    /// last event of a choice in their streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_versions: Option<Vec<WeightSpan>>,
}

/// Tokens of an output that one version of the weights sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WeightSpan {
    /// Place of the first of them in the output, tokens.
    pub start: usize,
    /// Place after the last of them.
    pub end: usize,
    /// The version; 0 for the weights that the engine started with.
    pub version: u64,
}

/// Log-probabilities of a prompt: for each of its tokens the entries by token id, as vLLM has them. The first is
/// null, since nothing comes before it.
pub type PromptLogprobs = Vec<Option<PromptPlace>>;

/// The entries of a place of a prompt, which are an object in this order: its own token first, then the others from
/// the likeliest on. Trainers read the first one.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPlace(pub Vec<(TokenId, PromptLogprob)>);

impl Serialize for PromptPlace {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, entry)| (id, entry)))
    }
}

/// The log-probability of a token in its place of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// Natural logarithm of the probability; -9999 for very unlikely tokens.
    pub logprob: f64,
    /// Its place among the most likely tokens, from 1. It is null where the token is not among those asked for.
    pub rank: Option<u32>,
    /// Text of the token.
    pub decoded_token: String,
}

/// Log-probabilities of a text completion, in parallel lists.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Text of each token, or `bytes:\x..` if it is not UTF-8.
    pub tokens: Vec<String>,
    /// Log-probability of each token; null for the first token of an echoed prompt, which nothing comes before.
    pub token_logprobs: Vec<Option<f64>>,
    /// The most likely tokens at each position.
    pub top_logprobs: Vec<Option<BTreeMap<String, f64>>>,
    /// Offset of each token in the text of the choice, in characters.
    pub text_offset: Vec<u64>,
}

/// `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// `GET /v1/models/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelCard {
    /// Public name of the model.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Time in Unix seconds.
    pub created: u64,
    /// Owner of the model.
    pub owned_by: &'static str,
    /// Longest prompt and output together, tokens; `None` if only the server behind knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_missing_null_or_present() {
        let usage_of = |usage| {
            let answer = Answer::<ChatChunkChoice> {
                id: "i",
                object: "o",
                created: 1,
                model: "m",
                choices: Vec::new(),
                prompt_token_ids: None,
                prompt_logprobs: None,
                usage,
                metrics: None,
            };
            let json = serde_json::to_value(&answer).unwrap();
            json.get("usage").cloned()
        };
        assert_eq!(usage_of(None), None);
        assert_eq!(usage_of(Some(None)), Some(serde_json::Value::Null));
        let tokens = usage_of(Some(Some(Usage::default()))).unwrap();
        assert_eq!(tokens["total_tokens"], 0);
    }
}
