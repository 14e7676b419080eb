//! OpenAI's wire types, as far as the mesh speaks them.
//!
//! Requests are read leniently: every optional field may be missing or null, and unknown fields are ignored,
//! because clients send what other servers understand. What the values mean is decided by the gateway.
//! [`Parameters`] are what the endpoints have in common; what is beside them is the gateway's (`request/body.rs`).
//! Lists end where the gateway would refuse them, so that no body takes many times its bytes.

mod reading;

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::chunk::{Priority, SourceCounts, Speculation};
use crate::{ApiError, TokenId};

/// What chat and text completions have in common.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Parameters {
    /// Public model name.
    pub model: String,
    /// Most output tokens.
    pub max_tokens: Option<u64>,
    /// Its newer name; goes before the older one.
    pub max_completion_tokens: Option<u64>,
    /// 0 to 2; 1 if missing.
    pub temperature: Option<f64>,
    /// 0 to 1.
    pub top_p: Option<f64>,
    /// Keep the k most likely tokens; 0 or -1 keeps all. Not OpenAI's.
    pub top_k: Option<i64>,
    /// Keep tokens at least this many times as likely as the most likely one. Not OpenAI's.
    pub min_p: Option<f64>,
    /// Choices per prompt.
    pub n: Option<u64>,
    /// Texts that end the output and are not part of it.
    pub stop: Option<Stop>,
    /// Tokens that end the output. Not OpenAI's.
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Whether the model's own end tokens are to be ignored. Not OpenAI's.
    pub ignore_eos: Option<bool>,
    /// Fixes the noise.
    pub seed: Option<i64>,
    /// Token id (as a string) to bias; at most [`LOGIT_BIAS_MAX`].
    #[serde(default, deserialize_with = "reading::logit_bias")]
    pub logit_bias: Option<BTreeMap<String, f64>>,
    /// Penalty on tokens already present.
    pub presence_penalty: Option<f64>,
    /// Penalty by how often a token is present.
    pub frequency_penalty: Option<f64>,
    /// The same under another rule. Not OpenAI's.
    pub repetition_penalty: Option<f64>,
    /// Whether to answer with events.
    pub stream: Option<bool>,
    /// How.
    pub stream_options: Option<StreamOptions>,
    /// The client's session, recorded with what it said. The mesh's own.
    pub session: Option<String>,
    /// Group of samples that share drafts and are scheduled together. The mesh's own.
    pub group: Option<String>,
    /// Which drafts may be used. The mesh's own.
    pub speculation: Option<Speculation>,
    /// Whose drafts are verified where not all can be. The names are the mesh's own.
    pub priority: Option<RequestPriority>,
    /// Milliseconds per output token after the first that are wanted at most. The mesh's own.
    pub tpot_ms: Option<u64>,
    /// Most tokens per lease. The mesh's own.
    pub chunk_tokens: Option<u32>,
}

/// `priority`: by name, or by number as clients of vLLM send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "priority: low, normal, high or a whole number")]
pub enum RequestPriority {
    /// By name.
    Name(Priority),
    /// The lower the earlier; 0 is what everybody has who says nothing.
    Number(i64),
}

impl From<RequestPriority> for Priority {
    fn from(named: RequestPriority) -> Self {
        match named {
            RequestPriority::Name(priority) => priority,
            RequestPriority::Number(..=-1) => Priority::High,
            RequestPriority::Number(0) => Priority::Normal,
            RequestPriority::Number(1..) => Priority::Low,
        }
    }
}

/// Most entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Most texts in `stop`: OpenAI's bound.
pub const STOPS_MAX: usize = 4;
/// Most prompts of one body that are read at all; gateways are configured to fewer.
pub const PROMPTS_READ_MAX: usize = 65_536;

/// `stop`: one text or several, at most [`STOPS_MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Several(Vec<String>),
}

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct StreamOptions {
    /// Whether one more event with usage comes at the end.
    pub include_usage: Option<bool>,
}

/// `response_format`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
}

/// `prompt`; several are at most [`PROMPTS_READ_MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// One text.
    Text(String),
    /// One prompt of tokens. An empty list is one.
    Tokens(Vec<TokenId>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several prompts of tokens.
    TokenLists(Vec<Vec<TokenId>>),
}

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

