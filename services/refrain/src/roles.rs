//! Starts the services of a process, and stops them in order.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use refrain_gateway::GatewayDeps;
use refrain_reference_engine::EngineServer;
use refrain_rpc::{
    DraftStore, EngineAdopter, HttpEngineAdopter, HttpWorkers, MeshAdmin, Scheduler, Workers,
    draft_store,
};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{
    MeshAuth, MeshConfig, MeshCredentials, NamespaceSigner, RoleCredential,
};
use refrain_service_kit::telemetry::{Metrics, MetricsPart};
use refrain_worker::{
    AdopterDeps, AdopterServer, Dependencies, WorkerEngine, WorkerListener, WorkerServer,
};

use crate::config::MeshFile;
use crate::gateway::{self, GuestDeps};
use crate::late_worker::{EngineConnector, LateWorker, WorkerStart};
use crate::local::{LocalEngine, LocalWorkers};
use crate::local_operator;
use crate::mesh_admin;
use crate::mesh_roles::check_own;
use crate::model_files::{expected_model, model_files};
use crate::role::Role;
use crate::up_engines::engine_parts;

/// The services of this process, in the order in which they stop. A caller stops before the service that it calls, so
/// running requests find their services until they end. The draft store stops last, so that all outputs reach it.
#[derive(Default)]
pub struct Process {
    gateway: Option<refrain_gateway::GatewayServer>,
    workers: Vec<LateWorker>,
    adopter: Option<AdopterServer>,
    scheduler: Option<refrain_scheduler::SchedulerServer>,
    engines: Vec<EngineServer>,
    draft_store: Option<refrain_draft_store::DraftStoreServer>,
    /// Their metrics are shown while this lives.
    parts: Vec<MetricsPart>,
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
            Role::Up => Box::pin(process.up(file, credentials, clocks, metrics)).await?,
            Role::Gateway => {
                let client = client()?;
                let guests = GuestDeps {
                    mesh: mesh_admin::of_gateway(&file, &credentials, &metrics)?,
                    adopters: adopters(&file.gateway.trainer.adopters, &client),
                };
                let deps = GatewayDeps {
                    scheduler: Arc::new(file.urls.scheduler(&client)),
                    store: draft_store(&client, &file.urls.draft_store, &file.urls.draft_stores)?,
                    workers: Arc::new(HttpWorkers::new(client)),
                    signer: NamespaceSigner::new(&file.mesh)?,
                    model_files: Arc::new(model_files),
                    metrics,
                    clocks,
                    adopts_engines: !guests.adopters.is_empty(),
                };
                let gateway = gateway::start(file.gateway, deps, guests).await?;
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
                    scheduler: Arc::new(file.urls.scheduler(&client)),
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
                let (client, auth) = (client()?, auth()?);
                let listener = WorkerListener::open(&file.worker, &auth, &metrics)?;
                process.addr = listener.addr();
                let start = WorkerStart {
                    connector: EngineConnector::new(
                        &file.worker.engine,
                        file.urls.engine.clone(),
                        &client,
                    )?,
                    scheduler: Arc::new(file.urls.scheduler(&client)),
                    store: draft_store(&client, &file.urls.draft_store, &file.urls.draft_stores)?,
                    config: file.worker,
                    auth,
                    metrics,
                };
                let worker = LateWorker::start(listener, start, |_| ()).await?;
                process.workers.push(worker);
            }
            Role::DraftStore => {
                let store = refrain_draft_store::start(file.draft_store, auth()?, &metrics).await?;
                process.addr = store.addr();
                process.draft_store = Some(store);
            }
            Role::ReferenceEngine => {
                let engine = refrain_reference_engine::start(file.engine, auth()?, metrics).await?;
                process.addr = engine.addr();
                process.engines.push(engine);
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
        let timeout = Duration::from_millis(file.urls.timeout_ms);
        let client = MeshClient::with_credentials("", credentials, timeout)?;
        let engines = engine_parts(&file.engines, &file.worker, &file.engine, &file.urls.engine);
        let mut starts = Vec::new();
        for of in &engines {
            let metrics = match engines.len() {
                1 => metrics.clone(),
                _ => {
                    let part = metrics.part("worker", &of.worker.id)?;
                    let metrics = part.metrics().clone();
                    self.parts.push(part);
                    metrics
                }
            };
            let engine = match &of.url {
                Some(url) => UpEngineKind::Elsewhere(EngineConnector::new(
                    &of.worker.engine,
                    url.clone(),
                    &client,
                )?),
                None => {
                    let (config, auth) = (of.engine.clone(), auth.clone());
                    let engine =
                        refrain_reference_engine::start(config, auth, metrics.clone()).await?;
                    let handle = engine.handle().clone();
                    self.engines.push(engine);
                    UpEngineKind::Here(LocalEngine::new(handle))
                }
            };
            starts.push((of.worker.clone(), engine, metrics));
        }
        let data_dir = file.draft_store.data_dir.clone();
        let store = refrain_draft_store::start(file.draft_store, auth.clone(), &metrics).await?;
        let store = self.draft_store.insert(store);
        let has_operator =
            local_operator::add(&mut file.gateway, file.has_operator_for_others, &data_dir)?;
        let scheduler = refrain_scheduler::start(file.scheduler, auth.clone(), &metrics).await?;
        let scheduler = self.scheduler.insert(scheduler);
        let mut adopters: Vec<Arc<dyn EngineAdopter>> = Vec::new();
        let scheduler_handle: Arc<dyn Scheduler> = Arc::new(scheduler.handle());
        let store_handle: Arc<dyn DraftStore> = Arc::new(store.handle());
        let workers: Arc<dyn Workers> = if file.worker.adoption.is_on() {
            let with = AdopterDeps {
                expected: expected_model(&file.worker.engine)?,
                scheduler: scheduler_handle.clone(),
                store: store_handle.clone(),
                auth,
                client,
                metrics: metrics.clone(),
            };
            let adopter = AdopterServer::start(file.worker, with)?;
            let adopter = self.adopter.insert(adopter);
            adopters.push(Arc::new(adopter.adopter()));
            Arc::new(adopter.adopter())
        } else {
            let workers = LocalWorkers::default();
            for (config, engine, metrics) in starts {
                let url = config.advertise_url.clone();
                let (scheduler, store) = (scheduler_handle.clone(), store_handle.clone());
                let worker = match engine {
                    UpEngineKind::Here(engine) => {
                        let with = Dependencies {
                            engine: WorkerEngine::Verifying(Arc::new(engine)),
                            scheduler,
                            store,
                            auth: auth.clone(),
                            metrics,
                        };
                        let worker = refrain_worker::start(config, with).await?;
                        workers.add(url, worker.handle());
                        LateWorker::Running(worker.into())
                    }
                    UpEngineKind::Elsewhere(connector) => {
                        let listener = WorkerListener::open(&config, &auth, &metrics)?;
                        let start = WorkerStart {
                            config,
                            connector,
                            scheduler,
                            store,
                            auth: auth.clone(),
                            metrics,
                        };
                        let known = workers.clone();
                        let on_start = move |worker: &WorkerServer| known.add(url, worker.handle());
                        LateWorker::start(listener, start, on_start).await?
                    }
                };
                self.workers.push(worker);
            }
            Arc::new(workers)
        };
        let guests = GuestDeps {
            mesh: MeshAdmin {
                store: Arc::new(store.handle()),
                usage: Arc::new(store.handle()),
                workers: workers.clone(),
                metrics: None,
            },
            adopters,
        };
        let deps = GatewayDeps {
            scheduler: scheduler_handle,
            workers,
            store: store_handle,
            signer: NamespaceSigner::new(&mesh)?,
            model_files: Arc::new(model_files),
            metrics,
            clocks,
            adopts_engines: !guests.adopters.is_empty(),
        };
        let scheme = file.gateway.operations_http.scheme();
        let gateway = gateway::start(file.gateway, deps, guests).await?;
        let operations = gateway.operations_addr().filter(|_| has_operator);
        let operations = operations.map(|addr| match addr.ip().is_unspecified() {
            // Commands on this machine cannot call an address that stands for all.
            true => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), addr.port()),
            false => addr,
        });
        local_operator::announce(
            &data_dir,
            operations.map(|addr| format!("{scheme}://{addr}")),
        )?;
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

    /// Whether its engine was away when it started.
    pub(crate) fn waits_for_engine(&self) -> bool {
        self.workers.iter().any(LateWorker::is_late)
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
        futures_util::future::join_all(self.workers.into_iter().map(LateWorker::drain)).await;
        if let Some(adopter) = self.adopter {
            adopter.drain().await;
        }
        if let Some(scheduler) = self.scheduler {
            scheduler.drain(SERVICE_GRACE).await;
        }
        for engine in self.engines {
            engine.stop().await;
        }
        if let Some(store) = self.draft_store {
            store.drain(SERVICE_GRACE).await;
        }
    }
}

/// An engine of `refrain up`.
enum UpEngineKind {
    Here(LocalEngine),
    Elsewhere(EngineConnector),
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

/// The processes at these URLs that adopt engines.
fn adopters(urls: &[String], client: &MeshClient) -> Vec<Arc<dyn EngineAdopter>> {
    let adopter = |url: &String| Arc::new(HttpEngineAdopter::new(client.at(url))) as _;
    urls.iter().map(adopter).collect()
}
