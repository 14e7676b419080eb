//! The worker: decodes chunks of requests on one engine, and drafts for them.
//!
//! **Read first:** `decode.rs`, `DecodeLoop::run`. This is the loop that drives an engine step by step.
//!
//! The folders, from the rim to the core:
//!
//! * `service`: the handle for callers in this process, the HTTP listener, and the heartbeats to the scheduler.
//! * `chunk`: the contract of both drivers, for a chunk from its admission to its last event.
//! * `decode`: the driver for engines that verify drafts. It composes the batch of each step.
//! * `streaming`: the driver for engines that generate by themselves. It relays one stream per chunk.
//! * `orders`: what the orders of trainers leave behind: the pause, and the version of the weights.
//! * `parking`: requests between two chunks, whose state stays here.
//! * `running`: the state of a request while its chunk is decoded, in parts.
//! * `routing`: the router of `refrain-speculation`, which decides who drafts and how much, with its settings, its
//!   metrics and the statistics that the draft store keeps.
//! * `engine`: the traits of engines, and the third-party engines with their wire formats (`engine/dialect`).
//! * `adoption`: engines that come and go while the process runs, with a worker for each; `engine_source` names them.
//! * `config`, `metrics`, `shared`.
//!
//! The worker's copy of the drafts and the upload of outputs are the crate `refrain-draft-replica`.

mod adoption;
mod chunk;
mod config;
mod decode;
mod engine;
mod engine_source;
mod metrics;
mod orders;
mod parking;
mod routing;
mod running;
mod service;
mod shared;
mod streaming;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use refrain_draft_replica::{DraftReplica, Uploader};
use refrain_protocol::engine_order::PauseMode;
use refrain_rpc::{DraftStore, Scheduler};
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::Server;
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::Notify;

use crate::chunk::{Admission, Command, EndOrder, OutputSink};
use crate::decode::DecodeLoop;
use crate::metrics::WorkerMetrics;
use crate::orders::Orders;
use crate::parking::Parking;
use crate::routing::{DraftSettings, HeadReports, Proposers, Routing, profile};
use crate::service::{Heartbeats, OrderedDrain, WorkerParts};
use crate::shared::Shared;
use crate::streaming::{Primer, StreamContext};

pub use adoption::{Adopter, AdopterDeps, AdopterServer, look_up};
pub use config::{
    AdoptionConfig, ApiKey, DrafterConfig, EngineConfig, EngineKind, ExpansionChoice,
    FallbackChoice, PrimerConfig, RouterChoice, SpeculationConfig, WorkerConfig,
};
pub use engine::{
    AttachedDocument, EngineSlots, ExpectedModel, FormAbilities, GenerateRequest, Generated,
    GeneratedEnd, GeneratedStream, HttpEngine, IntroductionCounts, RestoredWeights, SseParser,
    StreamingCapabilities, StreamingEngine, StreamingLoad, TooLong, VerifyingEngine, WorkerEngine,
    connect_third_party,
};
pub use refrain_draft_replica::{ReplicaConfig, UploaderConfig};
pub use service::{EngineWait, WorkerHandle, WorkerListener};

/// The services and the engine that a worker depends on.
pub struct Dependencies {
    /// The engine that the worker drives.
    pub engine: WorkerEngine,
    /// The receiver of heartbeats.
    pub scheduler: Arc<dyn Scheduler>,
    /// The store for outputs and drafts.
    pub store: Arc<dyn DraftStore>,
    /// The verifier of namespaces, and of callers if the worker listens.
    pub auth: MeshAuth,
    /// The registry of metrics.
    pub metrics: Metrics,
}

/// A running worker.
pub struct WorkerServer {
    handle: WorkerHandle,
    server: Option<Server>,
    heartbeats: Actor,
    /// Tells the heartbeats that the worker leaves.
    leaving: Arc<Notify>,
    driver: Actor,
    /// It ends with the worker.
    primer: Option<Actor>,
}

/// The state that a worker starts in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StartState {
    /// The pause that it starts in.
    pub(crate) pause: Option<PauseMode>,
    /// The version of its engine's weights, as far as it is known.
    pub(crate) weight_version: u64,
}

/// Starts a worker. It sends its first heartbeat before this returns.
///
/// # Errors
/// The listener cannot be opened, a metric name is taken, or the system provides no threads or randomness.
pub async fn start(config: WorkerConfig, with: Dependencies) -> anyhow::Result<WorkerServer> {
    let listener = WorkerListener::open(&config, &with.auth, &with.metrics)?;
    start_at(listener, config, with).await
}

