//! Third-party engines over HTTP: everything that the kinds have in common. Each kind has its own [`Dialect`].

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use parking_lot::Mutex;
use refrain_protocol::engine_order::{EngineAnswer, EngineCall, EngineOrder};
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_service_kit::clock;
use refrain_tokenization::Tokenizer;
use reqwest::Method;
use serde_json::Value;
use tokio::runtime::Handle;

use super::call_body::CallBody;
use super::client::{EngineClient, parse, status_error};
use super::dialect::{Dialect, LlamaCpp, SgLang, TensorRtLlm, TextOnly, Vllm};
use super::generate::{GenerateRequest, GeneratedStream};
use super::identity::{ModelCard, check_tokenizer, model_card};
use super::introductions::{Introduction, Introductions};
use super::order_calls::{OrderCall, check_path};
use super::response::{AbortOnDrop, ResponseStream};
use super::slots::{EngineSlots, PrimerCalls};
use super::streaming::{
    IntroductionCounts, RestoredWeights, StreamingCapabilities, StreamingEngine, StreamingLoad,
};
use super::words::unsupported;
use super::worker_engine::WorkerEngine;
use crate::config::{EngineConfig, EngineKind};

/// Maximum number of recently used namespaces that are introduced to a restarted engine with Refrain's Python client
/// inside. Equal to the default of the client's `memory.namespaces_max`, which evicts the namespaces above it.
const INTRODUCED_NAMESPACES_MAX: NonZeroUsize = NonZeroUsize::new(64).unwrap();

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
struct ThirdPartyEngine {
    client: EngineClient,
    dialect: Arc<dyn Dialect>,
    capabilities: StreamingCapabilities,
    served_model: String,
    loaded: Mutex<LoadedWeights>,
    card: ModelCard,
    introductions: Arc<Introductions>,
    /// The runtime that connected the engine. Background calls run here, since the runtime of a dropped call may be
    /// ending.
    tasks: Handle,
}

/// Connects to the third-party engine at `url`, and checks its model and tokenizer.
///
/// # Errors
/// The engine cannot be reached yet (`Unavailable`, `Timeout`, `Upstream`), or it serves another model
/// (`InvalidRequest`: a retry would not help).
pub async fn connect_third_party(
    config: &EngineConfig,
    url: &str,
    expected: ExpectedModel,
) -> Result<WorkerEngine, ApiError> {
    let dialect = dialect(config, &expected)?;
    let call_timeout = Duration::from_millis(config.call_ms_max);
    let client =
        EngineClient::new(url, config.api_key.clone(), call_timeout).map_err(ApiError::internal)?;
    let card = model_card(&client, dialect.health(), &expected.served_model).await?;
    check_tokenizer(&client, &*dialect, &card, &expected.tokenizer).await?;
    let mut reported = card.max_model_len;
    if let Some((path, pointer)) = dialect.context() {
        let properties: Value = parse(&client.get(path).await?)?;
        let length = properties.pointer(pointer).and_then(Value::as_u64);
        reported = length.and_then(|length| u32::try_from(length).ok());
    }
    let lengths = reported.into_iter().chain(expected.max_context);
    let max_context = lengths.min().ok_or_else(|| {
        ApiError::invalid(
            "worker.engine.max_context",
            "neither the engine nor the model's files report the context length; set \
             worker.engine.max_context",
        )
    })?;
    let able = dialect.capabilities();
    let capabilities = StreamingCapabilities {
        model: expected.model,
        tokenizer: tokenizer_identity(&able, &expected.tokenizer),
        max_context,
        ..able
    };
    tracing::info!(url = client.base_url(), max_context, "engine connected");
    let introductions = Introductions::new(INTRODUCED_NAMESPACES_MAX, config.attempts_max);
    let engine = ThirdPartyEngine {
        client,
        dialect,
        capabilities,
        served_model: expected.served_model,
        loaded: Mutex::default(),
        card,
        introductions: Arc::new(introductions),
        tasks: Handle::current(),
    };
    Ok(WorkerEngine::Streaming(Arc::new(engine)))
}

