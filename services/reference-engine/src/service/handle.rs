//! The handle through which callers use the engine.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_output_grammar::{GrammarCompiler, GrammarLimits};
use refrain_protocol::engine::{
    CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest, StepResponse,
    TokenizeRequest, TokensBody,
};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_service_kit::actors::start_thread;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::Tokenizer;

use super::metrics::EngineMetrics;
use super::model_thread::ModelThread;
use super::pool::{BlockServer, PoolThreads};
use super::weight_loading::WeightLoading;
use crate::config::EngineConfig;
use crate::drafter::{DraftNetwork, backend_network, open_network};
use crate::engine::{EngineCore, LoadedModel};
use crate::llama;
use crate::model::{HEAD_AUTO, HEAD_OFF, Model, ModelFiles};
use crate::pool::KvPool;

/// A handle of a running engine, which is cheap to clone. The engine's thread ends after [`EngineHandle::shutdown`],
/// or when the last handle is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) shared: Arc<SharedEngine>,
}

/// State that all handles share. Dropping it ends the thread.
pub(super) struct SharedEngine {
    pub(super) model_thread: Arc<ModelThread>,
    /// Loads new weights, where this crate computes the model. Those of a backend stay as they are.
    pub(super) loading: Option<WeightLoading>,
    join_handle: Mutex<Option<JoinHandle<()>>>,
    capabilities: EngineCapabilities,
    tokenizer: Option<Arc<Tokenizer>>,
    grammars: Option<Arc<GrammarCompiler>>,
    text_max: usize,
    block_server: Option<BlockServer>,
    pool_threads: Mutex<Option<PoolThreads>>,
}

impl EngineHandle {
    /// Loads the model and starts its thread.
    ///
    /// # Errors
    /// Fails if the model cannot be loaded, the metrics are already registered, or no thread can be started.
    pub fn start(config: &EngineConfig, metrics: &Metrics) -> anyhow::Result<Self> {
        EngineHandle::start_among(config, metrics, Vec::new())
    }

    /// As [`EngineHandle::start`], with clients of the other engines that are asked for KV blocks.
    ///
    /// # Errors
    /// As [`EngineHandle::start`].
    pub(super) fn start_among(
        config: &EngineConfig,
        metrics: &Metrics,
        peers: Vec<MeshClient>,
    ) -> anyhow::Result<Self> {
        let draft_model = config.draft_model.as_ref();
        let draft_model = draft_model.map(|source| llama::load(source, config));
        let draft_model = draft_model.transpose()?.flatten();
        let mut config = config.clone();
        if let Some(drafter) = &draft_model {
            config.max_sessions = config.max_sessions.min(drafter.sessions_max);
        }
        let (model, name, tokenizer) = match llama::load(&config.model, &config)? {
            Some(model) => {
                anyhow::ensure!(
                    [HEAD_AUTO, HEAD_OFF].contains(&config.eagle3.as_str()),
                    "engine.eagle3: a head cannot read the states of {}; leave it out",
                    config.model
                );
                anyhow::ensure!(
                    config.kv_pool.memory_bytes_max == 0,
                    "engine.kv_pool: {} has keys and values of its own; leave this section out",
                    config.model
                );
                config.max_sessions = config.max_sessions.min(model.sessions_max);
                let (name, tokenizer) = (model.name.clone(), model.files.tokenizer()?);
                (LoadedModel::Backend(Box::new(model)), name, Some(tokenizer))
            }
            None => {
                let files = ModelFiles::open(&config.model)?;
                let tokenizer = files.tokenizer()?;
                let started = Instant::now();
                let model = Arc::new(Model::load(&files, config.weights)?);
                tracing::info!(
                    model = config.model,
                    weight_bytes = model.weight_bytes(),
                    seconds = started.elapsed().as_secs_f64(),
                    "model loaded"
                );
                (LoadedModel::Own(model), files.name, tokenizer)
            }
        };
        let network = match draft_model {
            Some(drafter) => Some(backend_network(
                &config,
                drafter,
                model.vocab_size(),
                tokenizer.as_ref(),
            )?),
            None => {
                let own = model.own().map(Arc::as_ref);
                open_network(&config, own, model.vocab_size(), tokenizer.as_ref())?
            }
        };
        let name = config.model_name.clone().unwrap_or(name);
        let tokenizer = tokenizer.map(Arc::new);
        EngineHandle::with_model(&config, metrics, model, network, name, tokenizer, peers)
    }

