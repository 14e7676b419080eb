//! The worker of a process, which starts once its engine answers.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{DraftStore, Scheduler};
use refrain_service_kit::actors::Sentinel;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::Tokenizer;
use refrain_worker::{
    Dependencies, EngineConfig, EngineWait, ExpectedModel, HttpEngine, WorkerConfig, WorkerEngine,
    WorkerListener, WorkerServer, connect_third_party, start_at,
};
use tokio::task::JoinHandle;

use crate::model_files::{expected_model, model_files};

/// How long the start of a process waits for its engine. After that the process listens without it.
const FIRST_ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// The worker of a process.
pub(crate) enum LateWorker {
    /// It runs.
    Running(Box<WorkerServer>),
    /// Its engine is away, or was when the process started.
    Waiting(JoinHandle<Option<WorkerServer>>),
}

/// Connects to the engine that a configuration names.
pub(crate) struct EngineConnector {
    url: String,
    kind: ConnectorKind,
}

enum ConnectorKind {
    /// A reference engine, and the tokenizer of its model if the configuration names one.
    Reference(MeshClient, Option<Arc<Tokenizer>>),
    ThirdParty(Box<EngineConfig>, ExpectedModel),
}

impl EngineConnector {
    /// Reads what the configuration says of the engine.
    ///
    /// # Errors
    /// The files of its model cannot be used.
    pub(crate) fn new(
        config: &EngineConfig,
        url: String,
        client: &MeshClient,
    ) -> anyhow::Result<Self> {
        if config.is_external() {
            let kind = ConnectorKind::ThirdParty(config.clone().into(), expected_model(config)?);
            return Ok(EngineConnector { url, kind });
        }
        let key = || format!("worker.engine.files = {:?}", config.files);
        let read = || anyhow::Ok(Arc::new(model_files(&config.files)?.tokenizer()?));
        let tokenizer = (!config.files.is_empty()).then(read).transpose();
        let kind = ConnectorKind::Reference(client.at(&url), tokenizer.with_context(key)?);
        Ok(EngineConnector { url, kind })
    }

    /// The model that the engine has to serve, where the configuration says it.
    fn expected(&self) -> Option<&ExpectedModel> {
        match &self.kind {
            ConnectorKind::Reference(..) => None,
            ConnectorKind::ThirdParty(_, expected) => Some(expected),
        }
    }

    /// Connects to it, and checks its model and its tokenizer.
    ///
    /// # Errors
    /// `InvalidRequest` for an engine that cannot serve the model. Otherwise it does not answer.
    pub(crate) async fn connect(&self) -> Result<WorkerEngine, ApiError> {
        match &self.kind {
            ConnectorKind::Reference(client, tokenizer) => {
                let mut engine = HttpEngine::connect(client.clone()).await?;
                if let Some(tokenizer) = tokenizer {
                    engine = engine.with_tokenizer(tokenizer.clone());
                }
                Ok(WorkerEngine::Verifying(Arc::new(engine)))
            }
            ConnectorKind::ThirdParty(config, expected) => {
                connect_third_party(config, &self.url, expected.clone()).await
            }
        }
    }
}

/// The parts of a worker that is to start.
pub(crate) struct WorkerStart {
    pub(crate) config: WorkerConfig,
    pub(crate) connector: EngineConnector,
    pub(crate) scheduler: Arc<dyn Scheduler>,
    pub(crate) store: Arc<dyn DraftStore>,
    pub(crate) auth: MeshAuth,
    pub(crate) metrics: Metrics,
}

impl WorkerStart {
    async fn with(
        self,
        engine: WorkerEngine,
        listener: WorkerListener,
    ) -> anyhow::Result<WorkerServer> {
        let with = Dependencies {
            engine,
            scheduler: self.scheduler,
            store: self.store,
            auth: self.auth,
            metrics: self.metrics,
        };
        start_at(listener, self.config, with).await
    }
}

impl LateWorker {
    /// Starts a worker, at once if its engine answers. Otherwise it starts when the engine does, and its listener and
    /// its heartbeats say meanwhile what it waits for. `on_start` learns of its start.
    ///
    /// # Errors
    /// The engine is another one than the configured one, or the worker cannot start.
    pub(crate) async fn start(
        listener: WorkerListener,
        start: WorkerStart,
        on_start: impl FnOnce(&WorkerServer) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let first = tokio::time::timeout(FIRST_ATTEMPT_MAX, start.connector.connect()).await;
        let error = match first {
            Ok(Ok(engine)) => {
                let server = start.with(engine, listener).await?;
                on_start(&server);
                return Ok(LateWorker::Running(server.into()));
            }
            Ok(Err(error)) if error.kind == ErrorKind::InvalidRequest => {
                let context = "this engine cannot be used; check urls.engine and worker.engine";
                return Err(error).context(context);
            }
            Ok(Err(error)) => error,
            Err(_) => {
                let message = format!("no answer within {FIRST_ATTEMPT_MAX:?}");
                ApiError::new(ErrorKind::Timeout, message)
            }
        };
        // The start takes the listener and the configuration with it.
        let sentinel = Sentinel::new("start of the worker");
        let starts = async move {
            let _sentinel = sentinel;
            let wait = EngineWait {
                config: &start.config,
                scheduler: start.scheduler.clone(),
                url: &start.connector.url,
                expected: start.connector.expected(),
            };
            let connect = || start.connector.connect();
            let engine = listener.wait_for_engine(wait, error, connect).await;
            let server = start.with(engine, listener).await;
            let server = server.inspect_err(|error| {
                tracing::error!("the worker cannot start: {error:#}");
            });
            let server = server.ok()?;
            on_start(&server);
            Some(server)
        };
        Ok(LateWorker::Waiting(tokio::spawn(starts)))
    }

    /// Whether its engine was away when the process started.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, LateWorker::Waiting(_))
    }

    /// Stops the worker as a signal would.
    pub(crate) async fn drain(self) {
        match self {
            LateWorker::Running(server) => server.drain().await,
            LateWorker::Waiting(start) if start.is_finished() => {
                if let Ok(Some(server)) = start.await {
                    server.drain().await;
                }
            }
            LateWorker::Waiting(start) => start.abort(),
        }
    }
}
