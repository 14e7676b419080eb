//! The worker for its callers: what a chunk is checked against, and its way to the loop that decodes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_draft_replica::{Harvest, Memory};
use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, NamespaceId};
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::clock;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::mesh::MeshAuth;
use refrain_suffix_index::IndexConfig;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use crate::config::WorkerConfig;
use crate::decode::{Command, Slot, Start};
use crate::engine::WorkerEngine;
use crate::fallback::Reports;
use crate::metrics::WorkerMetrics;
use crate::router::Router;
use crate::running::{Running, Sources};
use crate::slots::Slots;

/// The worker for callers in this process. Cheap to clone.
#[derive(Clone)]
pub struct WorkerHandle {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) slots: Arc<Slots>,
    /// What the worker drafts from, where it drafts.
    pub(crate) memory: Option<Memory>,
    pub(crate) harvest: Harvest,
    pub(crate) auth: MeshAuth,
    pub(crate) drain: Drain,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) engine: WorkerEngine,
    pub(crate) engine_ready: Arc<AtomicBool>,
    /// Where the worker drafts.
    pub(crate) router: Option<Arc<Router>>,
    pub(crate) reports: Arc<Reports>,
    pub(crate) config: WorkerConfig,
}

impl WorkerHandle {
    /// Whether the engine answered last time, and the clock is right.
    pub fn readiness(&self) -> Result<(), String> {
        if self.inner.drain.is_draining() {
            Err("draining".into())
        } else if self.inner.commands.is_closed() {
            Err("the decode loop has stopped".into())
        } else if !self.inner.engine_ready.load(Ordering::Relaxed) {
            Err("the engine does not answer".into())
        } else {
            // Such a worker refuses what gateways sign, so it takes nothing new.
            self.inner.auth.clocks().readiness()
        }
    }

    fn check(&self, request: &ChunkRequest) -> Result<(), ApiError> {
        let served = self.inner.engine.served();
        let namespace = &request.namespace.namespace;
        if namespace.model != served.model || namespace.tokenizer != served.tokenizer {
            return Err(ApiError::new(
                ErrorKind::NotFound,
                format!("this worker serves the model {}", served.model),
            )
            .with_code(code::MODEL_NOT_FOUND));
        }
        if request.tokens.is_empty() {
            return Err(ApiError::invalid(
                "tokens",
                "a chunk needs at least one context token",
            ));
        }
        if request.prompt_len as usize > request.tokens.len() {
            return Err(ApiError::invalid(
                "prompt_len",
                "prompt_len is past the end of tokens",
            ));
        }
        if request.prediction.len() as u64 > u64::from(served.max_context) {
            return Err(ApiError::invalid(
                "prediction",
                "a prediction is no longer than the model's context",
            ));
        }
        if request.max_new_tokens == 0 {
            return Err(ApiError::invalid(
                "max_new_tokens",
                "a chunk emits at least one token",
            ));
        }
        if request.tokens.len() as u64 >= u64::from(served.max_context) {
            return Err(ApiError::invalid(
                "tokens",
                format!(
                    "{} context tokens leave no room in the model's context of {}",
                    request.tokens.len(),
                    served.max_context
                ),
            )
            .with_code(code::CONTEXT_LENGTH_EXCEEDED));
        }
        match &self.inner.engine {
            // It checks by itself, before it samples.
            WorkerEngine::Verifying(_) => Ok(()),
            WorkerEngine::Streaming(engine) => engine.capabilities().check(&request.sampling),
        }
    }
}

impl Inner {
    /// What a request that begins may draft from.
    fn sources(
        &self,
        memory: &Memory,
        namespace: NamespaceId,
        request: &mut ChunkRequest,
    ) -> Result<Sources, ApiError> {
        let drafts = memory.namespace(namespace, &request.namespace);
        let group = request.group.as_deref().and_then(|group| {
            let document = request.request.into();
            memory.group(namespace, group, document)
        });
        let index = IndexConfig {
            pattern_tokens_max: self.config.speculation.max_pattern_tokens,
            ..IndexConfig::default()
        };
        Sources::new(request, drafts, group, index)
    }
}

#[async_trait]
impl Worker for WorkerHandle {
    async fn chunk(&self, mut request: ChunkRequest) -> Result<ChunkStream, ApiError> {
        let inner = &self.inner;
        let time_left = request.budget.time_left_ms.map(Duration::from_millis);
        let deadline = time_left.and_then(|left| Instant::now().checked_add(left));
        let namespace_id = inner.auth.verify(&request.namespace)?;
        self.check(&request)?;
        let running = inner.drain.enter().ok_or_else(|| {
            inner
                .metrics
                .rejections
                .with_label_values(&["draining"])
                .inc();
            ApiError::new(ErrorKind::Unavailable, "this worker is draining")
                .with_code(code::DRAINING)
        })?;
        inner
            .slots
            .take_soon(
                request.lease,
                request.request,
                request.epoch,
                Duration::from_millis(inner.config.slot_wait_ms),
            )
            .await
            .inspect_err(|error| {
                let limit = if error.kind == ErrorKind::Overloaded {
                    "running_max"
                } else {
                    "epoch"
                };
                inner.metrics.rejections.with_label_values(&[limit]).inc();
            })?;
        let slot = Slot {
            lease: request.lease,
            slots: inner.slots.clone(),
            _running: running,
        };
        let (events, receiver) = mpsc::channel(inner.config.event_queue);
        let span = tracing::info_span!(
            "chunk",
            worker = inner.config.id,
            context_tokens = request.tokens.len(),
            speculation = ?request.speculation,
        );
        // Indexing a long prompt takes milliseconds: here, and not in the loop that all requests share.
        let sources = match &inner.memory {
            Some(memory) => Some(inner.sources(memory, namespace_id, &mut request)?),
            None => None,
        };
        let self_drafts = inner
            .router
            .as_ref()
            .is_some_and(|router| router.self_drafts(request.speculation));
        let start = Start {
            running: Running::new(
                request,
                namespace_id,
                sources,
                clock::unix_ms(),
                self_drafts,
                Instant::now(),
            )?,
            events,
            slot,
            span,
            deadline,
            runtime: tokio::runtime::Handle::current(),
        };
        inner
            .commands
            .send(Command::Start(Box::new(start)))
            .await
            .map_err(|_| ApiError::new(ErrorKind::Unavailable, "this worker has stopped"))?;
        Ok(ReceiverStream::new(receiver).boxed())
    }

    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError> {
        let (done, told) = oneshot::channel();
        self.inner
            .commands
            .send(Command::Cut(cut, done))
            .await
            .map_err(|_| ApiError::new(ErrorKind::Unavailable, "this worker has stopped"))?;
        told.await
            .map_err(|_| ApiError::new(ErrorKind::Unavailable, "this worker has stopped"))
    }
}
