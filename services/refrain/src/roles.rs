//! Starts the services of a process, and stops them in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use backon::{ExponentialBuilder, Retryable};
use refrain_gateway::GatewayDeps;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{
    EngineAdopter, HttpEngineAdopter, HttpScheduler, HttpWorkers, MeshAdmin, Workers, draft_store,
};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{
    MeshAuth, MeshConfig, MeshCredentials, NamespaceSigner, RoleCredential,
};
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::ModelFiles;
use refrain_worker::{
    AdopterDeps, AdopterServer, Dependencies, EngineConfig, ExpectedModel, HttpEngine,
    WorkerEngine, connect_third_party,
};

use crate::config::{MeshFile, Role};
use crate::local::{LocalEngine, LocalWorkers};
use crate::local_operator;
use crate::mesh_admin;
use crate::mesh_roles::check_own;

/// The services of this process, in the order in which they stop. A caller stops before the service that it calls, so
/// running requests find their services until they end. The draft store stops last, so that all outputs reach it.
#[derive(Default)]
pub struct Process {
    gateway: Option<refrain_gateway::GatewayServer>,
    worker: Option<refrain_worker::WorkerServer>,
    adopter: Option<AdopterServer>,
    scheduler: Option<refrain_scheduler::SchedulerServer>,
    engine: Option<refrain_reference_engine::EngineServer>,
    draft_store: Option<refrain_draft_store::DraftStoreServer>,
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
            drain_grace: Duration::from_millis(file.drain_grace_ms),
            ..Process::default()
        };
        let clocks = clocks(role, &file);
        clocks.register(&metrics)?;
        let worker_id = file.worker.id.clone();
        let is_own = move |own: &RoleCredential| check_own(role, &worker_id, own);
        let credentials = MeshCredentials::open_own(&file.mesh, &metrics, is_own)?;
        let auth = || {
            let auth = MeshAuth::with_credentials(&file.mesh, credentials.clone())?;
            anyhow::Ok(auth.with_clocks(clocks.clone()))
        };
        let client = || {
            let timeout = Duration::from_millis(file.urls.timeout_ms);
            let client = MeshClient::with_credentials("", credentials.clone(), timeout)?;
            anyhow::Ok(client.with_clocks(clocks.clone()))
        };
        match role {
            Role::Up => process.up(file, credentials, clocks, metrics).await?,
            Role::Gateway => {
                let client = client()?;
                let deps = GatewayDeps {
                    scheduler: Arc::new(HttpScheduler::new(client.at(&file.urls.scheduler))),
                    store: draft_store(&client, &file.urls.draft_store, &file.urls.draft_stores)?,
                    adopters: adopters(&file.gateway.trainer.adopters, &client),
                    workers: Arc::new(HttpWorkers::new(client)),
                    signer: NamespaceSigner::new(&file.mesh)?,
                    model_files: Arc::new(model_files),
                    mesh: mesh_admin::of_gateway(&file, &credentials, &metrics)?,
                    metrics,
                    clocks,
                };
                let gateway = refrain_gateway::start(file.gateway, deps).await?;
                process.addr = Some(gateway.addr());
                process.gateway = Some(gateway);
            }
            Role::Scheduler => {
                let scheduler = refrain_scheduler::start(file.scheduler, auth()?, &metrics).await?;
                process.addr = scheduler.addr();
                process.scheduler = Some(scheduler);
            }
            Role::Worker if file.worker.adoption.is_on() => {
                let client = client()?;
                let with = AdopterDeps {
                    expected: expected_model(&file.worker.engine)?,
                    scheduler: Arc::new(HttpScheduler::new(client.at(&file.urls.scheduler))),
                    store: draft_store(&client, &file.urls.draft_store, &file.urls.draft_stores)?,
                    auth: auth()?,
                    client,
                    metrics,
                };
                let adopter = AdopterServer::start(file.worker, with)?;
                process.addr = adopter.addr();
                process.adopter = Some(adopter);
            }
            Role::Worker => {
                let client = client()?;
                let with = Dependencies {
                    engine: connect_engine(&file, &client).await?,
                    scheduler: Arc::new(HttpScheduler::new(client.at(&file.urls.scheduler))),
                    store: draft_store(&client, &file.urls.draft_store, &file.urls.draft_stores)?,
                    auth: auth()?,
                    metrics,
                };
                let worker = refrain_worker::start(file.worker, with).await?;
                process.addr = worker.addr();
                process.worker = Some(worker);
            }
            Role::DraftStore => {
                let store = refrain_draft_store::start(file.draft_store, auth()?, &metrics).await?;
                process.addr = store.addr();
                process.draft_store = Some(store);
            }
            Role::ReferenceEngine => {
                let engine = refrain_reference_engine::start(file.engine, auth()?, metrics).await?;
                process.addr = engine.addr();
                process.engine = Some(engine);
            }
        }
        Ok(process)
    }

    /// Starts all services in this process, connected by plain calls.
    async fn up(
        &mut self,
        mut file: MeshFile,
        credentials: MeshCredentials,
        clocks: Clocks,
        metrics: Metrics,
    ) -> anyhow::Result<()> {
        file.fill_in_for_up();
        // Without keys in the file, no other process can have them, so fresh keys serve for this run.
        let (mesh, credentials) = if file.mesh.has_keys() {
            (file.mesh.clone(), credentials)
        } else {
            let mesh = MeshConfig::generate()?;
            let credentials = MeshCredentials::of_secret(&mesh.secret);
            (mesh, credentials)
        };
        let auth = MeshAuth::with_credentials(&mesh, credentials.clone())?;
        let engine = if file.worker.adoption.is_on() {
            None
        } else if file.worker.engine.is_external() {
            Some(third_party_engine(&file).await?)
        } else {
            let engine =
                refrain_reference_engine::start(file.engine, auth.clone(), metrics.clone()).await?;
            let engine = self.engine.insert(engine);
            let engine = Arc::new(LocalEngine::new(engine.handle().clone()));
            Some(WorkerEngine::Verifying(engine))
        };
        let data_dir = file.draft_store.data_dir.clone();
        let store = refrain_draft_store::start(file.draft_store, auth.clone(), &metrics).await?;
        let store = self.draft_store.insert(store);
        local_operator::add(&mut file.gateway, &data_dir)?;
        let scheduler = refrain_scheduler::start(file.scheduler, auth.clone(), &metrics).await?;
        let scheduler = self.scheduler.insert(scheduler);
        let mut adopters: Vec<Arc<dyn EngineAdopter>> = Vec::new();
        let workers: Arc<dyn Workers> = match engine {
            Some(engine) => {
                let with = Dependencies {
                    engine,
                    scheduler: Arc::new(scheduler.handle()),
                    store: Arc::new(store.handle()),
                    auth,
                    metrics: metrics.clone(),
                };
                let worker = refrain_worker::start(file.worker, with).await?;
                let worker = self.worker.insert(worker);
                Arc::new(LocalWorkers::new(worker.handle()))
            }
            None => {
                let timeout = Duration::from_millis(file.urls.timeout_ms);
                let with = AdopterDeps {
                    expected: expected_model(&file.worker.engine)?,
                    scheduler: Arc::new(scheduler.handle()),
                    store: Arc::new(store.handle()),
                    auth,
                    client: MeshClient::with_credentials("", credentials, timeout)?,
                    metrics: metrics.clone(),
                };
                let adopter = self
                    .adopter
                    .insert(AdopterServer::start(file.worker, with)?);
                adopters.push(Arc::new(adopter.adopter()));
                Arc::new(adopter.adopter())
            }
        };
        let deps = GatewayDeps {
            mesh: MeshAdmin {
                store: Arc::new(store.handle()),
                usage: Arc::new(store.handle()),
                workers: workers.clone(),
                metrics: None,
            },
            scheduler: Arc::new(scheduler.handle()),
            workers,
            adopters,
            store: Arc::new(store.handle()),
            signer: NamespaceSigner::new(&mesh)?,
            model_files: Arc::new(model_files),
            metrics,
            clocks,
        };
        let gateway = refrain_gateway::start(file.gateway, deps).await?;
        self.addr = Some(gateway.addr());
        self.gateway = Some(gateway);
        Ok(())
    }

    /// The address on which the process listens; for `up`, the gateway's.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// The address of the gateway's operations listener, if it has one.
    pub fn operations_addr(&self) -> Option<SocketAddr> {
        let gateway = self.gateway.as_ref();
        gateway.and_then(refrain_gateway::GatewayServer::operations_addr)
    }

    /// The address of the gateway's listener for trainers, if it has one.
    pub fn trainer_addr(&self) -> Option<SocketAddr> {
        let gateway = self.gateway.as_ref();
        gateway.and_then(refrain_gateway::GatewayServer::trainer_addr)
    }

    /// Stops the services in the order of the fields, so that running streams finish and their outputs are stored.
    pub async fn drain(self) {
        if let Some(gateway) = self.gateway {
            let left = gateway.drain(self.drain_grace).await;
            if left > 0 {
                tracing::warn!(
                    cut = left,
                    "drain_grace_ms has passed: the remaining requests were cut off, and their clients were told"
                );
            }
        }
        if let Some(worker) = self.worker {
            worker.drain().await;
        }
        if let Some(adopter) = self.adopter {
            adopter.drain().await;
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

/// How long a service without streams may take to stop.
const SERVICE_GRACE: Duration = Duration::from_secs(5);

/// The clock of the process, which the scheduler compares with the others.
fn clocks(role: Role, file: &MeshFile) -> Clocks {
    let name = match role {
        // One process has one clock, so its skew is always 0; the metric exists in every deployment.
        Role::Up => return Clocks::default(),
        Role::Gateway => format!("gateway {}", file.gateway.listen),
        Role::Worker => format!("worker {}", file.worker.id),
        Role::ReferenceEngine => "engine".to_owned(),
        Role::Scheduler | Role::DraftStore => role.name().to_owned(),
    };
    let is_judge = role == Role::Scheduler;
    Clocks::new(&name, is_judge, file.mesh.clock_skew_s_max)
}

/// Pauses between attempts to reach an engine that is starting. They grow and are drawn at random, so that many
/// workers do not ask at the same moments.
const ENGINE_PAUSE_MIN: Duration = Duration::from_millis(250);
const ENGINE_PAUSE_MAX: Duration = Duration::from_secs(4);
/// All pauses together: a large model takes minutes to load.
const ENGINE_WAIT_MAX: Duration = Duration::from_secs(300);

/// Connects to the engine of a worker's process.
async fn connect_engine(file: &MeshFile, client: &MeshClient) -> anyhow::Result<WorkerEngine> {
    if file.worker.engine.is_external() {
        return third_party_engine(file).await;
    }
    let client = client.at(&file.urls.engine);
    let mut engine = retry_until_up(|| HttpEngine::connect(client.clone())).await?;
    let config = &file.worker.engine;
    if !config.files.is_empty() {
        let key = || format!("worker.engine.files = {:?}", config.files);
        let tokenizer = model_files(&config.files).with_context(key)?.tokenizer();
        engine = engine.with_tokenizer(Arc::new(tokenizer.with_context(key)?));
    }
    Ok(WorkerEngine::Verifying(Arc::new(engine)))
}

/// The processes at these URLs that adopt engines.
fn adopters(urls: &[String], client: &MeshClient) -> Vec<Arc<dyn EngineAdopter>> {
    let adopter = |url: &String| Arc::new(HttpEngineAdopter::new(client.at(url))) as _;
    urls.iter().map(adopter).collect()
}

/// The model that engines have to serve.
fn expected_model(config: &EngineConfig) -> anyhow::Result<ExpectedModel> {
    let key = || format!("worker.engine.files = {:?}", config.files);
    let files = model_files(&config.files).with_context(key)?;
    let served_model = match config.served_model.as_str() {
        "" => config.model.clone(),
        name => name.to_owned(),
    };
    Ok(ExpectedModel {
        model: config.model.clone(),
        served_model,
        tokenizer: Arc::new(files.tokenizer().with_context(key)?),
        max_context: config.max_context.or_else(|| files.max_context()),
    })
}

/// A third-party engine.
async fn third_party_engine(file: &MeshFile) -> anyhow::Result<WorkerEngine> {
    let config = &file.worker.engine;
    let expected = expected_model(config)?;
    retry_until_up(|| connect_third_party(config, &file.urls.engine, expected.clone())).await
}

/// Connects to an engine that may still be starting. An engine that is up but is not the configured one is not
/// retried.
async fn retry_until_up<E, F>(connect: impl FnMut() -> F) -> anyhow::Result<E>
where
    F: Future<Output = Result<E, ApiError>>,
{
    let backoff = ExponentialBuilder::new()
        .with_jitter()
        .with_min_delay(ENGINE_PAUSE_MIN)
        .with_max_delay(ENGINE_PAUSE_MAX)
        .without_max_times()
        .with_total_delay(Some(ENGINE_WAIT_MAX));
    connect
        .retry(backoff)
        .sleep(tokio::time::sleep)
        .when(|error| error.kind != ErrorKind::InvalidRequest)
        .notify(|error, _| tracing::warn!(%error, "the engine does not answer yet"))
        .await
        .context("cannot connect to the engine; check urls.engine and worker.engine")
}

/// Reads a model's tokenizer and template, from the binary itself or from a folder. The folder needs no weights: only
/// the reference engine reads those.
pub(crate) fn model_files(source: &str) -> anyhow::Result<ModelFiles> {
    if !source.starts_with(BUILTIN) {
        return Ok(ModelFiles::from_dir(source)?);
    }
    // The engine understands the same names, such as `builtin:refrain-tiny`.
    let files = refrain_reference_engine::ModelFiles::open(source)?;
    files
        .tokenization
        .with_context(|| format!("{source}: a model without tokenizer.json cannot be served"))
}

/// How the names of models in the binary begin.
const BUILTIN: &str = "builtin:";

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_folder_with_a_tokenizer_needs_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().to_str().unwrap();
        let error = format!("{:#}", model_files(source).unwrap_err());
        assert!(
            error.contains("tokenizer.json") && !error.contains("safetensors"),
            "{error}"
        );
        let shipped = model_files(refrain_reference_engine::SHIPPED_MODEL).unwrap();
        std::fs::write(
            folder.path().join("tokenizer.json"),
            &shipped.tokenizer_json,
        )
        .unwrap();
        let read = model_files(source).unwrap();
        assert_eq!(
            read.tokenizer().unwrap().identity(),
            shipped.tokenizer().unwrap().identity()
        );
        assert!(read.chat_template().unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_starts_is_waited_for_with_growing_pauses() {
        let (attempts, started) = (Cell::new(0u32), tokio::time::Instant::now());
        let connect = |up_after: Duration| {
            let (attempts, started) = (&attempts, &started);
            move || async move {
                attempts.set(attempts.get() + 1);
                match started.elapsed() >= up_after {
                    true => Ok(()),
                    false => Err(ApiError::new(ErrorKind::Unavailable, "still loading")),
                }
            }
        };
        retry_until_up(connect(Duration::from_secs(60)))
            .await
            .unwrap();
        // With pauses of 4 to 8 seconds after the first few; at a fixed rate of 2/s it would be 120 attempts.
        assert!((8..30).contains(&attempts.get()), "{}", attempts.get());
        let error = retry_until_up(connect(Duration::from_secs(3_600))).await;
        assert!(error.is_err());
        assert!(started.elapsed() < Duration::from_secs(800));
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_with_another_model_is_not_waited_for() {
        let attempts = Cell::new(0);
        let connect = || async {
            attempts.set(attempts.get() + 1);
            Err::<(), _>(ApiError::invalid("served_model", "another model"))
        };
        assert!(retry_until_up(connect).await.is_err());
        assert_eq!(attempts.get(), 1);
    }
}
