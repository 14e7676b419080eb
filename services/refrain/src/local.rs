//! Services in one process: the same traits as over HTTP, by plain calls.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::RwLock;
use refrain_output_grammar::GrammarCompiler;
use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::engine::{CloseRequest, EngineCapabilities, StepRequest, StepResponse};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::{KvReport, WorkerDrain};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind};
use refrain_rpc::{ChunkStream, Worker, Workers};
use refrain_worker::{VerifyingEngine, WorkerHandle};

/// The reference engine, called without HTTP.
pub(crate) struct LocalEngine {
    handle: refrain_reference_engine::EngineHandle,
    capabilities: EngineCapabilities,
}

impl LocalEngine {
    /// Wraps the engine behind `handle`.
    pub(crate) fn new(handle: refrain_reference_engine::EngineHandle) -> Self {
        let capabilities = handle.capabilities();
        LocalEngine {
            handle,
            capabilities,
        }
    }
}

#[async_trait]
impl VerifyingEngine for LocalEngine {
    fn capabilities(&self) -> &EngineCapabilities {
        &self.capabilities
    }

    fn grammars(&self) -> Option<Arc<GrammarCompiler>> {
        self.handle.grammars()
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        // The engine lives and ends with this process, so it need not be reached first.
        self.handle
            .ready()
            .map_err(|reason| ApiError::new(ErrorKind::Unavailable, reason))
    }

    async fn kv_report(&self) -> Option<KvReport> {
        self.handle.kv_report().await.ok()
    }

    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        self.handle.step(request).await
    }

    async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        self.handle.close(request).await
    }

    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        self.handle.abort(sessions).await
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        self.handle.order(order).await
    }

    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        self.handle.forget_tenant(order).await
    }
}

/// The workers of a process, by the URLs in their leases. They may start later.
#[derive(Clone, Default)]
pub(crate) struct LocalWorkers {
    workers: Arc<RwLock<HashMap<String, Arc<dyn Worker>>>>,
}

impl LocalWorkers {
    /// Sends the leases that name `url` to `worker`.
    pub(crate) fn add(&self, url: String, worker: WorkerHandle) {
        self.workers.write().insert(url, Arc::new(worker));
    }
}

impl Workers for LocalWorkers {
    fn at(&self, url: &str) -> Arc<dyn Worker> {
        let worker = self.workers.read().get(url).cloned();
        worker.unwrap_or_else(|| Arc::new(NotStarted))
    }
}

/// A worker that waits for its engine.
struct NotStarted;

impl NotStarted {
    fn error<T>() -> Result<T, ApiError> {
        let message = "the worker waits for its engine; /readyz says more";
        Err(ApiError::new(ErrorKind::Unavailable, message))
    }
}

#[async_trait]
impl Worker for NotStarted {
    async fn chunk(&self, _: ChunkRequest) -> Result<ChunkStream, ApiError> {
        NotStarted::error()
    }

    async fn cut(&self, _: ChunkCut) -> Result<(), ApiError> {
        NotStarted::error()
    }

    async fn order(&self, _: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        NotStarted::error()
    }

    async fn forget_tenant(&self, _: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        NotStarted::error()
    }

    async fn drain(&self, _: WorkerDrain) -> Result<(), ApiError> {
        NotStarted::error()
    }
}
