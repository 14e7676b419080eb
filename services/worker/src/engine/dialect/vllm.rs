//! vLLM, over `/v1/completions` with token ids.

#[cfg(test)]
mod tests;

use refrain_protocol::chunk::Priority;
use refrain_protocol::{ApiError, TokenId};
use serde_json::{Value, json};

use super::completions::{CompletionsDecoder, extended_body};
use super::{Decoder, Dialect};
use crate::engine::generate::GenerateRequest;
use crate::engine::load::LoadSeries;
use crate::engine::streaming::StreamingCapabilities;

/// The default of vLLM's `--max-logprobs`.
const TOP_LOGPROBS_MAX: u32 = 20;

/// A vLLM server.
pub(crate) struct Vllm {
    pub(crate) model: String,
}

impl Dialect for Vllm {
    fn capabilities(&self) -> StreamingCapabilities {
        // A vLLM with speculation of its own refuses min_p above 0 and logit_bias, and names them in its error.
        StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = extended_body(&self.model, request);
        body.extend(priority_field(request));
        let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
        set("return_token_ids", json!(true));
        // Only requests of the same namespace share blocks of the KV cache.
        set("cache_salt", json!(request.namespace.to_string()));
        set("request_id", json!(request.name()));
        if let Some(attached) = &request.attached {
            // The Refrain plugin inside the engine reads these fields.
            let mut fields = json!({
                "refrain_namespace": attached.token,
                "refrain_document": attached.document,
                "refrain_epoch": attached.epoch,
                "refrain_written": request.tokens.len() as u64 - u64::from(request.prompt_len),
            });
            if let Some(group) = &attached.group {
                fields["refrain_group"] = json!(group);
            }
            set("vllm_xargs", fields);
        }
        if let Some(top) = request.sampling.top_logprobs {
            set("logprobs", json!(top));
            set("return_tokens_as_token_ids", json!(true));
        }
        Ok(body.into())
    }

    fn introduction(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = self.body(request)?;
        body["ignore_eos"] = json!(true);
        Ok(body)
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

/// The field for the priority: requests with a lower number go first. Without `--scheduling-policy priority`, vLLM
/// 0.32 accepts any number and ignores it, although its documentation says that it refuses all but 0.
pub(crate) fn priority_field(request: &GenerateRequest) -> Option<(String, Value)> {
    let rank = match request.priority? {
        Priority::High => -1,
        Priority::Normal => 0,
        Priority::Low => 1,
    };
    Some(("priority".to_owned(), json!(rank)))
}
