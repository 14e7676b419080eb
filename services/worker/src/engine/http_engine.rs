//! The HTTP client of the reference engine's contract: `/engine/v1/*`, JSON, with the tokens of steps behind it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use refrain_output_grammar::{GrammarCompiler, GrammarLimits};
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, EngineCapabilities, StepRequest, StepResponse,
};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::token_body::{TokenBody, encode_token_body};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_service_kit::http::MeshClient;
use refrain_tokenization::Tokenizer;

use super::verifying::VerifyingEngine;

/// Longest time in which an engine reads new weights.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1_500);

/// Longest time in which an engine forgets a tenant. Its caller waits a little longer.
const FORGET_TIMEOUT: Duration = Duration::from_secs(110);

/// A verifying engine behind HTTP.
pub struct HttpEngine {
    client: MeshClient,
    capabilities: EngineCapabilities,
    grammars: Option<Arc<GrammarCompiler>>,
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
            grammars: None,
        })
    }

    /// Takes the tokenizer of the engine's model, so that drafts come from the forms of outputs as well. A tokenizer
    /// of another model is not used.
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        let able = &self.capabilities;
        if able.output_forms && able.tokenizer == tokenizer.identity() {
            let limits = GrammarLimits::default();
            let eos = &able.eos_token_ids;
            let grammars = GrammarCompiler::new(tokenizer, able.vocab_size, eos, limits);
            self.grammars = grammars.ok().map(Arc::new);
        }
        self
    }
}

#[async_trait]
impl VerifyingEngine for HttpEngine {
    fn capabilities(&self) -> &EngineCapabilities {
        &self.capabilities
    }

    fn url(&self) -> Option<&str> {
        Some(self.client.base_url())
    }

    fn grammars(&self) -> Option<Arc<GrammarCompiler>> {
        self.grammars.clone()
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

    async fn kv_report(&self) -> Option<KvReport> {
        // An engine of an earlier version has no such page.
        self.client.get_json("/engine/v1/kv").await.ok()
    }

    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        let client = &self.client;
        let path = "/engine/v1/step";
        if !self.capabilities.token_bodies {
            return client.post_json(path, &request, None).await;
        }
        let body = encode_token_body(request)?;
        let content_type = StepRequest::CONTENT_TYPE;
        client.post_bytes_for_json(path, content_type, body).await
    }

    async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        let client = &self.client;
        client.post_json("/engine/v1/close", &request, None).await
    }

    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        let (client, request) = (&self.client, AbortRequest { sessions });
        client.post_json("/engine/v1/abort", &request, None).await
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        let timeout = matches!(order, EngineOrder::LoadWeights { .. }).then_some(LOAD_TIMEOUT);
        let client = &self.client;
        client.post_json("/engine/v1/order", &order, timeout).await
    }

    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let (client, timeout) = (&self.client, Some(FORGET_TIMEOUT));
        client.post_json("/engine/v1/forget", &order, timeout).await
    }
}
