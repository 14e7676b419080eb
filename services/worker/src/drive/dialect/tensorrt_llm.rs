//! Verify calls of TensorRT-LLM: fan-outs.

#[cfg(test)]
mod tests;

use refrain_protocol::ApiError;
use serde_json::Value;

use super::VerifyDialect;
use super::completions::{fan_out_body, fan_out_verdict};
use crate::drive::verify::{DraftVerdict, VerifyMethod, VerifyRequest};
use crate::engine::dialect::{Dialect, TensorRtLlm, token_ids_only};

impl VerifyDialect for TensorRtLlm {
    fn verify_call(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let is_supported = request.method == VerifyMethod::FanOut;
        is_supported.then(|| {
            let body = fan_out_body(&self.model, request);
            (self.path(), token_ids_only(body))
        })
    }

    fn verdict(&self, request: &VerifyRequest, response: &[u8]) -> Result<DraftVerdict, ApiError> {
        fan_out_verdict(request, response)
    }
}
