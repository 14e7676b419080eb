//! The engine as its callers see it.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{
    CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest, StepResponse,
    TokenizeRequest, TokensBody,
};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::Tokenizer;

use crate::ModelError;
use crate::batcher::{Batcher, lock};
use crate::config::EngineConfig;
use crate::draft_model::{self, DraftModel};
use crate::drafter::Network;
use crate::eagle3::{Head, HeadNetwork};
use crate::engine::Core;
use crate::files::{HeadFiles, ModelFiles};
use crate::metrics::EngineMetrics;
use crate::weights::Model;

/// A running engine. Cheap to clone; the thread ends after [`EngineHandle::shutdown`], or when the last handle
/// is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

/// Ends the thread when the last handle goes.
struct Owner {
    batcher: Arc<Batcher>,
    thread: Mutex<Option<JoinHandle<()>>>,
    capabilities: EngineCapabilities,
    tokenizer: Option<Arc<Tokenizer>>,
    text_max: usize,
}

impl EngineHandle {
    /// Loads the model and starts its thread.
    ///
    /// # Errors
    /// A model that cannot be loaded, metrics that are registered already, or no thread.
    pub fn start(config: &EngineConfig, metrics: &Metrics) -> anyhow::Result<Self> {
        let files = ModelFiles::open(&config.model)?;
        let tokenizer = match &files.tokenization {
            Some(tokenization) => Some(Arc::new(tokenization.tokenizer()?)),
            None => None,
        };
        let started = Instant::now();
        let model = Arc::new(Model::load(&files, config.weights)?);
        tracing::info!(
            model = config.model,
            weight_bytes = model.weight_bytes(),
            seconds = started.elapsed().as_secs_f64(),
            "model loaded"
        );
        let network = open_network(config, &model, tokenizer.as_deref())?;
        let name = config.model_name.clone().unwrap_or(files.name);
        EngineHandle::with_model(config, metrics, model, network, name, tokenizer)
    }

    /// Starts the thread of a loaded model and of what drafts for it, if anything does.
    pub(crate) fn with_model(
        config: &EngineConfig,
        metrics: &Metrics,
        model: Arc<Model>,
        network: Option<Box<dyn Network>>,
        name: String,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> anyhow::Result<Self> {
        let core = Core::new(model.clone(), network, config);
        let limits = core.limits();
        let capabilities = EngineCapabilities {
            model: name,
            tokenizer: tokenizer
                .as_ref()
                .map(|tokenizer| tokenizer.identity().to_owned())
                .unwrap_or_default(),
            vocab_size: limits.vocab_size,
            max_context: limits.max_context,
            max_batch: limits.max_batch,
            max_step_tokens: limits.max_step_tokens,
            max_sessions: config.max_sessions,
            tree_drafts: true,
            max_draft_tokens: limits.max_draft_tokens,
            drafter: limits.drafter,
            eos_token_ids: model.architecture.eos_token_ids.clone(),
        };
        let batcher = Arc::new(Batcher::new(
            config.queue_steps,
            config.weight_version,
            EngineMetrics::new(metrics, limits.drafter.map(|drafter| drafter.kind))?,
        ));
        batcher.publish_load(&core);
        let idle_check = Duration::from_millis(config.session_idle_ms.div_ceil(4).max(10));
        let thread = {
            let batcher = batcher.clone();
            std::thread::Builder::new()
                .name("engine-model".into())
                .spawn(move || batcher.run(core, idle_check))?
        };
        Ok(EngineHandle {
            owner: Arc::new(Owner {
                batcher,
                thread: Mutex::new(Some(thread)),
                capabilities,
                tokenizer,
                text_max: config.text_max,
            }),
        })
    }

    /// Runs one batch. Results are in the order of the items.
    ///
    /// # Errors
    /// `InvalidRequest` for a batch over a limit, `Overloaded` when too many steps wait, `Unavailable` after
    /// shutdown, `Internal` after a panic (the batch's sessions are gone then). What is wrong with one item
    /// is in its result.
    pub async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        self.owner
            .batcher
            .step(request)?
            .await
            .unwrap_or_else(|_| Err(thread_ended()))
    }

