//! Calls of records that come one by one, as a program that records them sees them.

use std::sync::Arc;

use refrain_suffix_index::Token;
use serde::Serialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::call::{LoggedCall, RecordedCall};
use super::encoder::Encoder;
use super::record::RecordReader;
use super::tokenizer::LogTokenizer;
use crate::approximate_tokenizer::ApproximateTokenizer;

/// Finds the calls in records. Each record is read by itself, whatever came before it.
pub struct CallReader {
    seed: u64,
    encoder: Encoder,
}

/// A call as a line of Refrain's own form, without any text.
#[derive(Debug, Serialize)]
pub struct TokenCall {
    created_ms: Option<u64>,
    duration_ms: Option<u64>,
    first_ms: Option<u64>,
    tenant: Option<String>,
    session: Option<String>,
    group: Option<String>,
    model: Option<String>,
    prompt_token_ids: Vec<Token>,
    output_token_ids: Vec<Token>,
}

impl CallReader {
    /// A reader whose tokens and names say nothing to whoever does not know the seed.
    pub fn new(seed: u64) -> Self {
        let tokenizer = Arc::new(ApproximateTokenizer::with_seed(seed));
        CallReader {
            seed,
            encoder: Encoder::new(LogTokenizer::Approximate(tokenizer)),
        }
    }

    /// The calls in a record. There are none where it has no output of a model.
    ///
    /// # Errors
    /// A text that cannot be turned into tokens.
    pub fn read(&mut self, record: Value) -> anyhow::Result<Vec<TokenCall>> {
        let mut calls = Vec::new();
        for call in calls_in(record) {
            let call = self.encoder.recorded(call)?;
            calls.push(self.without_text(call));
        }
        Ok(calls)
    }

    /// The output tokens of a record, estimated from the length of its texts; `None` where it has no output.
    pub fn count(&self, record: Value) -> Option<u64> {
        let calls = calls_in(record).into_iter();
        let counts = calls.map(|call| self.encoder.output_tokens(&call).0);
        counts.reduce(|sum, count| sum + count)
    }

    fn without_text(&self, call: RecordedCall) -> TokenCall {
        let digest = |name: String| {
            let digest = xxh3_64_with_seed(name.as_bytes(), self.seed);
            format!("{digest:016x}")
        };
        TokenCall {
            created_ms: call.at_ms,
            duration_ms: call.duration_ms,
            first_ms: call.first_ms,
            tenant: call.tenant.map(digest),
            session: call.session.map(digest),
            group: call.group.map(digest),
            model: call.model,
            prompt_token_ids: call.prompt,
            output_token_ids: call.output,
        }
    }
}

fn calls_in(record: Value) -> Vec<LoggedCall> {
    let mut records = RecordReader::default();
    records.read(record, &|| "a call".to_owned());
    std::iter::from_fn(|| records.next_ready()).collect()
}

impl TokenCall {
    /// Tokens of the output.
    pub fn output_tokens(&self) -> u64 {
        self.output_token_ids.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(answer: &str) -> Value {
        json!({
            "session": "ann's", "tenant": "key-1", "created_ms": 1_764_400_000_000_u64, "endpoint": "/v1/chat/completions",
            "request": {"model": "m", "messages": [{"role": "user", "content": "Say it."}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": answer}}]},
        })
    }

    #[test]
    fn calls_have_tokens_and_no_text() -> anyhow::Result<()> {
        let mut reader = CallReader::new(5);
        let mut lines = Vec::new();
        for answer in ["It is blue.", "It is blue."] {
            let calls = reader.read(record(answer))?;
            assert_eq!((calls.len(), calls[0].output_tokens()), (1, 4));
            lines.push(serde_json::to_value(&calls[0])?);
        }
        assert_eq!(lines[0], lines[1]);
        let text = lines[0].to_string();
        assert!(!text.contains("ann") && !text.contains("blue"), "{text}");
        assert_eq!(lines[0]["created_ms"], 1_764_400_000_000_u64);
        // Another run has other numbers.
        let calls = CallReader::new(6).read(record("It is blue."))?;
        let other = serde_json::to_value(&calls[0])?;
        assert_ne!(other["output_token_ids"], lines[0]["output_token_ids"]);
        assert_ne!(other["session"], lines[0]["session"]);
        for data in [
            json!([]),
            json!([{"embedding": [0.5, 1]}]),
            json!([{"id": "m"}]),
        ] {
            let record = json!({"request": {"input": "a"}, "response": {"data": data}});
            assert!(reader.read(record)?.is_empty(), "{data}");
        }
        Ok(())
    }
}
