//! TensorRT-LLM's `trtllm-serve`, over `/v1/completions` without its detokenizer, so that it answers with token ids.
//!
//! Written after its published request and response schemas, which forbid fields they do not know; it was never run
//! against a real one.

use refrain_protocol::ApiError;
use serde_json::{Map, Value, json};

use super::completions::{CompletionsDecoder, extended_body, fan_out_answer, fan_out_body};
use super::dialect::{Decoder, Dialect};
use super::load::LoadSeries;
use super::streaming::{GenerateRequest, StreamingCapabilities};
use super::verify::{Verified, VerifyRequest, VerifyWay};

pub(super) struct TensorRtLlm {
    pub(super) model: String,
}

impl Dialect for TensorRtLlm {
    fn capabilities(&self) -> StreamingCapabilities {
        // It names alternatives by their text, of which two tokens may have the same.
        StreamingCapabilities::of_dialect(None)
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        Ok(in_tokens(extended_body(&self.model, request)))
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(CompletionsDecoder::new(&request.sampling))
    }

    fn verify(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let asks = request.way == VerifyWay::FanOut;
        asks.then(|| (self.path(), in_tokens(fan_out_body(&self.model, request))))
    }

    fn verified(&self, request: &VerifyRequest, answer: &[u8]) -> Result<Verified, ApiError> {
        fan_out_answer(request, answer)
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/prometheus/metrics",
            running: "trtllm_num_requests_running",
            waiting: "trtllm_num_requests_waiting",
            kv_usage: Some("trtllm_kv_cache_utilization"),
        })
    }
}

/// Asks for ids instead of text.
fn in_tokens(mut body: Map<String, Value>) -> Value {
    body.insert("detokenize".to_owned(), json!(false));
    body.insert("add_special_tokens".to_owned(), json!(false));
    body.into()
}
