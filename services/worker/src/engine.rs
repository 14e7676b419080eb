//! What the worker needs of an engine. Adapters translate; they decide nothing.
//!
//! Two ways to decode with one: an [`Engine`] verifies drafts, and the worker drives it step by step; a
//! [`StreamingEngine`] generates by itself, and the worker listens.

mod abilities;
mod answer;
mod breaker;
mod client;
mod completions;
mod dialect;
mod external;
mod http;
mod identity;
mod introductions;
mod llama_cpp;
mod load;
mod sglang;
mod sse;
mod streaming;
mod tensorrt_llm;
mod text_only;
mod verify;
mod vllm;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::engine::{
    CloseRequest, EngineCapabilities, EngineLoad, StepRequest, StepResponse,
};
use refrain_protocol::{ApiError, EngineSessionId, TokenId};

use self::client::EngineClient;
use self::dialect::Dialect;
use self::external::ExternalEngine;
use crate::config::{EngineConfig, EngineKind};

pub(crate) use breaker::Breaker;
pub use external::ServedAs;
pub use http::HttpEngine;
pub use streaming::{
    GenerateRequest, Generated, GeneratedEnd, GeneratedStream, Introduced, Keeping,
    StreamingCapabilities, StreamingEngine, StreamingLoad,
};
pub use verify::{Verified, VerifyAbilities, VerifyRequest, VerifyWay};

/// An engine that verifies drafts: the worker composes its batches and drives it step by step.
#[async_trait]
pub trait Engine: Send + Sync {
    /// What it can do. Does not change while it lives.
    fn capabilities(&self) -> &EngineCapabilities;

    /// Whether it is there and still the engine that its capabilities describe.
    ///
    /// # Errors
    /// It cannot be reached, or serves another model now: what it says must not be kept under the old name.
    async fn confirm(&self) -> Result<(), ApiError>;

    /// One forward pass over a batch.
    ///
    /// # Errors
    /// An error of the whole step; errors of single items stand in the response.
    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError>;

    /// Ends sessions, their KV kept for reuse or not.
    async fn close(&self, request: CloseRequest) -> Result<(), ApiError>;

    /// Ends sessions and whatever is being computed for them.
    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError>;

    /// How busy it is.
    async fn load(&self) -> Result<EngineLoad, ApiError>;

    /// Text to tokens.
    async fn tokenize(&self, text: String) -> Result<Vec<TokenId>, ApiError>;

    /// Tokens to text.
    async fn detokenize(&self, tokens: Vec<TokenId>) -> Result<String, ApiError>;
}

/// A worker's engine.
#[derive(Clone)]
pub enum WorkerEngine {
    /// Driven step by step.
    Verifying(Arc<dyn Engine>),
    /// Listened to.
    Streaming(Arc<dyn StreamingEngine>),
}

/// What a chunk is checked against, whatever the engine.
pub(crate) struct Served<'a> {
    pub(crate) model: &'a str,
    pub(crate) tokenizer: &'a str,
    pub(crate) max_context: u32,
}

impl WorkerEngine {
    pub(crate) fn served(&self) -> Served<'_> {
        let (model, tokenizer, max_context) = match self {
            WorkerEngine::Verifying(engine) => {
                let able = engine.capabilities();
                (&able.model, &able.tokenizer, able.max_context)
            }
            WorkerEngine::Streaming(engine) => {
                let able = engine.capabilities();
                (&able.model, &able.tokenizer, able.max_context)
            }
        };
        Served {
            model,
            tokenizer,
            max_context,
        }
    }

    pub(crate) async fn confirm(&self) -> Result<(), ApiError> {
        match self {
            WorkerEngine::Verifying(engine) => engine.confirm().await,
            WorkerEngine::Streaming(engine) => engine.confirm().await,
        }
    }
}

/// Joins an engine of another maker at `url`.
///
/// # Errors
/// It cannot be reached yet; or, as `InvalidRequest`, it is not what the configuration says.
pub async fn connect_external(
    config: &EngineConfig,
    url: &str,
    served: ServedAs,
) -> Result<Arc<dyn StreamingEngine>, ApiError> {
    let model = served.served_model.clone();
    let tokenizer = served.tokenizer.clone();
    let dialect: Arc<dyn Dialect> = match config.kind {
        EngineKind::Refrain => {
            return Err(ApiError::invalid(
                "worker.engine.kind",
                "an engine of this kind is driven, not listened to",
            ));
        }
        EngineKind::LlamaCpp => Arc::new(llama_cpp::LlamaCpp::new(tokenizer, config.prompt_cache)),
        EngineKind::Vllm => Arc::new(vllm::Vllm { model }),
        EngineKind::Sglang => Arc::new(sglang::SgLang),
        EngineKind::TensorrtLlm => Arc::new(tensorrt_llm::TensorRtLlm { model }),
        EngineKind::Openai => Arc::new(text_only::TextOnly { model, tokenizer }),
    };
    let call_timeout = Duration::from_millis(config.call_ms_max);
    let client =
        EngineClient::new(url, config.api_key.clone(), call_timeout).map_err(ApiError::internal)?;
    let engine = ExternalEngine::connect(client, dialect, served, config).await?;
    Ok(Arc::new(engine))
}
