//! The worker for callers in this process: it checks chunks, admits them, and passes them to the driver.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_draft_replica::{DraftReplica, Uploader};
use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::engine::EngineCapabilities;
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::error::code;
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, TenantId};
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::clock;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::mesh::MeshAuth;
use refrain_suffix_index::IndexConfig;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::ordered_drain::OrderedDrain;
use crate::chunk::{ActiveChunk, Admission, Command, Reader, Watch};
use crate::engine::{WorkerEngine, cannot_forget, engine_words, unsupported_field};
use crate::metrics::{ContextOrigin, RejectionLimit};
use crate::routing::{DraftSettings, HeadReports};
use crate::running::{ActiveRequest, HeadUse, RunningForm, Sources, drafts_from_indexes};
use crate::shared::Shared;
use crate::streaming::StreamContext;

/// Longest text that is indexed on the thread that received it, tokens: a few milliseconds.
const INDEXED_HERE_TOKENS_MAX: usize = 4_096;

/// A form whose tokens take longer brings no drafts: all requests of the batch would wait for them.
const FORM_TIME_MAX: Duration = Duration::from_millis(2);

/// How long a chunk waits for its form to be compiled. It holds a slot meanwhile, and a form only brings drafts.
const FORM_WAIT_MAX: Duration = Duration::from_millis(250);

/// The worker for callers in this process. Cheap to clone.
#[derive(Clone)]
pub struct WorkerHandle {
    pub(crate) parts: Arc<WorkerParts>,
}

/// The parts of a worker that its handle, its listener and its heartbeats share.
pub(crate) struct WorkerParts {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) admission: Arc<Admission>,
    /// The copy of the drafts; `None` where the worker does not draft.
    pub(crate) replica: Option<DraftReplica>,
    pub(crate) uploader: Uploader,
    pub(crate) auth: MeshAuth,
    pub(crate) drain: Drain,
    pub(crate) ordered_drain: OrderedDrain,
    pub(crate) engine: WorkerEngine,
    /// The chunks of an engine that generates by itself.
    pub(crate) streams: Option<Arc<StreamContext>>,
    /// `None` where the engine generates by itself.
    pub(crate) draft_settings: Option<Arc<DraftSettings>>,
    pub(crate) reports: Arc<HeadReports>,
    pub(crate) shared: Arc<Shared>,
}

impl WorkerHandle {
    /// Whether the worker can take new chunks: it does not drain, its engine answered last time, and its clock is
    /// right.
    pub fn readiness(&self) -> Result<(), String> {
        if self.parts.drain.is_draining() {
            Err("draining".into())
        } else if self.parts.ordered_drain.is_ordered() {
            Err("drained by an operator".into())
        } else if self.parts.commands.is_closed() {
            Err("the decode loop has stopped".into())
        } else if !self.parts.shared.engine_ready.load(Ordering::Relaxed) {
            let is_configured = !self.parts.shared.config.adoption.is_on();
            let engine = engine_words(self.parts.engine.url(), is_configured);
            Err(format!("{engine} does not answer"))
        } else {
            // A worker whose clock is off refuses the signatures of gateways.
            self.parts.auth.clocks().readiness()
        }
    }

    /// Whether the engine answered last time, and its driver runs.
    pub(crate) fn is_working(&self) -> bool {
        let is_ready = self.parts.shared.engine_ready.load(Ordering::Relaxed);
        is_ready && !self.parts.commands.is_closed()
    }

    /// The chunks that run.
    pub(crate) fn running(&self) -> u32 {
        self.parts.shared.orders.engine_state().running
    }

    /// The version of the weights, as far as it is known.
    pub(crate) fn weight_version(&self) -> u64 {
        self.parts.shared.orders.weight_version()
    }

