//! The edge of the mesh: the APIs of OpenAI and Anthropic for clients, leases and chunks behind it.
//!
//! The way of a request: `intake` finds the tenant by its key, reads the body, admits the request, and lets a large
//! body wait for its turn. `request` checks all fields and turns the prompt into tokens. `relay` gets leases, reads
//! the chunks of workers, and turns their tokens into text, reasoning and calls. `response` writes what the client
//! sees, whole or as a stream of events. `surfaces` has the other APIs, whose bodies become those of chats. `usage`
//! counts for bills and budgets. All steps but the first have one driver: the task that writes to the client.
//!
//! Read first: `http/generate.rs`, which calls these modules in that order, then `relay/request_run.rs`.
//!
//! The gateway deliberately does not know which worker is best (the scheduler does), what a draft is (the worker
//! does), and what was generated before: it asks the draft store for lengths only. It stores only the responses that
//! clients may continue, in memory.
//!
//! [`start`] makes a gateway out of a [`GatewayConfig`] and [`GatewayDeps`].

mod admin;
mod config;
mod console;
mod http;
mod intake;
mod metrics;
mod models;
mod operations;
mod relay;
mod request;
mod response;
mod stream_shape;
mod surfaces;
pub mod tenants;
mod trainer;
mod usage;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{DraftStore, EngineAdopter, MeshAdmin, Scheduler, Workers};
use refrain_service_kit::backoff::jittered;
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::config::Validate;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::{PublicOptions, Readiness, ServeOptions, Server, serve_public};
use refrain_service_kit::mesh::NamespaceSigner;
use refrain_service_kit::tasks;
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::{ModelFiles, STAGE};
use tokio::task::JoinHandle;

pub use admin::{OperatorConfig, OperatorToken};
pub use config::{GatewayConfig, GatewayTuning, KeyConfig, ModelConfig};
pub use tenants::LimitsRedisConfig;
pub use trainer::TrainerConfig;

/// Reads the files of a model from the place that its configuration names.
pub type ModelFilesOf = Arc<dyn Fn(&str) -> anyhow::Result<ModelFiles> + Send + Sync>;

/// The services and shared objects that a gateway is given.
#[derive(Clone)]
pub struct GatewayDeps {
    /// Grants leases.
    pub scheduler: Arc<dyn Scheduler>,
    /// Finds the workers that leases name.
    pub workers: Arc<dyn Workers>,
    /// The processes that adopt engines which register with the listener for trainers.
    pub adopters: Vec<Arc<dyn EngineAdopter>>,
    /// Keeps the logs of groups, and knows the lengths of earlier outputs.
    pub store: Arc<dyn DraftStore>,
    /// The services that operators look at and give orders to.
    pub mesh: MeshAdmin,
    /// Signs namespaces, which only the gateway does.
    pub signer: NamespaceSigner,
    /// Reads the files of models.
    pub model_files: ModelFilesOf,
    /// The registry of its metrics.
    pub metrics: Metrics,
    /// The comparison of its clock with others, since signatures have a time.
    pub clocks: Clocks,
}

/// The handle of a running gateway.
pub struct GatewayServer {
    server: Server,
    /// The listener for operators, which stays until all requests have ended.
    operations: Option<Server>,
    /// The listener for trainers.
    trainer: Option<trainer::TrainerListener>,
    drain: Drain,
    models_poll: JoinHandle<()>,
    /// Follows the tenants until it is dropped.
    _tenants_follower: tenants::TenantsFollower,
    usage: usage::UsageService,
    time: Arc<relay::RequestTime>,
    /// Ends overdue requests that nobody drives.
    end_overdue: JoinHandle<()>,
}

/// How long the clients of requests that are cut off have to read the error, after the grace of a drain.
const CUT_GRACE: Duration = Duration::from_secs(2);

/// How long calls to the operations listener may take after all requests have ended.
const OPERATIONS_GRACE: Duration = Duration::from_secs(1);

/// How much later than the gateway the listener refuses a late body, milliseconds.
const BODY_SLACK_MS: u64 = 1_000;

/// Pause before another attempt to cut off a request that was being polled.
const CUT_PAUSE: Duration = Duration::from_millis(5);

/// Time after which a client may try again whose request was cut off. Another gateway takes it at once.
const CUT_RETRY_AFTER_MS: u64 = 1_000;

/// How long the start waits for a first answer of the scheduler. Without one the gateway starts, but is not ready.
const FIRST_POLL_TIMEOUT: Duration = Duration::from_millis(500);