/// As [`start`], at a listener that is open already.
///
/// # Errors
/// As [`start`].
pub async fn start_at(
    listener: WorkerListener,
    config: WorkerConfig,
    with: Dependencies,
) -> anyhow::Result<WorkerServer> {
    start_in(listener, config, with, StartState::default()).await
}

/// As [`start_at`], in a state.
async fn start_in(
    listener: WorkerListener,
    config: WorkerConfig,
    with: Dependencies,
    state: StartState,
) -> anyhow::Result<WorkerServer> {
    let model = with.engine.served().model;
    let metrics = WorkerMetrics::new(&with.metrics, model, config.speculation.gain)?;
    let metrics = Arc::new(metrics);
    let uploader = Uploader::start(
        config.uploader.clone(),
        with.store.clone(),
        metrics.uploader.clone(),
    );
    let has_steps = matches!(with.engine, WorkerEngine::Verifying(_));
    let orders = Arc::new(Orders::new(has_steps, metrics.clone()));
    orders.set_weight_version(state.weight_version);
    if let Some(mode) = state.pause {
        let (pause, _) = orders.begin_pause(mode);
        // Nothing runs yet that it could wait for.
        orders.settle(pause);
    }
    let parking = Parking::new(
        &config,
        &with.engine,
        uploader.clone(),
        metrics.clone(),
        orders.clone(),
    );
    let shared = Arc::new(Shared {
        parking: Arc::new(parking),
        orders,
        sink: OutputSink::new(uploader.clone(), metrics.clone()),
        engine_ready: AtomicBool::new(true),
        metrics,
        config,
    });
    let (config, metrics) = (&shared.config, &shared.metrics);
    let reports = Arc::<HeadReports>::default();
    let room = command_queue(config);
    let mut primer_actor = None;
    let ((commands, driver), draft_settings, streams) = match &with.engine {
        WorkerEngine::Verifying(engine) => {
            let decode = decode_loop(&shared, engine.clone(), &with.store, &reports).await?;
            let settings = decode.routing.settings.clone();
            // The loop keeps what it learnt over a panic, and tells its chunks of it.
            let state = Arc::new(tokio::sync::Mutex::new((decode, Vec::new())));
            let run = move |inbox| {
                let state = state.clone();
                async move {
                    let (decode, batch) = &mut *state.lock().await;
                    decode.run(inbox, batch).await;
                }
            };
            let driver = actors::start_with("decode loop", room, run);
            (driver, Some(settings), None)
        }
        WorkerEngine::Streaming(engine) => {
            let primer = config.engine.primer.is_on().then(|| {
                let (shared, store) = (shared.clone(), with.store.clone());
                Arc::new(Primer::new(shared, engine.clone(), store))
            });
            if let Some(primer) = primer.clone() {
                let run = move || primer.clone().run();
                primer_actor = Some(actors::start("primer", run));
            }
            let streams = StreamContext::new(shared.clone(), engine.clone(), primer);
            let streams = Arc::new(streams);
            let context = streams.clone();
            let run = move |inbox| context.clone().run(inbox);
            (
                actors::start_with("streams", room, run),
                None,
                Some(streams),
            )
        }
    };
    // An engine that generates by itself verifies no drafts.
    let replica = has_steps.then(|| {
        DraftReplica::new(
            config.replica.clone(),
            config.speculation.match_tokens_max,
            with.store,
            metrics.replica.clone(),
        )
    });
    if let Some(replica) = &replica {
        replica.forget_erased_of(&uploader);
    }
    let handle = WorkerHandle {
        parts: Arc::new(WorkerParts {
            commands,
            admission: Arc::new(Admission::new(
                config.running_max,
                metrics.families.chunks_running.clone(),
            )),
            replica,
            uploader,
            auth: with.auth,
            drain: Drain::new(),
            ordered_drain: OrderedDrain::new(),
            engine: with.engine,
            streams,
            draft_settings,
            reports,
            shared: shared.clone(),
        }),
    };
    let (server, incarnation) = listener.serve(handle.clone());
    let leaving = Arc::new(Notify::new());
    let heartbeats = Heartbeats::new(handle.clone(), with.scheduler, incarnation);
    // The first one is sent here, so that the scheduler knows a worker that has started.
    let heartbeats = heartbeats.start(leaving.clone()).await;
    Ok(WorkerServer {
        handle,
        server,
        heartbeats,
        leaving,
        driver,
        primer: primer_actor,
    })
}