/// The identity of the tokenizer in the namespaces of an engine. A text-only dialect prefixes it, because its
/// token ids come from our own tokenizer.
fn tokenizer_identity(able: &StreamingCapabilities, tokenizer: &Tokenizer) -> String {
    format!("{}{}", able.tokenizer, tokenizer.identity())
}

/// The identity of the tokenizer that an engine of this configuration will have.
///
/// # Errors
/// The configuration is of no third-party engine.
pub(crate) fn expected_tokenizer(
    config: &EngineConfig,
    expected: &ExpectedModel,
) -> Result<String, ApiError> {
    let able = dialect(config, expected)?.capabilities();
    Ok(tokenizer_identity(&able, &expected.tokenizer))
}

/// The wire format of the configured kind of engine.
fn dialect(config: &EngineConfig, expected: &ExpectedModel) -> Result<Arc<dyn Dialect>, ApiError> {
    let model = expected.served_model.clone();
    let tokenizer = expected.tokenizer.clone();
    Ok(match config.kind {
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
    })
}

/// Whether a call may change the weights. SkyRL's names what it does in its body.
fn changes_weights(call: &EngineCall) -> bool {
    call.path.contains("weight") || call.path.starts_with("/collective_rpc")
}

/// The weights that an engine was told to load last.
#[derive(Clone, Debug, Default)]
struct LoadedWeights {
    /// Their directory, after which engines may name their model.
    directory: Option<String>,
    /// Whether the engine has had no others since, and the directory still holds them.
    is_current: bool,
}

impl ThirdPartyEngine {
    /// The engine's present entry for the model, under its name or under the one that new weights gave it.
    async fn present_card(&self) -> Result<ModelCard, ApiError> {
        let health = self.dialect.health();
        let card = model_card(&self.client, health, &self.served_model).await;
        let renamed = match self.dialect.is_renamed_by_weights() {
            true => self.loaded.lock().directory.clone(),
            false => None,
        };
        match (card, renamed) {
            (Err(error), Some(name)) if error.kind == ErrorKind::InvalidRequest => {
                let card = model_card(&self.client, None, &name).await?;
                Ok(card.named_as(&self.card))
            }
            (card, _) => card,
        }
    }

    fn primer(&self) -> Result<PrimerCalls, ApiError> {
        let calls = self.dialect.primer();
        calls.ok_or_else(|| unsupported("this kind of engine has no drafts that can be primed"))
    }

