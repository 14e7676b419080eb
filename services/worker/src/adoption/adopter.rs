//! Adopts engines that register, and gives them up.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use futures_util::future::join_all;
use parking_lot::Mutex;
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, AdopterReport, ReleaseRequest};
use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::engine_order::PauseMode;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::{
    ChunkStream, DraftStore, EngineAddress, EngineAdopter, Scheduler, Worker, Workers,
};
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::backoff::jittered;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, PART_MARK};
use refrain_service_kit::telemetry::Metrics;
use reqwest::Url;
use tokio::runtime::Handle;

use super::allowed_hosts::AllowedHosts;
use super::connection::{Connected, Connector};
use super::discovery::{Changes, Discovery};
use super::engine_table::{Claims, DrivenEngine, Engine, EngineStage, EngineTable};
use super::metrics::{AdoptionFamilies, AdoptionOutcome};
use super::record;
use crate::config::WorkerConfig;
use crate::engine::ExpectedModel;
use crate::{Dependencies, StartState, WorkerListener, start_in};

/// Pauses between attempts to reach an engine that an earlier process had adopted.
const ATTEMPT_PAUSE_MIN: Duration = Duration::from_millis(250);
const ATTEMPT_PAUSE_MAX: Duration = Duration::from_secs(8);

/// The services and settings that a process needs to adopt engines.
pub struct AdopterDeps {
    /// The receiver of heartbeats.
    pub scheduler: Arc<dyn Scheduler>,
    /// The store for outputs and drafts.
    pub store: Arc<dyn DraftStore>,
    /// The verifier of namespaces, and of callers if the process listens.
    pub auth: MeshAuth,
    /// The registry of metrics.
    pub metrics: Metrics,
    /// The model that every engine has to serve.
    pub expected: ExpectedModel,
    /// The client of engines with the contract of this project.
    pub client: MeshClient,
}

/// Adopts engines. Cheap to clone.
#[derive(Clone)]
pub struct Adopter {
    parts: Arc<AdopterParts>,
}

struct AdopterParts {
    config: WorkerConfig,
    connector: Connector,
    allowed: AllowedHosts,
    scheduler: Arc<dyn Scheduler>,
    store: Arc<dyn DraftStore>,
    auth: MeshAuth,
    metrics: Metrics,
    families: AdoptionFamilies,
    engines: Mutex<EngineTable>,
    /// The turn of adoptions, so that no two of them are for one engine, or for the last room.
    turn: tokio::sync::Mutex<()>,
    is_draining: AtomicBool,
    /// The turn of writing the file of engines.
    keeping: Mutex<()>,
    /// The runtime of the workers. A caller may be a thread of a listener, whose own runtime ends before the workers
    /// have drained.
    runtime: Handle,
    /// Engines that sources name and for which there was no room.
    surplus: AtomicUsize,
    /// Looks engines up in the sources; begins once the rest is there.
    discovery: Mutex<Option<Actor>>,
}