    /// Starts the thread of a loaded model and of the network that drafts for it, if there is one.
    pub(crate) fn with_model(
        config: &EngineConfig,
        metrics: &Metrics,
        model: impl Into<LoadedModel>,
        network: Option<Box<dyn DraftNetwork>>,
        name: String,
        tokenizer: Option<Arc<Tokenizer>>,
        peers: Vec<MeshClient>,
    ) -> anyhow::Result<Self> {
        let model = model.into();
        let limits = config.form_limits();
        let grammars = grammar_compiler(&model, tokenizer.as_ref(), limits);
        let opened = KvPool::open(&config.kv_pool, model.kv_shape())?;
        let (pool, queues) = opened
            .map(|(pool, queues)| (Arc::new(pool), queues))
            .unzip();
        let eos_token_ids = model.eos_token_ids().to_vec();
        let identity = tokenizer.as_ref().map(|tokenizer| tokenizer.identity());
        let own = model.own();
        let loading = own.map(|model| WeightLoading::new(model, config.weights, identity));
        let core = EngineCore::new(model, network, config)
            .with_grammars(grammars.clone())
            .with_leaving_forms()
            .with_pool(pool.clone(), config.weight_version);
        let limits = core.limits();
        let capabilities = EngineCapabilities {
            model: name,
            tokenizer: tokenizer
                .as_ref()
                .map_or_else(String::new, |tokenizer| tokenizer.identity().to_owned()),
            vocab_size: limits.vocab_size,
            max_context: limits.max_context,
            max_batch: limits.max_batch,
            max_step_tokens: limits.max_step_tokens,
            max_sessions: config.max_sessions,
            tree_drafts: true,
            max_draft_tokens: limits.max_draft_tokens,
            drafter: limits.drafter,
            eos_token_ids,
            output_forms: grammars.is_some(),
            reads_ahead: pool.is_some(),
            token_bodies: true,
        };
        let model_thread = Arc::new(ModelThread::new(
            config.queue_steps,
            config.weight_version,
            EngineMetrics::new(
                metrics,
                limits.drafter.map(|drafter| drafter.kind),
                pool.clone(),
            )?,
        ));
        let pool_threads = match (&pool, queues) {
            (Some(pool), Some(queues)) => Some(PoolThreads::start(pool, queues, peers)?),
            _ => None,
        };
        model_thread.publish_load(&core);
        model_thread.publish_version();
        let expiry_ms = config.session_idle_ms.min(config.session_parked_ms);
        let idle_check = Duration::from_millis(expiry_ms.div_ceil(4).max(10));
        let join_handle = {
            let model_thread = model_thread.clone();
            let mut core = core;
            start_thread("engine-model", move || {
                model_thread.run(&mut core, idle_check);
            })?
        };
        Ok(EngineHandle {
            shared: Arc::new(SharedEngine {
                model_thread,
                loading,
                join_handle: Mutex::new(Some(join_handle)),
                capabilities,
                tokenizer,
                grammars,
                text_max: config.text_max,
                block_server: pool.map(BlockServer::new),
                pool_threads: Mutex::new(pool_threads),
            }),
        })
    }

