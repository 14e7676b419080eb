//! The HTTP client of the reference engine's contract: `/engine/v1/*`, JSON.

use async_trait::async_trait;
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest,
    StepResponse, TokenizeRequest, TokensBody,
};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TokenId};
use refrain_service_kit::http::MeshClient;

use super::verifying::VerifyingEngine;

/// A verifying engine behind HTTP.
pub struct HttpEngine {
    client: MeshClient,
    capabilities: EngineCapabilities,
}

impl HttpEngine {
    /// Connects to an engine, and asks for its capabilities.
    ///
    /// # Errors
    /// The engine cannot be reached, or the address belongs to another kind of server.
    pub async fn connect(client: MeshClient) -> Result<Self, ApiError> {
        let capabilities = client.get_json("/engine/v1/capabilities").await?;
        Ok(HttpEngine {
            client,
            capabilities,
        })
    }
}

#[async_trait]
impl VerifyingEngine for HttpEngine {
    fn capabilities(&self) -> &EngineCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        let now: EngineCapabilities = self.client.get_json("/engine/v1/capabilities").await?;
        if (&now.model, &now.tokenizer) == (&self.capabilities.model, &self.capabilities.tokenizer)
        {
            return Ok(());
        }
        let message = format!(
            "the engine serves {} now, not {}; restart this worker",
            now.model, self.capabilities.model
        );
        Err(ApiError::new(ErrorKind::Unavailable, message))
    }

    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        self.client
            .post_json("/engine/v1/step", &request, Some(self.client.timeout()))
            .await
    }

    async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        self.client
            .post_json("/engine/v1/close", &request, Some(self.client.timeout()))
            .await
    }

    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        let request = AbortRequest { sessions };
        self.client
            .post_json("/engine/v1/abort", &request, Some(self.client.timeout()))
            .await
    }

    async fn load(&self) -> Result<EngineLoad, ApiError> {
        self.client.get_json("/engine/v1/load").await
    }

    async fn tokenize(&self, text: String) -> Result<Vec<TokenId>, ApiError> {
        let request = TokenizeRequest { text };
        let body: TokensBody = self
            .client
            .post_json("/engine/v1/tokenize", &request, Some(self.client.timeout()))
            .await?;
        Ok(body.tokens)
    }

    async fn detokenize(&self, tokens: Vec<TokenId>) -> Result<String, ApiError> {
        let request = TokensBody { tokens };
        let body: DetokenizeResponse = self
            .client
            .post_json(
                "/engine/v1/detokenize",
                &request,
                Some(self.client.timeout()),
            )
            .await?;
        Ok(body.text)
    }
}