    /// Checks that the worker can serve a request.
    fn check(&self, request: &ChunkRequest) -> Result<(), ApiError> {
        let served = self.parts.engine.served();
        let namespace = &request.namespace.namespace;
        if namespace.model != served.model || namespace.tokenizer != served.tokenizer {
            return Err(ApiError::new(
                ErrorKind::NotFound,
                format!("this worker serves the model {}", served.model),
            )
            .with_code(code::MODEL_NOT_FOUND));
        }
        let context_len = request.context_len();
        if context_len == 0 {
            return Err(ApiError::invalid("tokens", "must hold at least one token"));
        }
        if request.resumes.is_some() && !request.tokens.is_empty() {
            return Err(ApiError::invalid(
                "tokens",
                "must be empty where a parked context is named",
            ));
        }
        if request.prompt_len as usize > context_len {
            return Err(ApiError::invalid(
                "prompt_len",
                "must not exceed the number of tokens",
            ));
        }
        if request.prediction.len() as u64 > u64::from(served.limits.max_context) {
            return Err(ApiError::invalid(
                "prediction",
                "must not be longer than the model's context",
            ));
        }
        if request.max_new_tokens == 0 {
            return Err(ApiError::invalid("max_new_tokens", "must be at least 1"));
        }
        if context_len as u64 >= u64::from(served.limits.max_context) {
            return Err(ApiError::invalid(
                "tokens",
                format!(
                    "{context_len} context tokens leave no room in the model's context of {}",
                    served.limits.max_context
                ),
            )
            .with_code(code::CONTEXT_LENGTH_EXCEEDED));
        }
        match &self.parts.engine {
            // The engine checks the sampling parameters itself, except one that it does not know.
            WorkerEngine::Verifying(engine) => check_form(request, engine.capabilities()),
            WorkerEngine::Streaming(engine) => engine.capabilities().check(&request.sampling),
        }
    }
}

impl WorkerParts {
    /// Begins a chunk with the context that its request brings.
    async fn begin(
        self: &Arc<Self>,
        namespace: NamespaceId,
        request: ChunkRequest,
    ) -> Result<ActiveRequest, ApiError> {
        let metrics = &self.shared.metrics;
        metrics.context(ContextOrigin::Sent, request.tokens.len());
        // Indexing takes up to a microsecond per token, so it is done here and not in the loop that all requests
        // share. This thread relays the tokens of all running chunks, so a long text has a thread of its own.
        let (request, mut sources) = if request.tokens.len() > INDEXED_HERE_TOKENS_MAX {
            let parts = self.clone();
            tokio::task::spawn_blocking(move || parts.with_sources(namespace, request))
                .await
                .map_err(ApiError::internal)??
        } else {
            self.with_sources(namespace, request)?
        };
        if let Some(sources) = &mut sources {
            sources.form = self.form_of(namespace, &request).await;
        }
        let settings = self.draft_settings.as_ref();
        let head = settings.map_or_else(HeadUse::default, |settings| {
            settings.head_use(request.speculation)
        });
        ActiveRequest::new(
            request,
            namespace,
            sources,
            self.engine.served().limits,
            head,
            clock::unix_ms(),
            Instant::now(),
        )
    }

    /// Collects the sources that a new request may draft from, and indexes its text. There are none where the worker
    /// does not draft.
    fn with_sources(
        &self,
        namespace: NamespaceId,
        mut request: ChunkRequest,
    ) -> Result<(ChunkRequest, Option<Sources>), ApiError> {
        let Some(replica) = &self.replica else {
            return Ok((request, None));
        };
        let drafts = replica.namespace(namespace, &request.namespace);
        let group = request.group.as_deref().and_then(|group| {
            let document = request.request.into();
            replica.join_group(namespace, group, document)
        });
        let index = IndexConfig {
            pattern_tokens_max: self.shared.config.speculation.match_tokens_max,
            ..IndexConfig::default()
        };
        let sources = Sources::new(&mut request, drafts, group, index)?;
        Ok((request, Some(sources)))
    }

    /// The form of a request's output, where drafts can come from it in time. A form that cannot be compiled is the
    /// engine's to refuse.
    async fn form_of(&self, namespace: NamespaceId, request: &ChunkRequest) -> Option<RunningForm> {
        let form = request.sampling.form.as_deref()?;
        let WorkerEngine::Verifying(engine) = &self.engine else {
            return None;
        };
        let is_wanted = self.shared.config.speculation.grammar
            && drafts_from_indexes(request.speculation)
            && request.sampling.forced_output.is_empty();
        let grammars = engine.grammars().filter(|_| is_wanted)?;
        // Compiling takes milliseconds where the form is new, on a thread of the compiler. It takes longer where the
        // form is a costly one, or other forms wait as well. Then the request goes on without its drafts.
        let (sender, compiled) = oneshot::channel();
        let tenant = TenantId::of(&request.namespace.namespace.tenant);
        grammars.start(tenant, namespace, form, move |outcome| {
            let _ = sender.send(outcome);
        });
        let compiled = tokio::time::timeout(FORM_WAIT_MAX, compiled).await.ok()?;
        let grammar = compiled.ok()?.ok()?;
        if grammar.token_time() > FORM_TIME_MAX {
            return None;
        }
        let matcher = grammar.matcher();
        Some(RunningForm::new(
            matcher.with_stops(&request.sampling.stop_token_ids),
        ))
    }
}