impl Adopter {
    /// Creates an adopter, whose workers run on the current runtime. It tries the engines that an earlier process had
    /// adopted until they answer.
    ///
    /// # Errors
    /// A metric name is taken, or the file of engines cannot be read.
    pub(super) fn new(config: WorkerConfig, with: AdopterDeps) -> anyhow::Result<Self> {
        let adoption = config.adoption.clone();
        let known = match &adoption.file {
            Some(path) => record::read(path)?,
            None => Vec::new(),
        };
        let adopter = Adopter {
            parts: Arc::new(AdopterParts {
                allowed: AllowedHosts::read(&adoption.allowed_hosts),
                connector: Connector {
                    adoption,
                    engine: config.engine.clone(),
                    expected: with.expected,
                    client: with.client,
                },
                families: AdoptionFamilies::register(with.metrics.registry())?,
                config,
                scheduler: with.scheduler,
                store: with.store,
                auth: with.auth,
                metrics: with.metrics,
                engines: Mutex::default(),
                turn: tokio::sync::Mutex::default(),
                is_draining: AtomicBool::new(false),
                keeping: Mutex::default(),
                runtime: Handle::current(),
                surplus: AtomicUsize::new(0),
                discovery: Mutex::default(),
            }),
        };
        let parts = &adopter.parts;
        for url in known {
            let address = EngineAddress::read(&url).and_then(|address| {
                parts.allowed.check(&address)?;
                Ok(address)
            });
            match address {
                Ok(address) => {
                    let claims = Claims {
                        is_registered: true,
                        ..Claims::default()
                    };
                    parts.await_engine(address, claims);
                }
                Err(error) => {
                    tracing::warn!(url, %error, "an engine of an earlier process is not taken over");
                }
            }
        }
        if let Some(discovery) = Discovery::new(&parts.config.adoption, &parts.metrics)? {
            let discovery = Arc::new(discovery);
            // The actor must not keep the parts, which keep it.
            let weak = Arc::downgrade(parts);
            let body = move || {
                let (discovery, parts) = (discovery.clone(), weak.clone());
                async move {
                    let apply = |changes| {
                        if let Some(parts) = parts.upgrade() {
                            parts.follow(changes);
                        }
                    };
                    discovery.run(apply).await;
                }
            };
            let actor = actors::start("discovery of engines", body);
            *parts.discovery.lock() = Some(actor);
        }
        Ok(adopter)
    }

    /// Whether it takes engines.
    pub(super) fn readiness(&self) -> Result<(), String> {
        match self.parts.is_draining.load(Ordering::Relaxed) {
            true => Err("draining".to_owned()),
            false => self.parts.auth.clocks().readiness(),
        }
    }

    /// Stops the workers of all engines as a signal would. The engines stay known for the next process.
    pub(super) async fn drain(&self) {
        self.parts.is_draining.store(true, Ordering::Relaxed);
        let discovery = self.parts.discovery.lock().take();
        if let Some(discovery) = discovery {
            discovery.stop(Duration::ZERO).await;
        }
        let _turn = self.parts.turn.lock().await;
        let mut ends = Vec::new();
        for engine in self.parts.engines.lock().0.values_mut() {
            match std::mem::replace(&mut engine.stage, EngineStage::Leaving) {
                EngineStage::Driven(driven) => ends.push(driven),
                EngineStage::Awaited { attempts, .. } => attempts.abort(),
                EngineStage::Leaving => {}
            }
        }
        join_all(ends.into_iter().map(|driven| driven.server.drain())).await;
    }
}

impl AdopterParts {
    fn show(&self, engines: &EngineTable) {
        let count = engines.0.len() as i64;
        self.families.engines.set(count);
    }

    /// Keeps the engines for the next process.
    fn keep(&self) {
        // An older list must not replace a newer one.
        let _keeping = self.keeping.lock();
        let urls = self.engines.lock().urls();
        if let Some(path) = &self.config.adoption.file
            && let Err(error) = record::write(path, urls)
        {
            let path = path.display();
            tracing::error!(%path, %error, "the engines cannot be kept for a restart");
        }
    }

    /// The name of an engine's worker.
    fn worker_name(&self, address: &EngineAddress) -> WorkerId {
        WorkerId(format!("{}{PART_MARK}{}", self.config.id, address.id))
    }

    /// Adds an engine, and tries to drive it until it answers.
    fn await_engine(self: &Arc<Self>, address: EngineAddress, claims: Claims) {
        let (parts, at) = (self.clone(), address.clone());
        // The first attempt waits for the entry, which it looks up.
        let mut engines = self.engines.lock();
        let attempt = move || parts.clone().attempt(at.clone());
        let attempts =
            actors::start_on(&self.runtime, "engine that is awaited", attempt).detached();
        let engine = Engine {
            worker: self.worker_name(&address),
            stage: EngineStage::Awaited {
                fault: "it has not answered yet".to_owned(),
                attempts,
            },
            address,
            claims,
        };
        engines.0.insert(engine.address.id.clone(), engine);
        self.show(&engines);
    }

