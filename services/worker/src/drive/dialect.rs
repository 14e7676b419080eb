//! The wire formats of verify calls.

mod completions;
mod llama_cpp;
mod sglang;
mod tensorrt_llm;
mod vllm;

use std::sync::Arc;

use refrain_protocol::ApiError;
use serde_json::Value;

use super::verify::{DraftVerdict, VerifyRequest};
use crate::config::{EngineConfig, EngineKind};
use crate::engine::ExpectedModel;
use crate::engine::dialect::{Dialect, LlamaCpp, SgLang, TensorRtLlm, Vllm};

/// The wire format of the verify calls of one kind of engine.
pub(super) trait VerifyDialect: Dialect {
    /// Path and body of a verify call; `None` if the engine does not support its method.
    fn verify_call(&self, request: &VerifyRequest) -> Option<(&'static str, Value)>;

    /// Reads the response to [`VerifyDialect::verify_call`].
    ///
    /// # Errors
    /// The response does not fit the wire format.
    fn verdict(&self, request: &VerifyRequest, response: &[u8]) -> Result<DraftVerdict, ApiError>;
}

/// The wire format of a kind of engine; `None` if the kind has no verify calls.
pub(super) fn verify_dialect(
    config: &EngineConfig,
    expected: &ExpectedModel,
) -> Option<Arc<dyn VerifyDialect>> {
    let model = expected.served_model.clone();
    Some(match config.kind {
        EngineKind::LlamaCpp => Arc::new(LlamaCpp::new(
            expected.tokenizer.clone(),
            config.prompt_cache,
        )),
        EngineKind::Vllm => Arc::new(Vllm { model }),
        EngineKind::Sglang => Arc::new(SgLang),
        EngineKind::TensorrtLlm => Arc::new(TensorRtLlm { model }),
        EngineKind::Refrain | EngineKind::Openai => return None,
    })
}
