//! An engine that verifies drafts, and that the worker drives step by step.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_output_grammar::GrammarCompiler;
use refrain_protocol::engine::{CloseRequest, EngineCapabilities, StepRequest, StepResponse};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, EngineSessionId};

use super::words::unsupported;

/// An engine that verifies drafts: the worker composes its batches and drives it step by step.
#[async_trait]
pub trait VerifyingEngine: Send + Sync {
    /// The capabilities of the engine. They do not change while it lives.
    fn capabilities(&self) -> &EngineCapabilities;

    /// Compiles the forms of outputs for the engine's model, where its tokenizer is at hand. Drafts then come from a
    /// form as well.
    fn grammars(&self) -> Option<Arc<GrammarCompiler>> {
        None
    }

    /// Its URL, if it is in another process.
    fn url(&self) -> Option<&str> {
        None
    }

    /// Checks that the engine is reachable and still matches its capabilities.
    ///
    /// # Errors
    /// The engine cannot be reached, or it serves another model now. Its output must then not be stored under
    /// the old model's name.
    async fn confirm(&self) -> Result<(), ApiError>;

    /// The state of its KV cache. `None`: it does not say.
    async fn kv_report(&self) -> Option<KvReport> {
        None
    }

    /// Computes one forward pass over a batch.
    ///
    /// # Errors
    /// The step failed as a whole. The response carries the errors of single items.
    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError>;

    /// Ends or parks sessions, and keeps their KV cache for reuse if the request says so.
    async fn close(&self, request: CloseRequest) -> Result<(), ApiError>;

    /// Ends sessions and whatever the engine is computing for them.
    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError>;

    /// Carries out an order of a trainer. The engine takes no step by itself, so a pause is the worker's, except for
    /// the KV caches that it may clear. Sessions whose KV caches the order made worthless are lost.
    ///
    /// # Errors
    /// `InvalidRequest` for what the engine cannot do, and whatever failed. The engine then stays as it was.
    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        match order {
            EngineOrder::Resume => Ok(EngineOrderReply::default()),
            EngineOrder::Pause { clears_cache, .. } if !clears_cache => {
                Ok(EngineOrderReply::default())
            }
            _ => {
                let message = "this engine takes no orders about its caches and weights";
                Err(unsupported(message))
            }
        }
    }

    /// Forgets everything that it computed for a tenant. Requests of the tenant that run go on.
    ///
    /// # Errors
    /// `InvalidRequest` with the code `unsupported_by_engine` if it cannot, and whatever failed.
    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let _ = order;
        Err(cannot_forget())
    }
}

/// The error of an engine that cannot forget one tenant.
pub(crate) fn cannot_forget() -> ApiError {
    unsupported("this engine cannot forget the KV caches of one tenant")
}
