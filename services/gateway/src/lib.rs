//! The edge of the mesh: OpenAI's API for clients, leases and chunks behind it.
//!
//! A request's way: `keys` finds the tenant, `bodies` reads what it sent, `admission` finds a place, `tokenizing` lets a
//! large body wait for its turn, `request` checks every field and makes tokens of the prompt, `relay` gets leases and
//! reads the workers' chunks, `choice` and `text` turn tokens into text, `answer` and `sse` write what the client sees.
//!
//! What it deliberately does not know: which worker is best (the scheduler), what a draft is (the worker),
//! and what was said before (nobody here keeps text).
//!
//! [`start`] makes a gateway out of a [`GatewayConfig`] and [`GatewayDeps`].

mod absence;
mod admission;
mod answer;
mod attempts;
mod bodies;
mod choice;
mod config;
mod http;
mod keys;
mod lease;
mod metrics;
mod models;
mod relay;
mod request;
mod retries;
mod sse;
mod text;
mod tokenizing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{Scheduler, Workers};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::config::Validate;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::{ServeOptions, Server, serve_public};
use refrain_service_kit::mesh::NamespaceSigner;
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::ModelFiles;
use tokio::task::JoinHandle;

pub use config::{GatewayConfig, KeyConfig, ModelConfig};

/// Finds a model's files by what the configuration says of them.
pub type ModelFilesOf = Arc<dyn Fn(&str) -> anyhow::Result<ModelFiles> + Send + Sync>;

/// What a gateway is given.
#[derive(Clone)]
pub struct GatewayDeps {
    /// Grants leases.
    pub scheduler: Arc<dyn Scheduler>,
    /// Finds the workers that leases name.
    pub workers: Arc<dyn Workers>,
    /// Signs namespaces: the gateway alone does.
    pub signer: NamespaceSigner,
    /// Reads models' files.
    pub model_files: ModelFilesOf,
    /// Where its figures go.
    pub metrics: Metrics,
    /// Knowledge of its clock, by which it signs.
    pub clocks: Clocks,
}

/// A running gateway.
pub struct Running {
    server: Server,
    drain: Drain,
    poll: JoinHandle<()>,
    time: Arc<relay::RequestTime>,
    /// Ends requests that nobody drives.
    look_after: JoinHandle<()>,
}

/// How long the readers of requests that are cut off have to take the word of it, beyond the grace of a drain.
const CUT_GRACE: Duration = Duration::from_secs(2);

/// How often a request is tried to be cut off that happens to be polled each time.
const CUT_PAUSE: Duration = Duration::from_millis(5);

/// When a client may try again whose request was cut off: another gateway takes it at once.
const CUT_RETRY_AFTER_MS: u64 = 1_000;

/// How long a first answer of the scheduler is waited for: a gateway starts without one, just not ready.
const FIRST_POLL_TIMEOUT: Duration = Duration::from_millis(500);

