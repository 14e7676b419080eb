//! Third-party engines over HTTP: everything that the kinds have in common. Each kind has its own [`Dialect`].

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock;
use refrain_tokenization::Tokenizer;
use serde_json::Value;
use tokio::runtime::Handle;

use super::client::EngineClient;
use super::dialect::Dialect;
use super::generate::{GenerateRequest, GeneratedStream};
use super::identity::{ModelCard, check_tokenizer, model_card};
use super::introductions::{Introduction, Introductions};
use super::response::{AbortOnDrop, ResponseStream};
use super::streaming::{IntroductionCounts, StreamingCapabilities, StreamingEngine, StreamingLoad};

/// The model that the worker expects behind an engine's address.
#[derive(Clone)]
pub struct ExpectedModel {
    /// Public name.
    pub model: String,
    /// Name of the model at the engine.
    pub served_model: String,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Longest text, tokens, if the model's files or the configuration say so.
    pub max_context: Option<u32>,
}

/// A third-party engine.
pub(crate) struct ThirdPartyEngine {
    client: EngineClient,
    dialect: Arc<dyn Dialect>,
    capabilities: StreamingCapabilities,
    served_model: String,
    card: ModelCard,
    introductions: Arc<Introductions>,
    /// The runtime that connected the engine. Background calls run here, since the runtime of a dropped call may be
    /// ending.
    tasks: Handle,
}

impl ThirdPartyEngine {
    /// Connects to the engine, and checks its model and tokenizer.
    ///
    /// # Errors
    /// The engine cannot be reached (`Unavailable`, `Timeout`, `Upstream`), or it serves another model
    /// (`InvalidRequest`: a retry would not help).
    pub(crate) async fn connect(
        client: EngineClient,
        dialect: Arc<dyn Dialect>,
        expected: ExpectedModel,
        introduced_namespaces_max: usize,
        attempts_max: u32,
    ) -> Result<Self, ApiError> {
        let card = model_card(&client, dialect.health(), &expected.served_model).await?;
        check_tokenizer(&client, &*dialect, &card, &expected.tokenizer).await?;
        let mut reported = card.max_model_len;
        if let Some((path, pointer)) = dialect.context() {
            let properties: Value = client.get_json(path).await?;
            let length = properties.pointer(pointer).and_then(Value::as_u64);
            reported = length.and_then(|length| u32::try_from(length).ok());
        }
        let max_context = match (reported, expected.max_context) {
            (Some(engine), Some(ours)) => engine.min(ours),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => {
                return Err(ApiError::invalid(
                    "worker.engine.max_context",
                    "neither the engine nor the model's files report the context length; set \
                     worker.engine.max_context",
                ));
            }
        };
        let able = dialect.capabilities();
        let capabilities = StreamingCapabilities {
            model: expected.model,
            // A text-only dialect prefixes the identity, because its token ids come from our own tokenizer.
            tokenizer: format!("{}{}", able.tokenizer, expected.tokenizer.identity()),
            max_context,
            ..able
        };
        tracing::info!(url = client.base_url(), max_context, "engine connected");
        Ok(ThirdPartyEngine {
            client,
            dialect,
            capabilities,
            served_model: expected.served_model,
            card,
            introductions: Arc::new(Introductions::new(introduced_namespaces_max, attempts_max)),
            tasks: Handle::current(),
        })
    }

    async fn check_model(&self) -> Result<(), ApiError> {
        let now = model_card(&self.client, self.dialect.health(), &self.served_model).await?;
        if now == self.card {
            return Ok(());
        }
        let message = format!(
            "the engine now serves another model as {}; restart this worker",
            self.served_model
        );
        Err(ApiError::new(ErrorKind::Unavailable, message))
    }

    /// Sends introductions in the background, one after the other, so that requests of clients go first.
    fn introduce(&self, due: Vec<Introduction>) {
        if due.is_empty() {
            return;
        }
        tracing::info!(
            namespaces = due.len(),
            "introducing namespaces to the engine"
        );
        let (client, dialect) = (self.client.clone(), self.dialect.clone());
        let introductions = self.introductions.clone();
        self.tasks.spawn(async move {
            for introduction in due {
                let sent = async {
                    let body = dialect.introduction(&introduction.request()?)?;
                    client.post_read(dialect.path(), &body).await
                };
                match sent.await {
                    Ok(_) => introductions.succeeded(),
                    Err(error) => {
                        introductions.failed(&introduction);
                        tracing::debug!(kind = ?error.kind, "a namespace could not be introduced to the engine");
                    }
                }
            }
        });
    }
}

#[async_trait]
impl StreamingEngine for ThirdPartyEngine {
    fn capabilities(&self) -> &StreamingCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        // A caller with a timeout may drop this call, which also means that the engine is away.
        let check = self.introductions.begin_check();
        self.check_model().await?;
        self.introduce(check.engine_is_reachable(clock::unix_s()));
        Ok(())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        if let Some(attached) = &request.attached {
            self.introductions.record_use(request.namespace, attached);
        }
        let body = self.dialect.body(&request)?;
        // Created before the call, so that a caller that gives up during the call aborts it as well.
        let abort = AbortOnDrop::new(&self.client, &self.tasks, &*self.dialect, &request);
        let response = self.client.post_events(self.dialect.path(), &body).await?;
        Ok(ResponseStream::new(response, self.dialect.decoder(&request), abort).boxed())
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        let Some(series) = self.dialect.load() else {
            return Ok(StreamingLoad::default());
        };
        Ok(series.read(&self.client.get(series.path).await?))
    }

    fn take_introduction_counts(&self) -> IntroductionCounts {
        self.introductions.take_counts()
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        let Some(series) = self.dialect.load() else {
            let message = "engines of this kind have no known metrics page";
            return Err(ApiError::new(ErrorKind::NotFound, message));
        };
        self.client.get(series.path).await
    }
}