/// Starts a gateway.
///
/// # Errors
/// The configuration has faults, the files of a model cannot be used, or the address is taken.
pub async fn start(config: GatewayConfig, deps: GatewayDeps) -> anyhow::Result<GatewayServer> {
    let faults = config.faults();
    anyhow::ensure!(
        faults.is_empty(),
        "faults in the configuration of the gateway: {}",
        faults.join("; ")
    );
    let listen: SocketAddr = config.listen.parse().context("listen")?;
    let metrics = Arc::new(metrics::GatewayMetrics::new(&deps.metrics)?);
    let models = Arc::new(models::Models::new(
        &config.models,
        &*deps.model_files,
        deps.signer.clone(),
    )?);
    for model in &config.models {
        metrics.serves(&model.id);
    }
    let tuning = config.tuning.clone();
    let drain = Drain::new();
    // Any single body can wait, however large bodies may be.
    let waiting_bytes_max = tuning
        .tokenizing_waiting_bytes_max
        .max(config.body_bytes_max);
    let rollout_max = match config.rollout_ms_max {
        0 => Duration::MAX,
        most => Duration::from_millis(most),
    };
    let time = Arc::new(relay::RequestTime::new(
        Duration::from_millis(config.request_ms_max),
        rollout_max,
    ));
    let relay = relay::RelayContext {
        scheduler: deps.scheduler.clone(),
        workers: deps.workers.clone(),
        memory: relay::DraftMemory::new(
            deps.store.clone(),
            metrics.clone(),
            tokio::runtime::Handle::current(),
        ),
        models: models.clone(),
        metrics: metrics.clone(),
        tasks: tokio::runtime::Handle::current(),
        retries: relay::RetryBudget::new(
            config.retry_share,
            tuning.retries_per_s_min,
            &deps.metrics,
            metrics
                .families
                .rejections
                .with_label_values(&[metrics::NONE, "retries"]),
        )?,
        scheduler_wait: Duration::from_millis(config.scheduler_wait_ms),
        rollout_scheduler_wait: Duration::from_millis(config.rollout_scheduler_wait_ms),
        groups: relay::ImplicitGroups::new(
            Duration::from_millis(config.implicit_group_window_ms),
            config.implicit_groups_max,
            metrics.families.implicit_groups.clone(),
        ),
        time: time.clone(),
        tuning: tuning.clone(),
    };
    let anonymous = config.anonymous_tenant.clone();
    let directory = tenants::Directory::new(&config.keys, anonymous);
    let directory = Arc::new(match &config.jwt {
        Some(_) => directory.beside_tokens(),
        None => directory,
    });
    let jwt = match config.jwt.clone() {
        Some(jwt) => Some(tenants::jwt::JwtVerifier::start(jwt, metrics.clone()).await?),
        None => None,
    };
    let redis = config.limits_redis.clone();
    let redis = redis.map(|redis| tenants::RedisCounts::start(redis, &deps.metrics));
    let redis = redis.transpose().context("limits_redis")?;
    let limiter = tenants::Limiter::with_redis(config.limit_share, redis, metrics.clone());
    let readiness: Readiness = {
        let (drain, models, clocks) = (drain.clone(), models.clone(), deps.clocks);
        let (directory, budgets) = (directory.clone(), limiter.budgets().clone());
        let usage_wait = tuning.usage_wait;
        // Engines can only register once this gateway is reached.
        let adopts = !deps.adopters.is_empty();
        Arc::new(move || {
            if drain.is_draining() {
                return Err("draining".to_owned());
            }
            if !adopts {
                models.check_served()?;
            }
            directory.check_known().map_err(|error| error.message)?;
            if directory.has_budgets() {
                budgets.readiness(usage_wait)?;
            }
            clocks.readiness()
        })
    };
    let source = match &config.tenants_file {
        Some(path) => tenants::TenantsSource::File(path.clone()),
        None if config.tenants_in_store => {
            let store = tenants::StoreTenants::new(deps.store.clone());
            tenants::TenantsSource::Store(Arc::new(store))
        }
        None => tenants::TenantsSource::None,
    };
    let tenants_follower = tenants::TenantsFollower::start(
        source.clone(),
        config.tenants_cache_file.clone(),
        directory.clone(),
        limiter.clone(),
        metrics.clone(),
    )
    .await?;
    let admin = Arc::new(admin::AdminState {
        source,
        store: deps.store.clone(),
        audit_file: config.audit_file.clone(),
        metrics: metrics.clone(),
        figures: admin::FigureSources::new(
            deps.metrics.clone(),
            deps.mesh.metrics.clone(),
            deps.scheduler.clone(),
            readiness.clone(),
            config.models.iter().map(|model| model.id.clone()).collect(),
        ),
        mesh: deps.mesh,
    });
    let refusals = metrics.families.admin_token_refusals.clone();
    let operators = Arc::new(admin::Operators::new(&config.operators, refusals));
    let requests_max = config
        .requests_in_flight_max
        .saturating_add(config.rollouts_in_flight_max);
    let stored = Arc::new(surfaces::ResponseStore::new(
        surfaces::StoreLimits {
            bytes_max: config.responses_stored_bytes_max,
            tenant_responses_max: tuning.responses_tenant_max,
            age_max: tuning.responses_age_max,
        },
        metrics.clone(),
    ));
    let forgets = stored.clone();
    let usage = usage::UsageService::start(
        config.usage_dir.as_deref(),
        requests_max,
        deps.store.clone(),
        limiter.budgets(),
        Arc::new(move |tenant, age| forgets.forget_tenant(tenant, age, Instant::now())),
        &metrics,
    )?;
    let gateway = Arc::new(http::GatewayState {
        usage: usage.usage(),
        callers: tenants::Callers::new(directory, jwt),
        limiter,
        urgent_shares: tenants::UrgentShares::default(),
        models: models.clone(),
        admission: intake::Admission::new(
            admission_limits(&config),
            drain.clone(),
            metrics.clone(),
        ),
        tokenizing: intake::TokenizingLimiter::new(
            tuning.tokenizing_bytes_max,
            waiting_bytes_max,
            metrics.clone(),
        ),
        forms: intake::FormCheck::new(
            intake::FormLimits {
                compiling_max: config.forms_compiling_max,
                waiting_max: config.forms_waiting_max,
                bytes_max: config.form_bytes_max,
            },
            metrics.clone(),
        ),
        tokenizing_threads: intake::TokenizingThreads::start(config.threads)?,
        relay: Arc::new(relay),
        bodies: intake::BodyReader::new(
            intake::BodyLimits {
                bytes_max: config.body_bytes_max,
                time_max: config.http.body_time_max(),
                bodies_max: config.requests_in_flight_max,
                tenant_bodies_max: config.tenant_requests_in_flight_max,
                arrived_bytes_max: waiting_bytes_max,
            },
            metrics.clone(),
        ),
        stored,
        metrics,
        unknown_fields: intake::UnknownFields::new(config.strict_fields),
        tuning,
        readiness: readiness.clone(),
    });
    let trainer = trainer::listen(
        &config,
        trainer::TrainerDeps {
            gateway: &gateway,
            scheduler: deps.scheduler.clone(),
            workers: deps.workers.clone(),
            adopters: deps.adopters.clone(),
            drain: drain.clone(),
            readiness: readiness.clone(),
            metrics: &deps.metrics,
        },
    )?;
    let period = config.tuning.models_poll;
    let first = poll_models(&*deps.scheduler, &models, FIRST_POLL_TIMEOUT).await;
    let follow = {
        let (scheduler, models) = (deps.scheduler, models.clone());
        move || follow_models(scheduler.clone(), models.clone(), period, first)
    };
    let models_poll = tokio::spawn(tasks::restarted("models", follow));
    let has_console = config.console == Some(true);
    let listen_for_operators = |listen: SocketAddr| {
        let (metrics, ready, gateway) = (&deps.metrics, readiness.clone(), gateway.clone());
        let (admin, operators) = (admin.clone(), operators.clone());
        operations::listen(listen, &config, metrics, ready, move |app| {
            http::operations_routes(&gateway, app);
            admin::routes(&admin, &operators, app);
            if has_console {
                console::routes(app);
            }
        })
    };
    let operations = match config.operations_listen {
        None => None,
        Some(listen) => Some(match listen_for_operators(listen) {
            Err(_) if config.is_trial => listen_for_operators((listen.ip(), 0).into())?,
            listener => listener.context("gateway.operations_listen cannot be used")?,
        }),
    };
    let mut http = config.http.clone();
    // Bodies that are late are refused by `BodyReader`, which counts them. The listener's own limit comes after it.
    http.body_ms_max = http.body_ms_max.saturating_add(BODY_SLACK_MS);
    let options = ServeOptions {
        service: "gateway",
        listen,
        threads: config.threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: config.connections_max,
        http,
    };
    let public = PublicOptions {
        address: config.address_limit(),
        cors_origins: config.cors_origins.clone(),
        logs_access: true,
        hides_metrics: operations.is_some() && !config.shows_metrics,
        page_guard: None,
    };
    let server = serve_public(options, public, &deps.metrics, readiness, move |app| {
        http::routes(&gateway, app);
    })
    .context("the listener of gateway.listen, which --listen of `refrain up` sets")?;
    tracing::info!(addr = %server.addr(), "the gateway listens");
    match &operations {
        Some(operations) => {
            tracing::info!(addr = %operations.addr(), "the gateway's operations listener listens");
        }
        None if !server.addr().ip().is_loopback() => tracing::warn!(
            addr = %server.addr(),
            "whoever reaches this address can read /metrics, which name the tenants; set gateway.operations_listen"
        ),
        None => {}
    }
    Ok(GatewayServer {
        server,
        operations,
        trainer,
        drain,
        models_poll,
        _tenants_follower: tenants_follower,
        usage,
        end_overdue: {
            let time = time.clone();
            let end = move || time.clone().end_overdue_requests();
            tokio::spawn(tasks::restarted("overdue requests", end))
        },
        time,
    })
}