    /// Follows what the sources say.
    fn follow(self: Arc<Self>, Changes { present, gone }: Changes) {
        self.take_in(&present);
        // Running chunks have their grace, for which nothing else waits.
        for url in gone {
            let parts = self.clone();
            tokio::spawn(async move { parts.let_go(&url).await });
        }
    }

    /// Sees to it that the engines that sources name get a worker, as far as there is room.
    fn take_in(self: &Arc<Self>, urls: &[String]) {
        let mut surplus = 0;
        for address in urls.iter().filter_map(|url| EngineAddress::read(url).ok()) {
            let mut engines = self.engines.lock();
            if let Some(engine) = engines.0.get_mut(&address.id) {
                engine.claims.is_named = true;
                continue;
            }
            let stays = |engine: &&Engine| !matches!(engine.stage, EngineStage::Leaving);
            let count = engines.0.values().filter(stays).count();
            drop(engines);
            if count >= self.config.adoption.engines_max as usize {
                surplus += 1;
            } else if !self.is_draining.load(Ordering::Relaxed) {
                let claims = Claims {
                    is_named: true,
                    ..Claims::default()
                };
                self.await_engine(address, claims);
            }
        }
        if self.surplus.swap(surplus, Ordering::Relaxed) != surplus && surplus > 0 {
            self.families.count(AdoptionOutcome::Full);
            let engines_max = self.config.adoption.engines_max;
            tracing::warn!(
                surplus,
                engines_max,
                "the sources name more engines than worker.adoption.engines_max; the others wait"
            );
        }
    }

    /// Gives up an engine that no source names any more, unless it registered as well.
    async fn let_go(self: Arc<Self>, url: &str) {
        let Ok(address) = EngineAddress::read(url) else {
            return;
        };
        let is_wanted = match self.engines.lock().0.get_mut(&address.id) {
            None => return,
            Some(engine) => {
                engine.claims.is_named = false;
                engine.claims.is_registered
            }
        };
        if !is_wanted {
            // It fails only if the engine is gone already.
            let _ = self.give_up(address.id).await;
        }
    }

    /// Tries to drive an engine until it answers.
    async fn attempt(self: Arc<Self>, address: EngineAddress) {
        let mut pause = ATTEMPT_PAUSE_MIN;
        loop {
            // Others must not wait for an engine that does not answer.
            let outcome = match self.connector.connect(&address).await {
                Err(error) => Err(error),
                Ok(connected) => {
                    let _turn = self.turn.lock().await;
                    let Some(claims) = self.claims_of_awaited(&address) else {
                        return;
                    };
                    self.start_worker(&address, claims, connected, None).await
                }
            };
            let Err(error) = outcome else {
                self.families.count(AdoptionOutcome::Adopted);
                tracing::info!(
                    engine = address.id,
                    "an engine that was awaited has a worker"
                );
                return;
            };
            if !self.keeps_waiting(&address, error) {
                self.keep();
                return;
            }
            tokio::time::sleep(jittered(pause)).await;
            pause = (pause * 2).min(ATTEMPT_PAUSE_MAX);
        }
    }

    /// The claims on an engine, if it is still awaited.
    fn claims_of_awaited(&self, address: &EngineAddress) -> Option<Claims> {
        let engines = self.engines.lock();
        let engine = engines.0.get(&address.id)?;
        matches!(engine.stage, EngineStage::Awaited { .. }).then_some(engine.claims)
    }

