//! Starts what a process is to be, and stops it in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use refrain_gateway::GatewayDeps;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{HttpDraftStore, HttpScheduler, HttpWorkers};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::ModelFiles;
use refrain_worker::{
    Dependencies, HttpEngine, ServedAs, StreamingEngine, WorkerEngine, connect_external,
};

use crate::config::{MeshFile, Role};
use crate::local::{LocalEngine, LocalWorkers};

/// What runs in this process, in the order in which it stops: whoever calls stops before whom it calls, so
/// that what is under way finds its services until it has ended. The draft store goes last of all; what was
/// said is to arrive there.
pub struct Process {
    gateway: Option<refrain_gateway::Running>,
    worker: Option<refrain_worker::RunningWorker>,
    scheduler: Option<refrain_scheduler::Running>,
    engine: Option<refrain_reference_engine::Running>,
    draft_store: Option<refrain_draft_store::Running>,
    addr: Option<SocketAddr>,
    drain_grace: Duration,
}

impl Process {
    /// Starts the services of a role.
    ///
    /// # Errors
    /// A service cannot start; those that had are dropped.
    pub async fn start(role: Role, file: MeshFile) -> anyhow::Result<Self> {
        let metrics = Metrics::new()?;
        let mut process = Process {
            gateway: None,
            worker: None,
            scheduler: None,
            engine: None,
            draft_store: None,
            addr: None,
            drain_grace: Duration::from_millis(file.drain_grace_ms),
        };
        match role {
            Role::Up => process.up(file, &metrics).await?,
            Role::Gateway => {
                let clocks = clocks(&format!("gateway {}", file.gateway.listen), &file, &metrics)?;
                let client = client(&file)?.with_clocks(clocks.clone());
                let deps = GatewayDeps {
                    scheduler: Arc::new(HttpScheduler::new(client.at(&file.urls.scheduler))),
                    workers: Arc::new(HttpWorkers::new(client)),
                    signer: NamespaceSigner::new(&file.mesh)?,
                    model_files: Arc::new(model_files),
                    metrics,
                    clocks,
                };
                let running = refrain_gateway::start(file.gateway, deps).await?;
                process.addr = Some(running.addr());
                process.gateway = Some(running);
            }
            Role::Scheduler => {
                let clocks = Clocks::new("scheduler", true, file.mesh.clock_skew_s_max);
                clocks.register(&metrics)?;
                let auth = MeshAuth::new(&file.mesh)?.with_clocks(clocks);
                let running = refrain_scheduler::start(file.scheduler, auth, &metrics).await?;
                process.addr = running.addr();
                process.scheduler = Some(running);
            }
            Role::Worker => {
                let clocks = clocks(&format!("worker {}", file.worker.id), &file, &metrics)?;
                let client = client(&file)?.with_clocks(clocks.clone());
                let engine = engine(&file, &client).await?;
                let with = Dependencies {
                    engine,
                    scheduler: Arc::new(HttpScheduler::new(client.at(&file.urls.scheduler))),
                    store: Arc::new(HttpDraftStore::new(client.at(&file.urls.draft_store))),
                    auth: MeshAuth::new(&file.mesh)?.with_clocks(clocks),
                    metrics,
                };
                let running = refrain_worker::start(file.worker, with).await?;
                process.addr = running.addr();
                process.worker = Some(running);
            }
            Role::DraftStore => {
                let clocks = clocks("draft-store", &file, &metrics)?;
                let auth = MeshAuth::new(&file.mesh)?.with_clocks(clocks);
                let running = refrain_draft_store::start(file.draft_store, auth, &metrics).await?;
                process.addr = running.addr();
                process.draft_store = Some(running);
            }
            Role::ReferenceEngine => {
                let clocks = clocks("engine", &file, &metrics)?;
                let auth = MeshAuth::new(&file.mesh)?.with_clocks(clocks);
                let running = refrain_reference_engine::start(file.engine, auth, metrics).await?;
                process.addr = running.addr();
                process.engine = Some(running);
            }
        }
        Ok(process)
    }

