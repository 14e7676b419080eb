//! The worker: decodes chunks on one engine.
//!
//! One worker drives one engine and composes its batch. [`start`] wires the parts: admission and fencing
//! (`slots`), the decode loop (`decode`, read it first) or, for engines that generate by themselves, the streaming
//! driver (`decode::stream`) and when verify calls pay there (`drive`), one chunk's state (`running`), what is known of the
//! fallback (`fallback`), of what drafts are worth and steps take (`goodput`) and of what drafting brings (`guard`), and the
//! reports to the scheduler (`duty`). The worker's copy of the drafts and outputs on their way to the store are
//! `refrain-draft-replica`. What an engine is stands in [`Engine`].

mod alive;
mod chances;
mod config;
mod decode;
mod drive;
mod duty;
mod engine;
mod fallback;
mod goodput;
mod guard;
mod handle;
mod http;
mod metrics;
mod profile;
mod proposers;
mod router;
mod running;
mod slots;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use refrain_draft_replica::{DraftReplica, RemoteLookup, Uploader};
use refrain_rpc::{DraftStore, Scheduler};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::Server;
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::decode::{Command, DecodeLoop, Outlet, SharedHelpers, StreamDriver};
use crate::duty::Duty;
use crate::fallback::{FallbackWatch, Reports};
use crate::goodput::Goodput;
use crate::guard::Guard;
use crate::handle::Inner;
use crate::metrics::WorkerMetrics;
use crate::profile::profile;
use crate::proposers::Proposers;
use crate::router::Router;
use crate::slots::Slots;

pub use config::{
    ApiKey, DriveMode, Eagle3Config, EngineConfig, EngineKind, FallbackChoice, RouterChoice,
    ScoreThreshold, SpeculationConfig, WorkerConfig,
};
pub use engine::{
    Engine, GenerateRequest, Generated, GeneratedEnd, GeneratedStream, HttpEngine, Introduced,
    Keeping, ServedAs, StreamingCapabilities, StreamingEngine, StreamingLoad, Verified,
    VerifyAbilities, VerifyRequest, VerifyWay, WorkerEngine, connect_external,
};
pub use handle::WorkerHandle;
pub use refrain_draft_replica::{ReplicaConfig, UploadConfig};

/// What a worker works with.
pub struct Dependencies {
    /// The engine it drives.
    pub engine: WorkerEngine,
    /// Where it reports for duty.
    pub scheduler: Arc<dyn Scheduler>,
    /// Where outputs go and drafts come from.
    pub store: Arc<dyn DraftStore>,
    /// Checks namespaces (and callers, if it listens).
    pub auth: MeshAuth,
    /// Where its figures go.
    pub metrics: Metrics,
}

/// A running worker.
pub struct RunningWorker {
    handle: WorkerHandle,
    server: Option<Server>,
    duty: JoinHandle<()>,
    decoding: JoinHandle<()>,
}