fn admission_limits(config: &GatewayConfig) -> intake::AdmissionLimits {
    intake::AdmissionLimits {
        interactive: intake::ClassLimits {
            requests_max: config.requests_in_flight_max,
            tenant_requests_max: config.tenant_requests_in_flight_max,
        },
        rollouts: intake::ClassLimits {
            requests_max: config.rollouts_in_flight_max,
            tenant_requests_max: config.tenant_rollouts_in_flight_max,
        },
    }
}

impl GatewayServer {
    /// The address that it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// The address of the operations listener, if there is one.
    pub fn operations_addr(&self) -> Option<SocketAddr> {
        self.operations.as_ref().map(Server::addr)
    }

    /// The address of the listener for trainers, if there is one.
    pub fn trainer_addr(&self) -> Option<SocketAddr> {
        self.trainer.as_ref().map(trainer::TrainerListener::addr)
    }

    /// Stops the gateway. It takes nothing new and waits at most `grace` for requests in flight. Then it cuts off the
    /// others with an error and closes the connections, which takes at most two seconds more. Returns the number of
    /// requests that were cut off.
    pub async fn drain(self, grace: Duration) -> usize {
        let began = Instant::now();
        self.drain.begin();
        let left = self.drain.finished(grace).await;
        self.models_poll.abort();
        self.end_overdue.abort();
        if left == 0 {
            // Clients may read their answers for the rest of the grace.
            let rest = grace.saturating_sub(began.elapsed());
            self.stop_within(rest).await;
        } else {
            let cut_at = Instant::now();
            let error = cut_off();
            while cut_at.elapsed() < CUT_GRACE {
                self.time.cut_all(&error);
                if self.drain.finished(CUT_PAUSE).await == 0 {
                    break;
                }
            }
            let rest = CUT_GRACE.saturating_sub(cut_at.elapsed());
            self.stop_within(rest).await;
        }
        self.usage.close().await;
        if let Some(operations) = &self.operations {
            operations.stop_within(OPERATIONS_GRACE).await;
        }
        left
    }