    /// Notes why an engine has no worker yet. Returns whether it is tried again: one that a source names is, since it
    /// may be another one by then.
    fn keeps_waiting(&self, address: &EngineAddress, error: ApiError) -> bool {
        let mut engines = self.engines.lock();
        let Some(Engine {
            stage: EngineStage::Awaited { fault, .. },
            claims,
            ..
        }) = engines.0.get_mut(&address.id)
        else {
            return false;
        };
        let cannot_serve = error.kind == ErrorKind::InvalidRequest;
        if cannot_serve && *fault != error.message {
            tracing::warn!(engine = address.id, %error, "an engine that is awaited cannot serve the model");
        }
        if cannot_serve && !claims.is_named {
            engines.0.remove(&address.id);
            self.show(&engines);
            return false;
        }
        *fault = error.message;
        true
    }

    /// Adopts an engine, or returns the one that was adopted.
    async fn adopt(self: &Arc<Self>, request: AdoptRequest) -> Result<AdoptedEngine, ApiError> {
        let address = EngineAddress::read(&request.url)?;
        self.allowed.check(&address)?;
        let _turn = self.turn.lock().await;
        if self.is_draining.load(Ordering::Relaxed) {
            let message = "this process is stopping, and adopts no engine";
            return Err(ApiError::new(ErrorKind::Unavailable, message).with_code(code::DRAINING));
        }
        let lost = {
            let mut engines = self.engines.lock();
            let count = engines.0.len();
            match engines.0.get_mut(&address.id) {
                None => {
                    if count >= self.config.adoption.engines_max as usize {
                        return Err(full(count));
                    }
                    None
                }
                Some(engine) => match &mut engine.stage {
                    EngineStage::Leaving => return Err(leaving(&address)),
                    EngineStage::Driven(driven) if driven.handle.is_working() => {
                        engine.claims.is_registered = true;
                        let shown = engine.shown();
                        drop(engines);
                        self.keep();
                        self.families.count(AdoptionOutcome::Repeated);
                        return Ok(shown);
                    }
                    // It was started anew, so its worker is too.
                    _ => engines.0.remove(&address.id),
                },
            }
        };
        let claims = Claims {
            is_registered: true,
            is_named: lost.as_ref().is_some_and(|engine| engine.claims.is_named),
        };
        match lost.map(|engine| engine.stage) {
            Some(EngineStage::Driven(driven)) => driven.server.leave().await,
            Some(EngineStage::Awaited { attempts, .. }) => attempts.abort(),
            Some(EngineStage::Leaving) | None => {}
        }
        let started = match self.connector.connect(&address).await {
            Ok(connected) => {
                self.start_worker(&address, claims, connected, request.pause)
                    .await
            }
            Err(error) => Err(error),
        };
        self.show(&self.engines.lock());
        self.keep();
        let adopted = started?;
        self.families.count(AdoptionOutcome::Adopted);
        tracing::info!(engine = adopted.id, worker = %adopted.worker, "an engine was adopted");
        Ok(adopted)
    }

    /// Starts the worker of an engine.
    async fn start_worker(
        &self,
        address: &EngineAddress,
        claims: Claims,
        Connected {
            engine,
            weight_version,
        }: Connected,
        pause: Option<PauseMode>,
    ) -> Result<AdoptedEngine, ApiError> {
        let state = StartState {
            pause,
            weight_version,
        };
        let worker = self.worker_name(address);
        let config = self.worker_config(&worker).map_err(not_started)?;
        let metrics = self
            .metrics
            .part("worker", &worker.0)
            .map_err(not_started)?;
        let with = Dependencies {
            engine,
            scheduler: self.scheduler.clone(),
            store: self.store.clone(),
            auth: self.auth.clone(),
            metrics: metrics.metrics().clone(),
        };
        let (port, url) = (
            config.listen.map(|listen| listen.port()),
            config.advertise_url.clone(),
        );
        let listener = WorkerListener::open(&config, &with.auth, &with.metrics);
        let listener = listener.map_err(not_started)?;
        let server = start_in(listener, config, with, state);
        let server = server.await.map_err(not_started)?;
        let driven = DrivenEngine {
            handle: server.handle(),
            server,
            port,
            url,
            _metrics: metrics,
        };
        let engine = Engine {
            address: address.clone(),
            worker,
            stage: EngineStage::Driven(Box::new(driven)),
            claims,
        };
        let shown = engine.shown();
        self.engines.lock().0.insert(address.id.clone(), engine);
        Ok(shown)
    }