#[async_trait]
impl Worker for WorkerHandle {
    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError> {
        let parts = &self.parts;
        let (config, metrics) = (&parts.shared.config, &parts.shared.metrics);
        let time_left = request.budget.time_left_ms.map(Duration::from_millis);
        let namespace_id = parts.auth.verify(&request.namespace)?;
        self.check(&request)?;
        let drain = parts.drain.enter();
        let drain = drain.filter(|_| !parts.ordered_drain.is_ordered());
        let drain = drain.ok_or_else(|| {
            metrics.reject(RejectionLimit::Draining);
            ApiError::new(ErrorKind::Unavailable, "this worker is draining")
                .with_code(code::DRAINING)
        })?;
        // Taken before the epoch is noted: a gateway that has to send everything does so under the same lease.
        let parking = &parts.shared.parking;
        let taken = request
            .resumes
            .as_ref()
            .map(|parked| parking.take(request.request, namespace_id, parked))
            .transpose()?;
        let slot_wait = Duration::from_millis(config.slot_wait_ms);
        let permit = parts
            .admission
            .admit(
                request.lease,
                request.request,
                request.epoch,
                slot_wait,
                drain,
            )
            .await
            .inspect_err(|error| {
                metrics.reject(match error.kind {
                    ErrorKind::Overloaded => RejectionLimit::RunningMax,
                    _ => RejectionLimit::Epoch,
                });
            })?;
        if taken.is_none() {
            parking.forget(request.request);
        }
        let (events, receiver) = mpsc::channel(config.event_queue);
        let span = tracing::info_span!(
            "chunk",
            worker = config.id,
            context_tokens = request.context_len(),
            speculation = ?request.speculation,
        );
        let running = match taken {
            Some(taken) => {
                metrics.context(ContextOrigin::Parked, request.context_len());
                let running = taken.resume(request, Instant::now());
                running.ok_or_else(|| ApiError::internal("a parked request was taken twice"))?
            }
            None => parts.begin(namespace_id, request).await?,
        };
        let ticket = parts.shared.orders.enter(!running.text.output().is_empty());
        let chunk = ActiveChunk {
            running,
            watch: Watch::new(Reader::new(events), ticket, time_left),
            permit,
            span,
        };
        match &parts.streams {
            Some(_) if parts.commands.is_closed() => return Err(stopped()),
            Some(streams) => streams.start(chunk),
            None => {
                let start = Command::Start(Box::new(chunk));
                parts.commands.send(start).await.map_err(|_| stopped())?;
            }
        }
        Ok(ReceiverStream::new(receiver).boxed())
    }

    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError> {
        let (done, is_done) = oneshot::channel();
        self.parts
            .commands
            .send(Command::Cut(cut, done))
            .await
            .map_err(|_| stopped())?;
        is_done.await.map_err(|_| stopped())
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        self.parts.order(order).await
    }

    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        match &self.parts.engine {
            WorkerEngine::Verifying(engine) => engine.forget_tenant(order).await,
            WorkerEngine::Streaming(_) => Err(cannot_forget()),
        }
    }

    async fn drain(&self, order: WorkerDrain) -> Result<(), ApiError> {
        let WorkerParts {
            ordered_drain,
            commands,
            shared,
            ..
        } = &*self.parts;
        let grace = Duration::from_millis(shared.config.evacuate_after_ms);
        ordered_drain.take(order, grace, commands);
        Ok(())
    }
}

/// Checks that an engine holds outputs to forms. One that does not know of them would answer freely.
fn check_form(request: &ChunkRequest, able: &EngineCapabilities) -> Result<(), ApiError> {
    if request.sampling.form.is_none() || able.output_forms {
        return Ok(());
    }
    let message = format!(
        "the engine behind {} does not hold outputs to a form; leave it out",
        able.model
    );
    Err(unsupported_field("sampling.form", message))
}

/// The error of a call to a worker whose driver has stopped.
fn stopped() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "this worker has stopped")
}