/// Capacity of the command queue. A chunk holds a slot before its command is sent, so the queue has room for the
/// start and the cut of every chunk, an evacuation and an end. Requests to give way are repeated by heartbeats if
/// they did not fit.
fn command_queue(config: &WorkerConfig) -> usize {
    2 * config.running_max as usize + 2
}

/// The loop for an engine that verifies drafts.
async fn decode_loop(
    shared: &Arc<Shared>,
    engine: Arc<dyn VerifyingEngine>,
    store: &Arc<dyn DraftStore>,
    reports: &Arc<HeadReports>,
) -> anyhow::Result<DecodeLoop> {
    let (config, metrics) = (&shared.config, &shared.metrics);
    let settings = DraftSettings::new(&config.speculation, engine.capabilities());
    let mut routing = Routing::new(
        config,
        Arc::new(settings),
        store.clone(),
        reports.clone(),
        metrics.clone(),
    );
    // Measured before the first heartbeat, so that no request waits for it.
    let time_max = Duration::from_millis(config.profile_ms_max);
    let profile = profile(&*engine, config.step_tokens_max, time_max).await;
    routing.router.start_from_profile(&profile);
    Ok(DecodeLoop {
        shared: shared.clone(),
        engine,
        proposers: Proposers::new().context("starting the threads that propose drafts")?,
        routing,
        weight_version: 0,
    })
}

impl WorkerServer {
    /// The worker for callers in this process.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }

    /// The address of the listener, if there is one.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Stops the worker. It takes no new chunks, lets running ones finish within the configured grace period,
    /// evacuates the rest, and waits until the store has the outputs and the acceptance statistics.
    pub async fn drain(self) {
        self.stop(false).await;
    }

    /// As [`drain`](Self::drain), and the scheduler forgets the worker at once. After a drain it waits for a
    /// successor instead.
    pub(crate) async fn leave(self) {
        self.stop(true).await;
    }

    async fn stop(self, leaves: bool) {
        let WorkerServer {
            handle,
            server,
            heartbeats,
            leaving,
            driver,
            primer,
        } = self;
        drop(primer);
        let parts = &handle.parts;
        end_chunks(parts).await;
        parts.shared.parking.close();
        let store_grace = Duration::from_millis(parts.shared.config.store_grace_ms);
        let began = Instant::now();
        // The driver still runs: readers may still shorten the outputs that they received last.
        parts.uploader.drain(store_grace).await;
        let left = || store_grace.saturating_sub(began.elapsed()).max(LAST_GRACE);
        let end_driver = tokio::time::timeout(left(), async {
            // The driver may have stopped already. It uploads the acceptance statistics before it ends.
            let _ = parts.commands.send(Command::Stop).await;
            driver.ended().await;
        });
        let has_ended = end_driver.await.is_ok();
        // Outputs that were shortened since.
        if !parts.uploader.drain(left()).await {
            tracing::warn!("some outputs could not be uploaded to the draft store");
        }
        if !has_ended {
            tracing::warn!("the driver did not end in time; its last statistics are lost");
            driver.abort();
        }
        if let Some(replica) = &parts.replica {
            replica.stop();
        }
        if leaves {
            leaving.notify_one();
            // The scheduler forgets a silent worker as well, only later.
            let _ = tokio::time::timeout(LEAVE_GRACE, heartbeats.ended()).await;
        }
        heartbeats.abort();
        if let Some(server) = &server {
            server.stop_within(RESPONSES_GRACE).await;
        }
    }
}

/// Refuses new chunks, lets running ones finish within the grace period, and evacuates the rest.
async fn end_chunks(parts: &WorkerParts) {
    parts.drain.begin();
    let grace = Duration::from_millis(parts.shared.config.evacuate_after_ms);
    let left = parts.drain.finished(grace).await;
    if left > 0 {
        tracing::warn!(left, "evacuating chunks that outlasted the grace period");
        // The driver may have stopped already, and then no chunk runs.
        let evacuate = Command::EndChunks(EndOrder::Evacuate);
        let _ = parts.commands.send(evacuate).await;
        parts.drain.finished(EVACUATION_GRACE).await;
    }
}

/// Time for an evacuation.
const EVACUATION_GRACE: Duration = Duration::from_secs(2);
/// Time for each of the last uploads to the draft store, once the store has used up its grace period.
const LAST_GRACE: Duration = Duration::from_millis(500);
/// Time for the last heartbeat of a worker that leaves.
const LEAVE_GRACE: Duration = Duration::from_secs(3);
/// Time until the callers have read their last responses.
const RESPONSES_GRACE: Duration = Duration::from_secs(2);
