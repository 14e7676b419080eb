//! The thread that owns the model, and the handle that others hold.
//!
//! A forward pass keeps a core busy for milliseconds; on an async worker it would stall everything there, so
//! it has an OS thread of its own, fed by a bounded queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{
    CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest, StepResponse,
    TokenizeRequest, TokensBody,
};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::Tokenizer;
use tokio::sync::oneshot;

use crate::config::EngineConfig;
use crate::engine::Core;
use crate::files::ModelFiles;
use crate::metrics::EngineMetrics;
use crate::weights::Model;

/// When a caller whom the full queue refused may try again: a few steps later.
const QUEUE_RETRY_AFTER_MS: u64 = 50;

/// A running engine. Cheap to clone; the thread ends after [`EngineHandle::shutdown`], or when the last handle
/// is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

/// Ends the thread when the last handle goes.
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    load: Mutex<EngineLoad>,
    capabilities: EngineCapabilities,
    tokenizer: Option<Arc<Tokenizer>>,
    steps_max: usize,
    text_max: usize,
    weight_version: u64,
    metrics: EngineMetrics,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    /// Steps among the commands. Closing and aborting are never refused: each waits for its caller, and those
    /// are bounded by the connections.
    steps: usize,
    closed: bool,
}

enum Command {
    Step(StepRequest, oneshot::Sender<Result<StepResponse, ApiError>>),
    Close(CloseRequest, oneshot::Sender<()>),
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
        let name = config.model_name.clone().unwrap_or(files.name);
        EngineHandle::with_model(config, metrics, model, name, tokenizer)
    }

    /// Starts the thread of a loaded model.
    pub(crate) fn with_model(
        config: &EngineConfig,
        metrics: &Metrics,
        model: Arc<Model>,
        name: String,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> anyhow::Result<Self> {
        let core = Core::new(model.clone(), config);
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
            eos_token_ids: model.architecture.eos_token_ids.clone(),
        };
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Condvar::new(),
            load: Mutex::default(),
            capabilities,
            tokenizer,
            steps_max: config.queue_steps,
            text_max: config.text_max,
            weight_version: config.weight_version,
            metrics: EngineMetrics::new(metrics)?,
        });
        shared.publish_load(&core);
        let idle_check = Duration::from_millis(config.session_idle_ms.div_ceil(4).max(10));
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name("engine-model".into())
                .spawn(move || shared.run(core, idle_check))?
        };
        Ok(EngineHandle {
            owner: Arc::new(Owner {
                shared,
                thread: Mutex::new(Some(thread)),
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
        let (sender, receiver) = oneshot::channel();
        let shared = &self.owner.shared;
        {
            let mut queue = lock(&shared.queue);
            queue.check_open()?;
            if queue.steps >= shared.steps_max {
                let error = ApiError::new(
                    ErrorKind::Overloaded,
                    format!("{} steps are waiting already", queue.steps),
                )
                .with_code("engine_queue_full")
                .with_retry_after_ms(QUEUE_RETRY_AFTER_MS);
                shared.metrics.rejected(&error);
                return Err(error);
            }
            queue.steps += 1;
            queue.commands.push_back(Command::Step(request, sender));
        }
        shared.wake.notify_one();
        receiver
            .await
            .unwrap_or_else(|_| Err(ApiError::internal("the model thread ended")))
    }

    /// Ends sessions after the steps that were asked for before.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        self.end(request, false).await
    }

    /// Ends sessions at once and forgets their KV: the step in progress still finishes, those that wait find
    /// the sessions gone.
    ///
    /// # Errors
    /// `Unavailable` after shutdown.
    pub async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        self.end(
            CloseRequest {
                sessions,
                keep_kv: false,
            },
            true,
        )
        .await
    }

    async fn end(&self, request: CloseRequest, first: bool) -> Result<(), ApiError> {
        let (sender, receiver) = oneshot::channel();
        let shared = &self.owner.shared;
        {
            let mut queue = lock(&shared.queue);
            queue.check_open()?;
            let command = Command::Close(request, sender);
            if first {
                queue.commands.push_front(command);
            } else {
                queue.commands.push_back(command);
            }
        }
        shared.wake.notify_one();
        receiver
            .await
            .map_err(|_| ApiError::internal("the model thread ended"))
    }

    /// How busy the engine is.
    pub fn load(&self) -> EngineLoad {
        let shared = &self.owner.shared;
        let steps = lock(&shared.queue).steps;
        EngineLoad {
            steps_waiting: steps as u32,
            ..*lock(&shared.load)
        }
    }

    /// What the engine can do.
    pub fn capabilities(&self) -> EngineCapabilities {
        self.owner.shared.capabilities.clone()
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
        let vocab_size = self.owner.shared.capabilities.vocab_size;
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
        self.owner.shared.tokenizer.clone().ok_or_else(|| {
            ApiError::new(
                ErrorKind::InvalidRequest,
                "this engine's model folder has no tokenizer.json",
            )
            .with_code("no_tokenizer")
        })
    }

    fn check_text(&self, param: &str, len: usize) -> Result<(), ApiError> {
        let most = self.owner.shared.text_max;
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
        lock(&self.shared.queue).closed = true;
        self.shared.wake.notify_all();
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

impl Queue {
    fn check_open(&self) -> Result<(), ApiError> {
        if self.closed {
            return Err(ApiError::new(
                ErrorKind::Unavailable,
                "the engine is shutting down",
            ));
        }
        Ok(())
    }
}

impl Shared {
    /// The model thread.
    fn run(&self, mut core: Core, idle_check: Duration) {
        let mut checked = Instant::now();
        while let Some(command) = self.next(idle_check) {
            match command {
                // Nobody waits for it any more, so nobody has counted on its effect.
                Some(Command::Step(_, reply)) if reply.is_closed() => {}
                Some(Command::Step(request, reply)) => {
                    let answer = self.step(&mut core, request);
                    self.publish_load(&core);
                    // The caller may be gone by now; its sessions expire or are closed by it.
                    let _ = reply.send(answer);
                }
                Some(Command::Close(request, reply)) => {
                    core.close(&request);
                    self.publish_load(&core);
                    let _ = reply.send(());
                }
                None => {}
            }
            if checked.elapsed() >= idle_check {
                checked = Instant::now();
                self.metrics.expired(core.expire(checked));
                self.publish_load(&core);
            }
        }
    }

    /// The next command; `Some(None)` when none came for `wait`, `None` when all is done.
    #[allow(clippy::option_option, reason = "three outcomes, used in one place")]
    fn next(&self, wait: Duration) -> Option<Option<Command>> {
        let queue = lock(&self.queue);
        let (mut queue, _) = self
            .wake
            .wait_timeout_while(queue, wait, |queue| {
                queue.commands.is_empty() && !queue.closed
            })
            .unwrap_or_else(PoisonError::into_inner);
        let command = queue.commands.pop_front();
        if matches!(command, Some(Command::Step(..))) {
            queue.steps -= 1;
        }
        if command.is_none() && queue.closed {
            None
        } else {
            Some(command)
        }
    }

    fn step(&self, core: &mut Core, request: StepRequest) -> Result<StepResponse, ApiError> {
        let started = Instant::now();
        let ids: Vec<EngineSessionId> = request.items.iter().map(|item| item.session).collect();
        // What a panic can leave half changed is thrown away: the batch's sessions here, buffers by the next
        // pass, which sizes them anew.
        let outcome = catch_unwind(AssertUnwindSafe(|| core.step(request, started)));
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(Ok(stepped)) => {
                self.metrics.stepped(&stepped, seconds);
                Ok(StepResponse {
                    results: stepped.results,
                    step_s: seconds,
                    weight_version: self.weight_version,
                })
            }
            Ok(Err(error)) => {
                self.metrics.rejected(&error);
                Err(error)
            }
            Err(_) => {
                self.metrics.panicked();
                tracing::error!(
                    sessions = ids.len(),
                    "step panicked; its sessions are dropped"
                );
                core.close(&CloseRequest {
                    sessions: ids,
                    keep_kv: false,
                });
                Err(ApiError::internal("the step panicked"))
            }
        }
    }

    fn publish_load(&self, core: &Core) {
        let (open, kept) = core.sessions().counts();
        let (kv_tokens, kv_tokens_max) = core.sessions().kv_tokens();
        let load = EngineLoad {
            sessions_open: open as u32,
            sessions_kept: kept as u32,
            kv_tokens,
            kv_tokens_max,
            steps_waiting: lock(&self.queue).steps as u32,
        };
        self.metrics.load(&load);
        *lock(&self.load) = load;
    }
}

/// Nothing that is done under these locks can panic half way, so a poisoned one is as good as new.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what may take milliseconds beside the async workers.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(format!("tokenizer: {error}"))))
}