    /// Runs one batch, and returns its results in the order of the items. The fault of a single item is in its
    /// result. A new session whose form is not compiled yet is refused with the code `engine_form_compiling`: it
    /// joins a later step.
    ///
    /// # Errors
    /// `InvalidRequest` for a batch that breaks a limit, `Overloaded` when too many steps wait, and `Unavailable`
    /// after shutdown. `Internal` after a panic, which loses the sessions of the batch.
    pub async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        self.shared.model_thread.step(request).await
    }

    /// Reports the KV cache after all steps that were requested before: its use, what it holds, and the measured
    /// price of reading a context.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn kv_report(&self) -> Result<KvReport, ApiError> {
        self.shared.model_thread.kv_report().await
    }

    /// Closes or parks sessions after all steps that were requested before.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        self.shared.model_thread.close(request).await
    }

    /// Closes sessions at once, and drops their KV. The step in progress still finishes. Waiting steps find the
    /// sessions closed.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        self.shared.model_thread.abort(sessions).await
    }

    /// Returns the engine's load.
    pub(crate) fn load(&self) -> EngineLoad {
        self.shared.model_thread.load()
    }

    /// Returns the loads that the model thread publishes.
    #[cfg(test)]
    pub(crate) fn watch_load(&self) -> tokio::sync::watch::Receiver<EngineLoad> {
        self.shared.model_thread.watch_load()
    }

    /// Returns the engine's capabilities and limits.
    pub fn capabilities(&self) -> EngineCapabilities {
        self.shared.capabilities.clone()
    }

    /// Compiles the forms of outputs, if the model has a tokenizer.
    pub fn grammars(&self) -> Option<Arc<GrammarCompiler>> {
        self.shared.grammars.clone()
    }

    /// Converts text to tokens. Special tokens written in the text are not recognised.
    ///
    /// # Errors
    /// `InvalidRequest` for a model without a tokenizer or a text that it cannot encode, and `TooLarge` for a longer
    /// text than `text_max` bytes.
    pub(crate) async fn tokenize(&self, request: TokenizeRequest) -> Result<TokensBody, ApiError> {
        let tokenizer = self.tokenizer()?;
        self.check_text("text", "bytes", request.text.len())?;
        off_thread(move || {
            tokenizer
                .encode(&request.text)
                .map(|tokens| TokensBody { tokens })
                .map_err(|error| ApiError::invalid("text", error.to_string()))
        })
        .await
    }

    /// Converts tokens to text, with U+FFFD for bytes that are not UTF-8.
    ///
    /// # Errors
    /// `InvalidRequest` for a model without a tokenizer or an id outside the vocabulary, and `TooLarge` for more than
    /// `text_max` tokens.
    pub(crate) async fn detokenize(
        &self,
        request: TokensBody,
    ) -> Result<DetokenizeResponse, ApiError> {
        let tokenizer = self.tokenizer()?;
        self.check_text("tokens", "tokens", request.tokens.len())?;
        let vocab_size = self.shared.capabilities.vocab_size;
        if let Some(token) = request.tokens.iter().find(|token| **token >= vocab_size) {
            let message =
                format!("token {token} is outside the vocabulary; ids must be below {vocab_size}");
            return Err(ApiError::invalid("tokens", message));
        }
        off_thread(move || {
            Ok(DetokenizeResponse {
                text: tokenizer.decode(&request.tokens),
            })
        })
        .await
    }

    /// Checks that the model thread accepts work.
    ///
    /// # Errors
    /// The reason why it does not.
    pub fn ready(&self) -> Result<(), String> {
        match &*self.shared.join_handle.lock() {
            Some(thread) if !thread.is_finished() => Ok(()),
            _ => Err("the model thread has ended".into()),
        }
    }

    /// Refuses new work, finishes the waiting work, and waits for the thread to end.
    pub fn shutdown(&self) {
        self.shared.stop();
    }

    /// Answers other engines that ask for KV blocks, if there is a pool.
    pub(super) fn block_server(&self) -> Option<&BlockServer> {
        self.shared.block_server.as_ref()
    }

    fn tokenizer(&self) -> Result<Arc<Tokenizer>, ApiError> {
        self.shared.tokenizer.clone().ok_or_else(|| {
            ApiError::new(
                ErrorKind::InvalidRequest,
                "this engine's model has no tokenizer.json; send token ids",
            )
            .with_code("no_tokenizer")
        })
    }

    fn check_text(&self, param: &str, unit: &str, len: usize) -> Result<(), ApiError> {
        let most = self.shared.text_max;
        if len <= most {
            return Ok(());
        }
        let mut error = ApiError::new(
            ErrorKind::TooLarge,
            format!("{param} has {len} {unit}; at most {most} are allowed"),
        );
        error.param = Some(param.to_owned());
        Err(error)
    }
}

impl SharedEngine {
    fn stop(&self) {
        self.model_thread.end();
        let thread = self.join_handle.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        let pool_threads = self.pool_threads.lock().take();
        if let Some(mut threads) = pool_threads {
            threads.end();
        }
    }
}

impl Drop for SharedEngine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A compiler for the forms of a model's outputs, if the model has a tokenizer and an end token.
fn grammar_compiler(
    model: &LoadedModel,
    tokenizer: Option<&Arc<Tokenizer>>,
    limits: GrammarLimits,
) -> Option<Arc<GrammarCompiler>> {
    let (vocab_size, eos) = (model.vocab_size(), model.eos_token_ids());
    match GrammarCompiler::new(tokenizer?.clone(), vocab_size, eos, limits) {
        Ok(compiler) => Some(Arc::new(compiler)),
        Err(error) => {
            tracing::warn!(%error, "requests with a form of their output are refused");
            None
        }
    }
}

/// Runs work of several milliseconds on a thread of its own, so that it does not block the async workers.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(format!("tokenizer: {error}"))))
}