    /// The settings of an engine's worker: those of the process, with a name and an address of its own.
    fn worker_config(&self, worker: &WorkerId) -> anyhow::Result<WorkerConfig> {
        let mut config = self.config.clone();
        config.id.clone_from(&worker.0);
        let Some(listen) = config.listen else {
            config.advertise_url = format!("local:{worker}");
            return Ok(config);
        };
        let first = config
            .adoption
            .first_port
            .unwrap_or(listen.port().saturating_add(1));
        let port = free_port(
            listen.ip(),
            first,
            config.adoption.engines_max,
            &self.engines.lock().ports(),
        );
        let port =
            port.context("no port is free for another worker; see worker.adoption.first_port")?;
        config.listen = Some(SocketAddr::new(listen.ip(), port));
        let mut url = Url::parse(&config.advertise_url).context("worker.advertise_url")?;
        let has_port = url.set_port(Some(port)).is_ok();
        anyhow::ensure!(has_port, "worker.advertise_url: must have a host");
        config.advertise_url = url.as_str().trim_end_matches('/').to_owned();
        Ok(config)
    }

    /// Gives up an engine that registered.
    async fn release(self: &Arc<Self>, request: ReleaseRequest) -> Result<AdoptedEngine, ApiError> {
        let named = EngineAddress::read(&request.engine);
        let id = named.map_or(request.engine, |address| address.id);
        let is_named = match self.engines.lock().0.get_mut(&id) {
            None => false,
            Some(engine) => {
                engine.claims.is_registered = false;
                engine.claims.is_named
            }
        };
        if is_named {
            self.keep();
            return Err(named_by_source(&id));
        }
        self.give_up(id).await
    }

    async fn give_up(self: &Arc<Self>, id: String) -> Result<AdoptedEngine, ApiError> {
        let (shown, state) = {
            // No attempt to drive the engine is under way then.
            let _turn = self.turn.lock().await;
            let mut engines = self.engines.lock();
            let engine = engines.0.get_mut(&id).ok_or_else(|| unknown(&id))?;
            if let EngineStage::Leaving = engine.stage {
                return Err(leaving(&engine.address));
            }
            let shown = engine.shown();
            let state = std::mem::replace(&mut engine.stage, EngineStage::Leaving);
            (shown, state)
        };
        // If the process ends meanwhile, the next one does not take it over.
        self.keep();
        match state {
            EngineStage::Driven(driven) => driven.server.leave().await,
            EngineStage::Awaited { attempts, .. } => attempts.abort(),
            EngineStage::Leaving => {}
        }
        let mut engines = self.engines.lock();
        engines.0.remove(&id);
        self.show(&engines);
        self.families.count(AdoptionOutcome::Released);
        tracing::info!(engine = id, "an engine was given up");
        Ok(shown)
    }
}

/// The lowest port of `count` ports from `first` on that no worker and no other process has.
fn free_port(ip: IpAddr, first: u16, count: u32, taken: &[u16]) -> Option<u16> {
    let count = u16::try_from(count).unwrap_or(u16::MAX);
    let last = first.checked_add(count.checked_sub(1)?)?;
    let mut ports = (first..=last).filter(|port| !taken.contains(port));
    ports.find(|port| TcpListener::bind((ip, *port)).is_ok())
}

fn full(engines: usize) -> ApiError {
    let message = format!(
        "this process has {engines} engines, its limit; raise worker.adoption.engines_max, or remove some engines"
    );
    ApiError::new(ErrorKind::Overloaded, message).with_code("engines_limit")
}

