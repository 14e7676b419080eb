//! vLLM, over `/v1/completions` with token ids.

use refrain_protocol::{ApiError, TokenId};
use serde_json::{Value, json};

use super::completions::{CompletionsDecoder, extended_body};
use super::external::{Decoder, Dialect};
use super::load::LoadSeries;
use super::streaming::{GenerateRequest, StreamingCapabilities};

/// `max_logprobs` of a server that was told nothing.
const TOP_LOGPROBS_MAX: u32 = 20;

pub(super) struct Vllm {
    pub(super) model: String,
}

impl Dialect for Vllm {
    fn capabilities(&self) -> StreamingCapabilities {
        // With speculation of its own it refuses a min_p above 0 and logit_bias itself, by name.
        StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = extended_body(&self.model, request);
        let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
        set("return_token_ids", json!(true));
        // Blocks of its KV cache are found again within the namespace only.
        set("cache_salt", json!(request.namespace.to_string()));
        set("request_id", json!(request.name()));
        if let Some(top) = request.sampling.top_logprobs {
            set("logprobs", json!(top));
            set("return_tokens_as_token_ids", json!(true));
        }
        Ok(body.into())
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(CompletionsDecoder::new(&request.sampling))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "vllm:num_requests_running",
            waiting: "vllm:num_requests_waiting",
            kv_usage: Some("vllm:kv_cache_usage_perc"),
        })
    }

    fn detokenize(&self, tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        let body = json!({ "model": self.model, "tokens": tokens });
        Some(("/detokenize", body, "prompt"))
    }
}
