//! The request fields that chat and text completions have in common.

use serde::Deserialize;

use super::field_shapes::{BadWords, JsonObject, LogitBias, Stop};
use crate::TokenId;
use crate::chunk::{Priority, Speculation};
use crate::scheduling::RequestClass;

/// The fields that chat and text completions have in common.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Parameters {
    /// Public name of the model. Empty: the body names none.
    #[serde(default)]
    pub model: String,
    /// Most output tokens.
    pub max_tokens: Option<u64>,
    /// The newer name of `max_tokens`. In chats it takes precedence.
    pub max_completion_tokens: Option<u64>,
    /// Temperature from 0 to 2; default 1.
    pub temperature: Option<f64>,
    /// Nucleus sampling, from 0 to 1.
    pub top_p: Option<f64>,
    /// Keeps the k most likely tokens; 0 or -1 keeps all. Not part of OpenAI's API.
    pub top_k: Option<i64>,
    /// Keeps tokens that are at least this many times as likely as the most likely one. Not part of OpenAI's API.
    pub min_p: Option<f64>,
    /// Number of choices per prompt.
    pub n: Option<u64>,
    /// Texts that end the output and are not part of it.
    pub stop: Option<Stop>,
    /// Tokens that end the output. Not part of OpenAI's API.
    pub stop_token_ids: Option<Vec<TokenId>>,
    /// Whether to ignore the end tokens of the model. Not part of OpenAI's API.
    pub ignore_eos: Option<bool>,
    /// Least number of output tokens before an end. Not part of OpenAI's API.
    pub min_tokens: Option<u64>,
    /// Texts that the output must not have. Not part of OpenAI's API.
    pub bad_words: Option<BadWords>,
    /// Whether the output has the stop text that ended it. Not part of OpenAI's API.
    pub include_stop_str_in_output: Option<bool>,
    /// Whether special tokens have no text; default true. Not part of OpenAI's API.
    pub skip_special_tokens: Option<bool>,
    /// Whether the answer has the token ids of prompt and output. Not part of OpenAI's API.
    pub return_token_ids: Option<bool>,
    /// Whether log-probabilities name each token by its id, as in `token_id:123`. Not part of OpenAI's API.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Keeps only that many tokens of the prompt, the last ones; -1 keeps what the context holds. Not part of
    /// OpenAI's API.
    pub truncate_prompt_tokens: Option<i64>,
    /// Seed of the noise.
    pub seed: Option<i64>,
    /// Biases by token id, which is a string in JSON.
    pub logit_bias: Option<LogitBias>,
    /// Penalty on tokens that are present already.
    pub presence_penalty: Option<f64>,
    /// Penalty by the number of occurrences of a token.
    pub frequency_penalty: Option<f64>,
    /// Penalty by which the logits of tokens in prompt or output are divided. Not part of OpenAI's API.
    pub repetition_penalty: Option<f64>,
    /// Number of most likely tokens whose log-probabilities are reported at each token of the prompt, beside that
    /// of the token itself. Not part of OpenAI's API.
    pub prompt_logprobs: Option<u64>,
    /// Whether to answer by a stream of events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<JsonObject<StreamOptions>>,
    /// The client's session, which is stored with the output. An extension of Refrain.
    pub session: Option<String>,
    /// The group of samples that share drafts and are scheduled together. An extension of Refrain.
    pub group: Option<String>,
    /// Whether somebody waits for each token, or only for the whole output. An extension of Refrain.
    pub class: Option<ClassName>,
    /// The drafts that may be used. An extension of Refrain.
    pub speculation: Option<Speculation>,
    /// Weight of the drafts when not all can be verified. The names are an extension of Refrain.
    pub priority: Option<RequestPriority>,
    /// Most milliseconds wanted per output token after the first. An extension of Refrain.
    pub tpot_ms: Option<u64>,
    /// Most tokens of a chunk. An extension of Refrain.
    pub chunk_tokens: Option<u32>,
    /// Whether the metrics of the answer have its steps. An extension of Refrain.
    pub step_trace: Option<bool>,
}

/// `class`: a name. JSON of another type is a fault of the field, and not of the whole body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "must be interactive or rollout")]
pub enum ClassName {
    /// The class.
    Name(RequestClass),
}

impl From<RequestClass> for ClassName {
    fn from(class: RequestClass) -> Self {
        ClassName::Name(class)
    }
}

impl From<ClassName> for RequestClass {
    fn from(ClassName::Name(class): ClassName) -> Self {
        class
    }
}

/// `priority`: a name, or a number as clients of vLLM send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "must be low, normal, high or a whole number")]
pub enum RequestPriority {
    /// A name.
    Name(Priority),
    /// A number. Lower is earlier; 0 is the default.
    Number(i64),
}

impl From<RequestPriority> for Priority {
    fn from(priority: RequestPriority) -> Self {
        match priority {
            RequestPriority::Name(priority) => priority,
            RequestPriority::Number(..=-1) => Priority::High,
            RequestPriority::Number(0) => Priority::Normal,
            RequestPriority::Number(1..) => Priority::Low,
        }
    }
}

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct StreamOptions {
    /// Whether the last event has the usage.
    pub include_usage: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::super::field_shapes::LOGIT_BIAS_MAX;
    use super::*;

    #[test]
    fn a_priority_is_a_name_or_a_number() {
        let read = |json: &str| {
            let read = serde_json::from_str::<RequestPriority>(json);
            read.map(Priority::from).map_err(|error| error.to_string())
        };
        for (json, expected) in [
            ("\"low\"", Priority::Low),
            ("\"normal\"", Priority::Normal),
            ("\"high\"", Priority::High),
            ("-9223372036854775808", Priority::High),
            ("-1", Priority::High),
            ("0", Priority::Normal),
            ("1", Priority::Low),
            ("1700000000", Priority::Low),
        ] {
            assert_eq!(read(json), Ok(expected), "{json}");
        }
        for json in ["\"urgent\"", "0.5", "true", "[]"] {
            let error = read(json).unwrap_err();
            assert!(error.contains("low, normal, high"), "{json}: {error}");
        }
    }

    #[test]
    fn null_counts_as_missing() {
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
    fn logit_bias_ends_where_it_would_be_refused() {
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
    }
}