    /// Makes the calls that carry out an order, one after the other.
    async fn make_calls(&self, calls: Vec<OrderCall>) -> Result<(), ApiError> {
        let mut left = VecDeque::from(calls);
        while let Some(call) = left.pop_front() {
            let body = call.body.to_string();
            let made = self.client.call(Method::POST, &call.path, Some(body)).await;
            let (status, answer) = made?;
            if call.is_replaced(status) {
                for other in call.otherwise.into_iter().rev() {
                    left.push_front(other);
                }
            } else {
                call.read(status, &answer)?;
            }
        }
        Ok(())
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
                    let request = introduction.request()?;
                    let fields = dialect.introduction(&request)?;
                    let body = CallBody::new(&fields, dialect.tokens_field(), &request);
                    client.post_json(dialect.path(), body.to_json()?).await
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

    fn url(&self) -> Option<&str> {
        Some(self.client.base_url())
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        // A caller with a timeout may drop this call, which also means that the engine is away.
        let check = self.introductions.begin_check();
        let now = self.present_card().await?;
        if now != self.card {
            let message = format!(
                "the engine now serves another model as {}; restart this worker",
                self.served_model
            );
            return Err(ApiError::new(ErrorKind::Unavailable, message));
        }
        self.introduce(check.engine_is_reachable(clock::unix_s()));
        Ok(())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        if let Some(attached) = &request.attached {
            self.introductions.record_use(request.namespace, attached);
        }
        let fields = self.dialect.body(&request)?;
        let body = CallBody::new(&fields, self.dialect.tokens_field(), &request);
        // Created before the call, so that a caller that gives up during the call aborts it as well.
        let abort = AbortOnDrop::new(&self.client, &self.tasks, &*self.dialect, &request);
        let json = body.to_json()?;
        let response = self.client.post_events(self.dialect.path(), json).await?;
        Ok(ResponseStream::new(response, self.dialect.decoder(&request), abort).boxed())
    }

    fn check_order(&self, order: &EngineOrder) -> Result<(), ApiError> {
        match order {
            EngineOrder::PassOn(call) => {
                check_path(&call.path)?;
                // An engine that takes no orders at all takes no such calls either.
                self.dialect.order_calls(&EngineOrder::Resume).map(drop)
            }
            order => self.dialect.order_calls(order).map(drop),
        }
    }

    async fn order(&self, order: EngineOrder) -> Result<Option<EngineAnswer>, ApiError> {
        self.check_order(&order)?;
        if let EngineOrder::PassOn(call) = order {
            let method = if call.is_post {
                Method::POST
            } else {
                Method::GET
            };
            if call.is_post && changes_weights(&call) {
                self.loaded.lock().is_current = false;
            }
            let body = (!call.body.is_empty()).then_some(call.body);
            let (status, body) = self.client.call(method, &call.path, body).await?;
            let body = String::from_utf8_lossy(&body).into_owned();
            return Ok(Some(EngineAnswer { status, body }));
        }
        let made = self.make_calls(self.dialect.order_calls(&order)?).await;
        let mut loaded = self.loaded.lock();
        match order {
            EngineOrder::LoadWeights { directory, .. } if made.is_ok() => {
                *loaded = LoadedWeights {
                    directory: Some(directory),
                    is_current: true,
                };
            }
            // The files there are others now.
            EngineOrder::LoadWeights { directory, .. } => {
                loaded.is_current &= loaded.directory.as_ref() != Some(&directory);
            }
            // The weights have come by other means.
            EngineOrder::SetVersion { .. } => loaded.is_current = false,
            _ => {}
        }
        drop(loaded);
        made?;
        Ok(None)
    }

    async fn restore_weights(&self) -> RestoredWeights {
        let loaded = self.loaded.lock().clone();
        let current = loaded.directory.filter(|_| loaded.is_current);
        let (directory, restored) = match (current, &self.card.root) {
            (Some(current), _) => (current, RestoredWeights::Earlier),
            (None, Some(root)) => (root.clone(), RestoredWeights::Initial),
            (None, None) => return RestoredWeights::None,
        };
        let Some(call) = self.dialect.restore_call(&directory) else {
            return RestoredWeights::None;
        };
        let mut made = self.make_calls(vec![call.clone()]).await;
        if made
            .as_ref()
            .is_err_and(|error| error.kind != ErrorKind::Timeout)
        {
            // The failed load may have cost the connection.
            made = self.make_calls(vec![call]).await;
        }
        match made {
            Ok(()) => {
                tracing::warn!(
                    weights = ?restored,
                    "an engine whose weights could not be loaded has others again"
                );
                restored
            }
            Err(error) => {
                tracing::error!(
                    kind = ?error.kind,
                    code = error.code,
                    "the engine did not get its earlier weights back, and may fail"
                );
                RestoredWeights::None
            }
        }
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        let Some(series) = self.dialect.load() else {
            return Ok(StreamingLoad::default());
        };
        let page = self.client.get(series.path).await?;
        Ok(series.read(&String::from_utf8_lossy(&page)))
    }

    async fn slots(&self) -> Result<EngineSlots, ApiError> {
        let calls = self.primer()?;
        (calls.read_slots)(&self.client.get(calls.slots_path).await?)
    }

    async fn prime(&self, text: &[TokenId]) -> Result<(), ApiError> {
        let body = (self.primer()?.body)(text).to_string();
        let path = self.dialect.path();
        // A busy engine may take long, and nobody waits for this.
        let (status, answer) = self.client.call(Method::POST, path, Some(body)).await?;
        match status {
            ..300 => Ok(()),
            _ => Err(status_error(status, &answer)),
        }
    }

    fn take_introduction_counts(&self) -> IntroductionCounts {
        self.introductions.take_counts()
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        let Some(series) = self.dialect.load() else {
            let message = "engines of this kind have no known metrics page";
            return Err(ApiError::new(ErrorKind::NotFound, message));
        };
        let page = self.client.get(series.path).await?;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }
}