    /// Stops the listeners of clients, and waits at most `rest` for answers in flight.
    async fn stop_within(&self, rest: Duration) {
        let trainer = async {
            if let Some(trainer) = &self.trainer {
                trainer.stop_within(rest).await;
            }
        };
        tokio::join!(self.server.stop_within(rest), trainer);
    }
}

fn cut_off() -> ApiError {
    let message = "this gateway is shutting down and cut the request off; try again";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SERVER_IS_DRAINING)
        .with_retry_after_ms(CUT_RETRY_AFTER_MS)
}

/// Asks the scheduler once which models are served. Returns whether it answered.
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

/// Keeps asking the scheduler. One that cannot be reached grants no leases, so no model is ready meanwhile.
async fn follow_models(
    scheduler: Arc<dyn Scheduler>,
    models: Arc<models::Models>,
    period: Duration,
    mut is_reachable: bool,
) {
    loop {
        tokio::time::sleep(jittered(period)).await;
        let answered = poll_models(&*scheduler, &models, period.max(FIRST_POLL_TIMEOUT)).await;
        if !answered {
            models.update(Vec::new());
        }
        if answered != is_reachable {
            is_reachable = answered;
            match answered {
                true => tracing::info!("the scheduler answers"),
                false => {
                    tracing::warn!("the scheduler does not answer; no model is ready meanwhile");
                }
            }
        }
    }
}