/// `{"error": {..}}`, all four keys always: the body of every error response, and the last event of a stream
/// that fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorFields,
}

/// What clients branch on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorFields {
    /// For people.
    pub message: String,
    /// The kind.
    #[serde(rename = "type")]
    pub kind: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// The exact reason.
    pub code: Option<String>,
}

impl From<&ApiError> for ErrorBody {
    fn from(error: &ApiError) -> Self {
        ErrorBody {
            error: ErrorFields {
                message: error.message.clone(),
                kind: error.kind.openai_type().to_owned(),
                param: error.param.clone(),
                code: error.code.clone(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_come_in_four_shapes() {
        let read = |json: &str| serde_json::from_str::<Prompt>(json).unwrap();
        assert_eq!(read("\"a\""), Prompt::Text("a".into()));
        assert_eq!(read("[\"a\"]"), Prompt::Texts(vec!["a".into()]));
        assert_eq!(read("[1, 2]"), Prompt::Tokens(vec![1, 2]));
        assert_eq!(read("[]"), Prompt::Tokens(Vec::new()));
        assert_eq!(
            read("[[1], [2]]"),
            Prompt::TokenLists(vec![vec![1], vec![2]])
        );
        for json in [
            "[1, \"a\"]",
            "[\"a\", [1]]",
            "[-1]",
            "[0.5]",
            "[4294967296]",
            "7",
            "{}",
            "[[\"a\"]]",
        ] {
            assert!(serde_json::from_str::<Prompt>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn lists_of_a_body_end_where_they_would_be_refused() {
        let entries = |count: usize| {
            let entries: Vec<String> = (0..count).map(|id| format!("\"{id}\":1")).collect();
            format!(
                "{{\"model\":\"m\",\"logit_bias\":{{{}}}}}",
                entries.join(",")
            )
        };
        let read = |json: &str| {
            serde_json::from_str::<Parameters>(json).map_err(|error| error.to_string())
        };
        assert!(read(&entries(LOGIT_BIAS_MAX)).is_ok());
        let error = read(&entries(LOGIT_BIAS_MAX + 1)).unwrap_err();
        assert!(error.contains("at most 1024"), "{error}");
        assert!(serde_json::from_str::<Stop>(r#"["a","b","c","d"]"#).is_ok());
        assert!(serde_json::from_str::<Stop>(r#"["a","b","c","d","e"]"#).is_err());
        let prompts = |count: usize| format!("[{}\"\"]", "\"\",".repeat(count - 1));
        assert!(serde_json::from_str::<Prompt>(&prompts(PROMPTS_READ_MAX)).is_ok());
        assert!(serde_json::from_str::<Prompt>(&prompts(PROMPTS_READ_MAX + 1)).is_err());
    }

    #[test]
    fn a_priority_has_a_name_or_a_number_of_which_the_lower_is_earlier() {
        let read = |json: &str| {
            let read = serde_json::from_str::<RequestPriority>(json);
            read.map(Priority::from).map_err(|error| error.to_string())
        };
        for (json, meant) in [
            ("\"low\"", Priority::Low),
            ("\"normal\"", Priority::Normal),
            ("\"high\"", Priority::High),
            ("-9223372036854775808", Priority::High),
            ("-1", Priority::High),
            ("0", Priority::Normal),
            ("1", Priority::Low),
            ("1700000000", Priority::Low),
        ] {
            assert_eq!(read(json), Ok(meant), "{json}");
        }
        for json in ["\"urgent\"", "0.5", "true", "[]"] {
            let error = read(json).unwrap_err();
            assert!(error.contains("low, normal, high"), "{json}: {error}");
        }
    }

    #[test]
    fn null_is_as_good_as_missing() {
        let read: Parameters =
            serde_json::from_str(r#"{"model":"m","n":null,"stop":null,"what":{"ever":1}}"#)
                .unwrap();
        assert_eq!(
            read,
            Parameters {
                model: "m".into(),
                ..Parameters::default()
            }
        );
    }

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
