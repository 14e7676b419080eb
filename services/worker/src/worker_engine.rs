//! The engine of a worker, whichever kind it is, and the connection to a third-party engine.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::ApiError;

use crate::config::{EngineConfig, EngineKind};
use crate::drive::{DraftVerifier, connect_verifier};
use crate::engine::dialect::{Dialect, LlamaCpp, SgLang, TensorRtLlm, TextOnly, Vllm};
use crate::engine::{
    EngineClient, ExpectedModel, StreamingEngine, ThirdPartyEngine, VerifyingEngine,
};

/// The engine of a worker.
#[derive(Clone)]
pub enum WorkerEngine {
    /// An engine that verifies drafts and is driven step by step.
    Verifying(Arc<dyn VerifyingEngine>),
    /// An engine that generates by itself.
    Streaming {
        /// The engine.
        engine: Arc<dyn StreamingEngine>,
        /// The engine again as a judge of drafts, in drive mode.
        verifier: Option<Arc<dyn DraftVerifier>>,
    },
}

/// The model that an engine serves, as chunks are checked against it.
pub(crate) struct ServedModel<'a> {
    pub(crate) model: &'a str,
    pub(crate) tokenizer: &'a str,
    pub(crate) max_context: u32,
}

impl WorkerEngine {
    /// The model that the engine serves.
    pub(crate) fn served(&self) -> ServedModel<'_> {
        let (model, tokenizer, max_context) = match self {
            WorkerEngine::Verifying(engine) => {
                let able = engine.capabilities();
                (&able.model, &able.tokenizer, able.max_context)
            }
            WorkerEngine::Streaming { engine, .. } => {
                let able = engine.capabilities();
                (&able.model, &able.tokenizer, able.max_context)
            }
        };
        ServedModel {
            model,
            tokenizer,
            max_context,
        }
    }

    /// Checks that the engine is reachable and still serves the same model.
    pub(crate) async fn confirm(&self) -> Result<(), ApiError> {
        match self {
            WorkerEngine::Verifying(engine) => engine.confirm().await,
            WorkerEngine::Streaming { engine, .. } => engine.confirm().await,
        }
    }
}

/// Connects to the third-party engine at `url`.
///
/// # Errors
/// The engine cannot be reached yet; or, as `InvalidRequest`, it does not match the configuration.
pub async fn connect_third_party(
    config: &EngineConfig,
    url: &str,
    expected: ExpectedModel,
) -> Result<WorkerEngine, ApiError> {
    let model = expected.served_model.clone();
    let tokenizer = expected.tokenizer.clone();
    let dialect: Arc<dyn Dialect> = match config.kind {
        EngineKind::Refrain => {
            return Err(ApiError::invalid(
                "worker.engine.kind",
                "\"refrain\" is not a third-party engine",
            ));
        }
        EngineKind::LlamaCpp => Arc::new(LlamaCpp::new(tokenizer, config.prompt_cache)),
        EngineKind::Vllm => Arc::new(Vllm { model }),
        EngineKind::Sglang => Arc::new(SgLang),
        EngineKind::TensorrtLlm => Arc::new(TensorRtLlm { model }),
        EngineKind::Openai => Arc::new(TextOnly { model, tokenizer }),
    };
    let call_timeout = Duration::from_millis(config.call_ms_max);
    let client =
        EngineClient::new(url, config.api_key.clone(), call_timeout).map_err(ApiError::internal)?;
    let engine = ThirdPartyEngine::connect(
        client.clone(),
        dialect,
        expected.clone(),
        config.introduced_namespaces_max,
        config.attempts_max,
    )
    .await?;
    let verifier = match config.drives() {
        true => connect_verifier(client, config, &expected).await?,
        false => None,
    };
    Ok(WorkerEngine::Streaming {
        engine: Arc::new(engine),
        verifier,
    })
}