    /// Ends sessions after the steps that were asked for before.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        self.owner
            .batcher
            .close(request)?
            .await
            .map_err(|_| thread_ended())
    }

    /// Ends sessions at once and forgets their KV: the step in progress still finishes, those that wait find
    /// the sessions gone.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        self.owner
            .batcher
            .abort(sessions)?
            .await
            .map_err(|_| thread_ended())
    }

    /// How busy the engine is.
    pub fn load(&self) -> EngineLoad {
        self.owner.batcher.load()
    }

    /// What the engine can do.
    pub fn capabilities(&self) -> EngineCapabilities {
        self.owner.capabilities.clone()
    }

    /// Text to tokens. Special tokens written in it are not recognised.
    ///
    /// # Errors
    /// `InvalidRequest` for a model without tokenizer or a text it cannot spell, `TooLarge` past `text_max`.
    pub async fn tokenize(&self, request: TokenizeRequest) -> Result<TokensBody, ApiError> {
        let tokenizer = self.tokenizer()?;
        self.check_text("text", request.text.len())?;
        off_thread(move || {
            tokenizer
                .encode(&request.text)
                .map(|tokens| TokensBody { tokens })
                .map_err(|error| ApiError::invalid("text", error.to_string()))
        })
        .await
    }

    /// Tokens to text, with U+FFFD where bytes are not UTF-8.
    ///
    /// # Errors
    /// `InvalidRequest` for a model without tokenizer or an id outside the vocabulary, `TooLarge` past
    /// `text_max` tokens.
    pub async fn detokenize(&self, request: TokensBody) -> Result<DetokenizeResponse, ApiError> {
        let tokenizer = self.tokenizer()?;
        self.check_text("tokens", request.tokens.len())?;
        let vocab_size = self.owner.capabilities.vocab_size;
        if let Some(token) = request.tokens.iter().find(|token| **token >= vocab_size) {
            let message = format!("token {token} is not below the vocabulary's size {vocab_size}");
            return Err(ApiError::invalid("tokens", message));
        }
        off_thread(move || {
            Ok(DetokenizeResponse {
                text: tokenizer.decode(&request.tokens),
            })
        })
        .await
    }

    /// Whether the model thread takes work.
    ///
    /// # Errors
    /// Why not.
    pub fn ready(&self) -> Result<(), String> {
        let alive = lock(&self.owner.thread)
            .as_ref()
            .is_some_and(|thread| !thread.is_finished());
        if alive {
            Ok(())
        } else {
            Err("the model thread has ended".into())
        }
    }

    /// Takes no more work, finishes what waits, and waits for the thread to end.
    pub fn shutdown(&self) {
        self.owner.stop();
    }

    fn tokenizer(&self) -> Result<Arc<Tokenizer>, ApiError> {
        self.owner.tokenizer.clone().ok_or_else(|| {
            ApiError::new(
                ErrorKind::InvalidRequest,
                "this engine's model folder has no tokenizer.json",
            )
            .with_code("no_tokenizer")
        })
    }

    fn check_text(&self, param: &str, len: usize) -> Result<(), ApiError> {
        let most = self.owner.text_max;
        if len <= most {
            return Ok(());
        }
        let mut error = ApiError::new(
            ErrorKind::TooLarge,
            format!("{param} has {len} elements; at most {most}"),
        );
        error.param = Some(param.to_owned());
        Err(error)
    }
}

impl Owner {
    fn stop(&self) {
        self.batcher.end();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("model thread ended by a panic");
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What drafts for `model`, by the configuration.
fn open_network(
    config: &EngineConfig,
    model: &Model,
    tokenizer: Option<&Tokenizer>,
) -> Result<Option<Box<dyn Network>>, ModelError> {
    if let Some(source) = &config.draft_model {
        let draft_model = draft_model::load(source, model, tokenizer, config.weights)?;
        let network = DraftModel::new(draft_model, config.threads);
        let weight_bytes = network.weight_bytes();
        tracing::info!(draft_model = source, weight_bytes, "draft model loaded");
        return Ok(Some(Box::new(network)));
    }
    let Some(files) = HeadFiles::open(&config.eagle3, &config.model)? else {
        return Ok(None);
    };
    let head = Head::load(&files, model, config.weights)?;
    tracing::info!(
        eagle3 = config.eagle3,
        weight_bytes = head.weight_bytes(),
        draft_vocab = head.tokens.len(),
        "eagle3 head loaded"
    );
    let network = HeadNetwork::new(Arc::new(head), config.threads);
    Ok(Some(Box::new(network)))
}

/// Runs what may take milliseconds beside the async workers.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(format!("tokenizer: {error}"))))
}

fn thread_ended() -> ApiError {
    ApiError::internal("the model thread ended")
}
