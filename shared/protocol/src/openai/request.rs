//! The request fields that chat and text completions have in common.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::field_shapes::{self, Stop};
use crate::TokenId;
use crate::chunk::{Priority, Speculation};

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
    #[serde(default, deserialize_with = "field_shapes::logit_bias")]
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

#[cfg(test)]
mod tests {
    use super::super::LOGIT_BIAS_MAX;
    use super::*;

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
