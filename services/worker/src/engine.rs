//! What the worker needs of an engine. Adapters translate; they decide nothing.

mod http;

use async_trait::async_trait;
use refrain_protocol::engine::{
    CloseRequest, EngineCapabilities, EngineLoad, StepRequest, StepResponse,
};
use refrain_protocol::{ApiError, EngineSessionId, TokenId};

pub use http::HttpEngine;

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