/// Starts a worker. It reports to the scheduler at once.
///
/// # Errors
/// The listener cannot be opened, or a metric name is taken.
pub async fn start(config: WorkerConfig, with: Dependencies) -> anyhow::Result<RunningWorker> {
    let metrics = WorkerMetrics::new(&with.metrics, with.engine.served().model)?;
    let slots = Arc::new(Slots::new(
        config.running_max,
        metrics.chunks_running.clone(),
    ));
    let harvest = Uploader::start(
        config.harvest.clone(),
        with.store.clone(),
        metrics.harvest.clone(),
    );
    let reports = Arc::new(Reports::default());
    let engine_ready = Arc::new(AtomicBool::new(true));
    let reader_stall_max = Duration::from_millis(config.reader_stall_ms_max);
    let outlet = Outlet::new(harvest.clone(), metrics.clone());
    // A chunk holds a slot before its command is sent, so this never fills: starts, their cuts, a hand-over; and
    // words to give way, which are said again where there was no room.
    let (commands, inbox) = mpsc::channel(2 * config.running_max as usize + 2);
    let memory = || {
        DraftReplica::new(
            config.memory.clone(),
            config.speculation.max_pattern_tokens,
            with.store.clone(),
            metrics.memory.clone(),
        )
    };
    let (router, memory, decoding) = match &with.engine {
        WorkerEngine::Verifying(engine) => {
            let memory = memory();
            let router = Arc::new(Router::new(&config.speculation, engine.capabilities()));
            let mut goodput = Goodput::new(&config, with.store.clone(), metrics.clone());
            // Before anybody can hear of this worker, so that no request waits for it.
            let time_max = Duration::from_millis(config.profile_ms_max);
            goodput.start_from(&profile(&**engine, config.step_tokens_max, time_max).await);
            let decode = DecodeLoop {
                engine: engine.clone(),
                router: router.clone(),
                fallback: FallbackWatch::new(
                    &config.speculation,
                    &router,
                    reports.clone(),
                    metrics.clone(),
                ),
                guard: Guard::new(&config.speculation, metrics.clone()),
                goodput,
                elsewhere: RemoteLookup::new(
                    with.store.clone(),
                    &config.memory,
                    &router.params,
                    metrics.memory.clone(),
                ),
                proposers: Proposers::new(&config.speculation)
                    .context("starting the threads that look for drafts")?,
                step_tokens_max: config.step_tokens_max,
                prefill_chunk_tokens: config.prefill_chunk_tokens,
                outlet,
                metrics: metrics.clone(),
                engine_ready: engine_ready.clone(),
                reader_stall_max,
            };
            (Some(router), Some(memory), tokio::spawn(decode.run(inbox)))
        }
        WorkerEngine::Streaming(engine) => {
            let helpers = SharedHelpers::new(&config, &**engine, &metrics);
            let remembers = helpers.remember();
            let driver = StreamDriver::new(
                engine.clone(),
                outlet,
                metrics.clone(),
                engine_ready.clone(),
                config.engine.clone(),
                helpers,
                reader_stall_max,
            );
            (
                None,
                remembers.then(memory),
                tokio::spawn(driver.run(inbox)),
            )
        }
    };
    let handle = WorkerHandle {
        inner: Arc::new(Inner {
            commands,
            slots,
            memory,
            harvest,
            auth: with.auth,
            drain: Drain::new(),
            metrics,
            engine: with.engine,
            engine_ready,
            router,
            reports,
            config: config.clone(),
        }),
    };
    let server = match config.listen {
        Some(listen) => Some(http::serve(&config, listen, handle.clone(), &with.metrics)?),
        None => None,
    };
    let duty = Duty::new(handle.clone(), with.scheduler)?;
    // The first report is made here, so that a worker that has started is known where the scheduler is up.
    let pause = duty.report().await;
    let duty = tokio::spawn(duty.go_on(pause));
    Ok(RunningWorker {
        handle,
        server,
        duty,
        decoding,
    })
}

impl RunningWorker {
    /// The worker for callers in this process.
    pub fn handle(&self) -> WorkerHandle {
        self.handle.clone()
    }

    /// Where it listens, if it does.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Stops: takes nothing new, lets chunks run for the configured grace, hands over what is left, and waits
    /// until the store has the outputs and what was learnt of drafts.
    pub async fn drain(self) {
        let RunningWorker {
            handle,
            server,
            duty,
            mut decoding,
        } = self;
        let inner = &handle.inner;
        inner.drain.begin();
        let grace = Duration::from_millis(inner.config.drain_grace_ms);
        let left = inner.drain.finished(grace).await;
        if left > 0 {
            tracing::warn!(
                left,
                "chunks still run after the grace period; handing them over"
            );
            // The loop may be gone already, and then nothing runs.
            let _ = inner.commands.send(Command::HandOver).await;
            inner.drain.finished(HAND_OVER_GRACE).await;
        }
        let store_grace = Duration::from_millis(inner.config.store_grace_ms);
        let waited = Instant::now();
        // The loop goes on meanwhile: readers may still shorten what they were sent last.
        inner.harvest.drain(store_grace).await;
        let left = || store_grace.saturating_sub(waited.elapsed()).max(LAST_GRACE);
        let learnt = tokio::time::timeout(left(), async {
            // The loop may be gone already. It tells the store before it ends.
            let _ = inner.commands.send(Command::End).await;
            let _ = (&mut decoding).await;
        });
        let is_learnt = learnt.await;
        // What was shortened since.
        if !inner.harvest.drain(left()).await {
            tracing::warn!("outputs are left that the draft store did not take");
        }
        if is_learnt.is_err() {
            tracing::warn!(
                "the decode loop did not end in time; what it last learnt of drafts is lost"
            );
            decoding.abort();
        }
        if let Some(memory) = &inner.memory {
            memory.stop();
        }
        duty.abort();
        if let Some(server) = &server {
            server.stop_within(ANSWERS_GRACE).await;
        }
    }
}

/// How long a hand-over may take.
const HAND_OVER_GRACE: Duration = Duration::from_secs(2);
/// How long a stopping worker waits for each of the last things that the draft store is to take, when the store has used
/// up its time.
const LAST_GRACE: Duration = Duration::from_millis(500);
/// How long it waits until what was answered is read.
const ANSWERS_GRACE: Duration = Duration::from_secs(2);