fn leaving(address: &EngineAddress) -> ApiError {
    let message = format!(
        "the engine {} is being given up; try again when that has ended",
        address.id
    );
    ApiError::new(ErrorKind::Conflict, message).with_code("engine_leaving")
}

fn named_by_source(id: &str) -> ApiError {
    let message = format!(
        "the engine {id} is named by worker.adoption.sources, so it would come back; take it out there"
    );
    ApiError::new(ErrorKind::Conflict, message).with_code("engine_of_source")
}

fn unknown(id: &str) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    let message = format!("the engine {shown} was not adopted here");
    ApiError::new(ErrorKind::NotFound, message).with_code("engine_not_found")
}

fn not_started(error: anyhow::Error) -> ApiError {
    let message = "the worker of the engine did not start";
    ApiError::new(ErrorKind::Internal, message).with_detail(format!("{error:#}"))
}

/// Which outcome an error counts as.
fn outcome_of(error: &ApiError) -> Option<AdoptionOutcome> {
    match error.kind {
        ErrorKind::InvalidRequest | ErrorKind::Forbidden => Some(AdoptionOutcome::Refused),
        ErrorKind::Overloaded => Some(AdoptionOutcome::Full),
        ErrorKind::NotFound | ErrorKind::Conflict => None,
        _ => Some(AdoptionOutcome::Failed),
    }
}

#[async_trait]
impl EngineAdopter for Adopter {
    async fn adopt(&self, request: AdoptRequest) -> Result<AdoptedEngine, ApiError> {
        let parts = self.parts.clone();
        // It runs to its end, also if the caller hangs up.
        let adopted = self.parts.runtime.spawn(async move {
            let adopted = parts.adopt(request).await;
            if let Some(outcome) = adopted.as_ref().err().and_then(outcome_of) {
                parts.families.count(outcome);
            }
            adopted
        });
        adopted.await.map_err(ApiError::internal)?
    }

    async fn release(&self, request: ReleaseRequest) -> Result<AdoptedEngine, ApiError> {
        let parts = self.parts.clone();
        let release = async move { parts.release(request).await };
        let released = self.parts.runtime.spawn(release);
        released.await.map_err(ApiError::internal)?
    }

    async fn report(&self) -> Result<AdopterReport, ApiError> {
        let engines = self.parts.engines.lock();
        Ok(AdopterReport {
            model: self.parts.config.engine.model.clone(),
            engines_max: self.parts.config.adoption.engines_max,
            engines: engines.0.values().map(Engine::shown).collect(),
        })
    }
}

impl Workers for Adopter {
    fn at(&self, url: &str) -> Arc<dyn Worker> {
        let worker = self.parts.engines.lock().worker_at(url);
        match worker {
            Some(worker) => Arc::new(worker),
            None => Arc::new(GoneWorker),
        }
    }
}

/// A worker whose engine was given up.
struct GoneWorker;

impl GoneWorker {
    fn error() -> ApiError {
        ApiError::new(
            ErrorKind::Unavailable,
            "the engine of this worker was given up",
        )
    }
}

#[async_trait]
impl Worker for GoneWorker {
    async fn chunk(&self, _: ChunkRequest) -> Result<ChunkStream, ApiError> {
        Err(GoneWorker::error())
    }

    async fn cut(&self, _: ChunkCut) -> Result<(), ApiError> {
        Err(GoneWorker::error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_gets_the_first_port_that_nobody_has() {
        let ip = IpAddr::from([127, 0, 0, 1]);
        let held = TcpListener::bind((ip, 0)).unwrap();
        let first = held.local_addr().unwrap().port();
        assert_eq!(free_port(ip, first, 1, &[]), None);
        assert_eq!(free_port(ip, first, 0, &[]), None);
        drop(held);
        assert_eq!(free_port(ip, first, 1, &[]), Some(first));
        assert_eq!(free_port(ip, first, 1, &[first]), None);
        assert_eq!(free_port(ip, u16::MAX, 2, &[]), None);
    }
}