    /// All services in this process, over plain calls.
    async fn up(&mut self, mut file: MeshFile, metrics: &Metrics) -> anyhow::Result<()> {
        file.fill_in_for_up();
        // Without keys in the file nobody outside this process can have them, so they are made for this run.
        let mesh = if file.has_mesh_keys() {
            file.mesh.clone()
        } else {
            MeshConfig::generate()?
        };
        let auth = MeshAuth::new(&mesh)?;
        let engine = if file.worker.engine.is_external() {
            WorkerEngine::Streaming(listen_to(&file).await?)
        } else {
            let engine =
                refrain_reference_engine::start(file.engine, auth.clone(), metrics.clone()).await?;
            let engine = self.engine.insert(engine);
            WorkerEngine::Verifying(Arc::new(LocalEngine::new(engine.handle().clone())))
        };
        let store = self
            .draft_store
            .insert(refrain_draft_store::start(file.draft_store, auth.clone(), metrics).await?);
        let scheduler = self
            .scheduler
            .insert(refrain_scheduler::start(file.scheduler, auth.clone(), metrics).await?);
        let with = Dependencies {
            engine,
            scheduler: Arc::new(scheduler.handle()),
            store: Arc::new(store.handle()),
            auth,
            metrics: metrics.clone(),
        };
        let worker = self
            .worker
            .insert(refrain_worker::start(file.worker, with).await?);
        let deps = GatewayDeps {
            scheduler: Arc::new(scheduler.handle()),
            workers: Arc::new(LocalWorkers::new(worker.handle())),
            signer: NamespaceSigner::new(&mesh)?,
            model_files: Arc::new(model_files),
            metrics: metrics.clone(),
            clocks: Clocks::default(),
        };
        let gateway = self
            .gateway
            .insert(refrain_gateway::start(file.gateway, deps).await?);
        self.addr = Some(gateway.addr());
        Ok(())
    }

    /// Where the process listens (`up`: the gateway).
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// Stops in the order of the fields, so that streams that run are finished and what was said is kept.
    pub async fn drain(self) {
        if let Some(gateway) = self.gateway {
            let left = gateway.drain(self.drain_grace).await;
            if left > 0 {
                tracing::warn!(
                    cut = left,
                    "drain_grace_ms was over: requests were cut off, and their clients told so"
                );
            }
        }
        if let Some(worker) = self.worker {
            worker.drain().await;
        }
        if let Some(scheduler) = self.scheduler {
            scheduler.drain(SERVICE_GRACE).await;
        }
        if let Some(engine) = self.engine {
            engine.stop().await;
        }
        if let Some(store) = self.draft_store {
            store.drain(SERVICE_GRACE).await;
        }
    }
}

/// How long services without streams may take to stop.
const SERVICE_GRACE: Duration = Duration::from_secs(5);

/// The clock of a service that the scheduler judges.
fn clocks(name: &str, file: &MeshFile, metrics: &Metrics) -> anyhow::Result<Clocks> {
    let clocks = Clocks::new(name, false, file.mesh.clock_skew_s_max);
    clocks.register(metrics)?;
    Ok(clocks)
}

fn client(file: &MeshFile) -> anyhow::Result<MeshClient> {
    MeshClient::new(
        "",
        &file.mesh.secret,
        Duration::from_millis(file.urls.timeout_ms),
    )
}

/// How long a worker waits for its engine to come up, and how often it looks.
const ENGINE_START_TRIES: u32 = 600;
const ENGINE_START_PAUSE: Duration = Duration::from_millis(500);

/// The engine of a worker's process.
async fn engine(file: &MeshFile, client: &MeshClient) -> anyhow::Result<WorkerEngine> {
    if file.worker.engine.is_external() {
        return Ok(WorkerEngine::Streaming(listen_to(file).await?));
    }
    let client = client.at(&file.urls.engine);
    let engine = once_up(|| HttpEngine::connect(client.clone())).await?;
    Ok(WorkerEngine::Verifying(Arc::new(engine)))
}

/// An engine of another maker.
async fn listen_to(file: &MeshFile) -> anyhow::Result<Arc<dyn StreamingEngine>> {
    let config = &file.worker.engine;
    let files = model_files(&config.files).context("worker.engine.files")?;
    let served_model = match config.served_model.as_str() {
        "" => config.model.clone(),
        name => name.to_owned(),
    };
    let served = ServedAs {
        model: config.model.clone(),
        served_model,
        tokenizer: Arc::new(files.tokenizer().context("worker.engine.files")?),
        max_context: config.max_context.or_else(|| files.max_context()),
    };
    once_up(|| connect_external(config, &file.urls.engine, served.clone())).await
}

/// Waits for an engine to come up. One that is up and is not what it should be is not waited for.
async fn once_up<E, F>(mut connect: impl FnMut() -> F) -> anyhow::Result<E>
where
    F: Future<Output = Result<E, ApiError>>,
{
    let mut tries = 0;
    loop {
        match connect().await {
            Ok(engine) => return Ok(engine),
            Err(error) if error.kind != ErrorKind::InvalidRequest && tries < ENGINE_START_TRIES => {
                tries += 1;
                tracing::warn!(%error, "the engine does not answer yet");
                tokio::time::sleep(ENGINE_START_PAUSE).await;
            }
            Err(error) => return Err(error).context("the engine cannot be joined"),
        }
    }
}

/// A model's tokenizer and template, from the binary itself or from a directory.
pub(crate) fn model_files(source: &str) -> anyhow::Result<ModelFiles> {
    // The engine finds a model by the same words.
    let files = refrain_reference_engine::ModelFiles::open(source)?;
    files
        .tokenization
        .with_context(|| format!("{source}: a model without tokenizer.json cannot be served"))
}