/// Starts a gateway.
///
/// # Errors
/// Faults of the configuration, models whose files cannot be used, or an address that is taken.
pub async fn start(config: GatewayConfig, deps: GatewayDeps) -> anyhow::Result<Running> {
    let faults = config.faults();
    anyhow::ensure!(
        faults.is_empty(),
        "gateway configuration: {}",
        faults.join("; ")
    );
    let listen: SocketAddr = config.listen.parse().context("listen")?;
    let metrics = Arc::new(metrics::GatewayMetrics::new(&deps.metrics)?);
    let models = Arc::new(models::Models::new(
        &config.models,
        &*deps.model_files,
        deps.signer.clone(),
    )?);
    let drain = Drain::new();
    let request_max = Duration::from_millis(config.request_ms_max);
    let time = Arc::new(relay::RequestTime::new(request_max));
    let relay = relay::Relay {
        scheduler: deps.scheduler.clone(),
        workers: deps.workers.clone(),
        models: models.clone(),
        metrics: metrics.clone(),
        tasks: tokio::runtime::Handle::current(),
        failures_max: config.failures_max,
        retries: retries::Retries::new(
            config.retry_share,
            config.retries_per_s_min,
            &deps.metrics,
            metrics.rejections.with_label_values(&["retries"]),
        )?,
        retry_backoff: Duration::from_millis(config.retry_backoff_ms),
        worker_idle_max: Duration::from_millis(config.worker_idle_ms_max),
        scheduler_wait: Duration::from_millis(config.scheduler_wait_ms),
        time: time.clone(),
        events_max: config.stream_events_max,
    };
    let gateway = Arc::new(http::Gateway {
        keys: keys::Keys::new(&config.keys, config.anonymous_tenant.clone()),
        models: models.clone(),
        admission: admission::Admission::new(
            config.requests_in_flight_max,
            config.tenant_requests_in_flight_max,
            drain.clone(),
            metrics.in_flight.clone(),
            metrics.rejections.clone(),
        ),
        tokenizing: tokenizing::Tokenizing::new(
            config.tokenizing_bytes_max,
            config.tokenizing_waiting_bytes_max,
            metrics.tokenizing.clone(),
        ),
        relay: Arc::new(relay),
        bodies: bodies::Bodies::new(
            bodies::BodyLimits {
                bytes_max: config.body_bytes_max,
                time_max: Duration::from_millis(config.body_ms_max),
                bodies_max: config.requests_in_flight_max,
                tenant_bodies_max: config.tenant_requests_in_flight_max,
                arrived_bytes_max: config.tokenizing_waiting_bytes_max,
            },
            metrics.bodies.clone(),
            metrics.rejections.clone(),
        ),
        metrics,
        limits: request::RequestLimits {
            choices_max: config.choices_max,
            rollout_chunk_tokens: config.rollout_chunk_tokens,
            chunk_tokens: config.chunk_tokens,
        },
        stream_head_wait: Duration::from_millis(config.stream_head_wait_ms),
        stream_keep_alive: Duration::from_millis(config.stream_keep_alive_ms),
    });
    let every = Duration::from_millis(config.models_poll_ms);
    let first = poll_models(&*deps.scheduler, &models, FIRST_POLL_TIMEOUT).await;
    let poll = tokio::spawn(follow_models(deps.scheduler, models.clone(), every, first));
    let readiness = {
        let (drain, clocks) = (drain.clone(), deps.clocks);
        Arc::new(
            move || match (drain.is_draining(), models.is_any_served()) {
                (true, _) => Err("draining".to_owned()),
                (false, false) => Err("no worker serves any of the models".to_owned()),
                (false, true) => clocks.readiness(),
            },
        )
    };
    let options = ServeOptions {
        service: "gateway",
        listen,
        threads: config.threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: config.connections_max,
    };
    let address = config.address_limit();
    let server = serve_public(options, address, &deps.metrics, readiness, move |app| {
        http::routes(&gateway, app)
    })?;
    tracing::info!(addr = %server.addr(), "gateway listens");
    Ok(Running {
        server,
        drain,
        poll,
        look_after: tokio::spawn(time.clone().look_after()),
        time,
    })
}

impl Running {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Stops: nothing new is taken, what runs may end within `grace`, then its clients are told that it was cut off, and
    /// connections close. Returns how many requests were cut off. It takes two seconds longer than `grace` at most.
    pub async fn drain(self, grace: Duration) -> usize {
        let began = Instant::now();
        self.drain.begin();
        let left = self.drain.finished(grace).await;
        self.poll.abort();
        self.look_after.abort();
        if left == 0 {
            // What was answered may be read for the rest of the grace.
            let rest = grace.saturating_sub(began.elapsed());
            self.server.stop_within(rest).await;
        } else {
            let cut_at = Instant::now();
            let error = cut_off();
            while cut_at.elapsed() < CUT_GRACE {
                self.time.cut(&error);
                if self.drain.finished(CUT_PAUSE).await == 0 {
                    break;
                }
            }
            let rest = CUT_GRACE.saturating_sub(cut_at.elapsed());
            self.server.stop_within(rest).await;
        }
        left
    }
}

fn cut_off() -> ApiError {
    let message = "this gateway is shutting down and cut the request off; try again";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SERVER_IS_DRAINING)
        .with_retry_after_ms(CUT_RETRY_AFTER_MS)
}

/// Asks the scheduler once. Returns whether it answered.
async fn poll_models(
    scheduler: &dyn Scheduler,
    models: &models::Models,
    timeout: Duration,
) -> bool {
    match tokio::time::timeout(timeout, scheduler.models()).await {
        Ok(Ok(served)) => {
            models.update(served);
            true
        }
        _ => false,
    }
}

/// Keeps asking. A scheduler that cannot be reached grants no leases, so no model is ready meanwhile.
async fn follow_models(
    scheduler: Arc<dyn Scheduler>,
    models: Arc<models::Models>,
    every: Duration,
    mut is_reachable: bool,
) {
    loop {
        tokio::time::sleep(every).await;
        let answered = poll_models(&*scheduler, &models, every.max(FIRST_POLL_TIMEOUT)).await;
        if !answered {
            models.update(Vec::new());
        }
        if answered != is_reachable {
            is_reachable = answered;
            match answered {
                true => tracing::info!("scheduler answers"),
                false => tracing::warn!("scheduler does not answer"),
            }
        }
    }
}
