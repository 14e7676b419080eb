//! Engines of other makers, over HTTP: what they have in common. How each of them speaks is its [`Dialect`].

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock;
use refrain_tokenization::Tokenizer;
use serde_json::Value;
use tokio::runtime::Handle;

use super::abilities::{verify, verify_abilities};
use super::answer::{Abort, Answer};
use super::client::EngineClient;
use super::dialect::Dialect;
use super::identity::{Card, card, check_tokenizer};
use super::introductions::{Introduction, Introductions};
use super::streaming::{
    GenerateRequest, GeneratedStream, Introduced, StreamingCapabilities, StreamingEngine,
    StreamingLoad,
};
use super::verify::{Verified, VerifyAbilities, VerifyRequest};
use crate::config::EngineConfig;

/// What the worker knows of the model beforehand.
#[derive(Clone)]
pub struct ServedAs {
    /// Public name.
    pub model: String,
    /// Its name at the engine.
    pub served_model: String,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Longest text, tokens, if files or configuration say.
    pub max_context: Option<u32>,
}

/// An engine of another maker.
pub(super) struct ExternalEngine {
    client: EngineClient,
    dialect: Arc<dyn Dialect>,
    capabilities: StreamingCapabilities,
    served_model: String,
    card: Card,
    introductions: Arc<Introductions>,
    /// The runtime that it was joined on, where aborts are sent: the one that a call was made on may be ending when the call is
    /// dropped.
    tasks: Handle,
}

impl ExternalEngine {
    /// Asks the engine what it serves, whether its tokens are ours and, if it is to be driven, how it verifies drafts.
    ///
    /// # Errors
    /// It cannot be reached (`Unavailable`, `Timeout`, `Upstream`), or serves something else (`InvalidRequest`: trying
    /// again is of no use).
    pub(super) async fn connect(
        client: EngineClient,
        dialect: Arc<dyn Dialect>,
        served: ServedAs,
        config: &EngineConfig,
    ) -> Result<Self, ApiError> {
        let card = card(&client, dialect.health(), &served.served_model).await?;
        check_tokenizer(&client, &*dialect, &card, &served.tokenizer).await?;
        let mut said = card.max_model_len;
        if let Some((path, pointer)) = dialect.context() {
            let properties: Value = client.get_json(path).await?;
            let length = properties.pointer(pointer).and_then(Value::as_u64);
            said = length.and_then(|length| u32::try_from(length).ok());
        }
        let max_context = match (said, served.max_context) {
            (Some(engine), Some(ours)) => engine.min(ours),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => {
                return Err(ApiError::invalid(
                    "worker.engine.max_context",
                    "neither the engine nor the model's files say how long a text may be; set worker.engine.max_context",
                ));
            }
        };
        let verifies = if config.drives() {
            verify_abilities(&client, &*dialect, &served.tokenizer).await?
        } else {
            VerifyAbilities::default()
        };
        let able = dialect.capabilities();
        let capabilities = StreamingCapabilities {
            verifies,
            model: served.model,
            // A dialect that speaks text marks it: its tokens are ours only in our reading.
            tokenizer: format!("{}{}", able.tokenizer, served.tokenizer.identity()),
            max_context,
            ..able
        };
        tracing::info!(
            url = client.base_url(),
            max_context,
            chain = verifies.chain,
            fan_out = verifies.fan_out,
            "engine connected"
        );
        Ok(ExternalEngine {
            client,
            dialect,
            capabilities,
            served_model: served.served_model,
            card,
            introductions: Arc::new(Introductions::new(
                config.introduced_namespaces_max,
                config.attempts_max,
            )),
            tasks: Handle::current(),
        })
    }

    async fn is_the_same(&self) -> Result<(), ApiError> {
        let now = card(&self.client, self.dialect.health(), &self.served_model).await?;
        if now == self.card {
            return Ok(());
        }
        let message = format!(
            "the engine serves another model as {} now; restart this worker",
            self.served_model
        );
        Err(ApiError::new(ErrorKind::Unavailable, message))
    }

    /// Tells the engine of these. Nobody waits for that: requests that come first go first.
    fn introduce(&self, due: Vec<Introduction>) {
        if due.is_empty() {
            return;
        }
        tracing::info!(namespaces = due.len(), "the engine is told of namespaces");
        let (client, dialect) = (self.client.clone(), self.dialect.clone());
        let introductions = self.introductions.clone();
        self.tasks.spawn(async move {
            for introduction in due {
                let told = async {
                    let body = dialect.introduction(&introduction.request()?)?;
                    client.post_read(dialect.path(), &body).await
                };
                match told.await {
                    Ok(_) => introductions.told(),
                    Err(error) => {
                        introductions.failed(&introduction);
                        tracing::debug!(kind = ?error.kind, "the engine was not told of a namespace");
                    }
                }
            }
        });
    }
}

#[async_trait]
impl StreamingEngine for ExternalEngine {
    fn capabilities(&self) -> &StreamingCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        // Whoever asks may wait no longer than it likes to: a look that is dropped finds nobody, too.
        let look = self.introductions.look();
        self.is_the_same().await?;
        self.introduce(look.engine_is_here(clock::unix_s()));
        Ok(())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        if let Some(keeping) = &request.keeping {
            self.introductions.met(request.namespace, keeping);
        }
        let body = self.dialect.body(&request)?;
        // Made before the call: a caller that gives up while the call is under way aborts as well.
        let abort = Abort::of(&self.client, &self.tasks, &*self.dialect, &request);
        let response = self.client.post_events(self.dialect.path(), &body).await?;
        Ok(Answer::new(response, self.dialect.decoder(&request), abort).boxed())
    }

    async fn verify(&self, request: VerifyRequest) -> Result<Verified, ApiError> {
        verify(&self.client, &self.tasks, &*self.dialect, &request).await
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        let Some(series) = self.dialect.load() else {
            return Ok(StreamingLoad::default());
        };
        Ok(series.read(&self.client.get(series.path).await?))
    }

    fn take_introduced(&self) -> Introduced {
        self.introductions.take_outcomes()
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        let Some(series) = self.dialect.load() else {
            let nothing = "engines of this kind have no page of metrics that is known";
            return Err(ApiError::new(ErrorKind::NotFound, nothing));
        };
        self.client.get(series.path).await
    }
}
