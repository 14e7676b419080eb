//! The edge of the mesh: the APIs of OpenAI and Anthropic for clients, leases and chunks behind it.
//!
//! The way of a request: `intake` reads the body, admits the request, and lets a large body wait for its turn.
//! `request` checks all fields and turns the prompt into tokens. `relay` gets leases, reads the chunks of workers,
//! and turns their tokens into text, reasoning and calls. `response` writes what the client sees, whole or as a
//! stream of events. `surfaces` has the other APIs, whose bodies become those of chats. The crate `refrain-accounts`
//! knows the caller and counts for bills and budgets. All steps but the first have one driver: the task that writes
//! to the client.
//!
//! Read first: `http/generate.rs`, which calls these modules in that order, then `relay/request_run.rs`.
//!
//! The gateway deliberately does not know which worker is best (the scheduler does), what a draft is (the worker
//! does), and what was generated before: it asks the draft store for lengths only. It stores only the responses that
//! clients may continue, in memory.
//!
//! [`Gateway::build`] makes a gateway out of a [`GatewayConfig`] and [`GatewayDeps`], and [`Gateway::listen`] opens
//! its listeners. Routes for operators come from outside. A listener for trainers does as well: it carries its
//! requests out by a [`GatewayHandle`].

mod config;
mod deps;
mod handle;
mod http;
mod intake;
mod metrics;
mod models;
mod operations;
mod passthrough;
mod relay;
mod request;
mod response;
mod surfaces;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web;
use anyhow::Context;
use refrain_accounts::{Accounts, AccountsDeps, AccountsService};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::config::Validate;
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::{PublicOptions, Readiness, ServeOptions, Server, serve_public};

use http::GatewayState;
use metrics::GatewayMetrics;
use models::Models;
use passthrough::Passthrough;
use relay::{RelayContext, RequestTime};
use surfaces::StoreLimits;

pub use config::{GatewayConfig, GatewayTuning, PassthroughConfig, SessionsConfig, TrainerConfig};
pub use deps::{GatewayDeps, ModelFilesOf};
pub use handle::{GatewayHandle, Limit, WaitingLine};
pub use http::{EnteredRequest, announced_bytes};
pub use models::{BeyondContext, KnownWeights, ModelConfig};
pub use refrain_output_parsers::Event;
pub use relay::{
    ChoiceFigures, ChoiceProgress, EventObserver, OutputToken, RelayEvent, RequestEvents,
    RequestSummary,
};
pub use request::{
    GenerateRequest, KnownTurns, ParsedRequest, RequestReader, SampleBody, SamplingFields,
    TemplatedChat, check_supported, read, session_of_heads,
};
pub use response::{
    SurfaceWriter, TokenNames, add_weight_spans, chat_logprobs, chosen, prompt_logprobs,
    read_to_end, text, top, write_frame,
};
pub use surfaces::{AnswerShape, ResponseStore, Surface};

/// A gateway without listeners.
pub struct Gateway {
    config: GatewayConfig,
    deps: GatewayDeps,
    handle: GatewayHandle,
    accounts: AccountsService,
}

/// The handle of a running gateway.
pub struct GatewayServer {
    server: Server,
    /// The listener for operators, which stays until all requests have ended.
    operations: Option<Server>,
    /// The listener for trainers.
    trainer: Option<Server>,
    drain: Drain,
    models_poll: Actor,
    accounts: AccountsService,
    time: Arc<RequestTime>,
    /// Ends overdue requests that nobody drives.
    end_overdue: Actor,
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

impl Gateway {
    /// Makes a gateway that is ready to listen.
    ///
    /// # Errors
    /// The configuration has faults, or the files of a model or of tenants cannot be used.
    pub async fn build(config: GatewayConfig, deps: GatewayDeps) -> anyhow::Result<Self> {
        let faults = config.faults();
        anyhow::ensure!(
            faults.is_empty(),
            "faults in the configuration of the gateway: {}",
            faults.join("; ")
        );
        let metrics = Arc::new(GatewayMetrics::new(&deps.metrics)?);
        let models = Models::new(&config.models, &*deps.model_files, deps.signer.clone())?;
        let models = Arc::new(models);
        for model in &config.models {
            metrics.serves(&model.id);
        }
        let drain = Drain::new();
        let relay = RelayContext::new(&config, &deps, models.clone(), metrics.clone())?;
        let stored = Arc::new(ResponseStore::new(store_limits(&config), metrics.clone()));
        let accounts = start_accounts(&config, &deps, &metrics, stored.clone()).await?;
        let readiness = readiness(&config, &deps, &drain, &models, accounts.accounts());
        let bytes_max = waiting_bytes_max(&config);
        let state = GatewayState {
            accounts: accounts.accounts(),
            models,
            admission: intake::Admission::new(
                admission_limits(&config),
                drain.clone(),
                metrics.clone(),
            ),
            tokenizing: intake::TokenizingLimiter::new(
                config.tuning.tokenizing_bytes_max,
                bytes_max,
                metrics.clone(),
            ),
            forms: intake::FormCheck::new(form_limits(&config), metrics.clone()),
            tokenizing_threads: intake::TokenizingThreads::start(config.threads)?,
            relay: Arc::new(relay),
            bodies: intake::BodyReader::new(body_limits(&config, bytes_max), metrics.clone()),
            stored,
            metrics,
            unknown_fields: intake::UnknownFields::new(config.strict_fields),
            passthrough: Passthrough::new(&config.passthrough)?,
            tuning: config.tuning.clone(),
            readiness,
        };
        Ok(Gateway {
            handle: GatewayHandle::new(Arc::new(state), drain),
            config,
            deps,
            accounts,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &GatewayConfig {
        &self.config
    }

    /// The gateway as other listeners use it.
    pub fn handle(&self) -> &GatewayHandle {
        &self.handle
    }

    /// Opens the listeners of clients and operators. `operations_routes` adds routes to that of operators. The
    /// listener for trainers is open already, and closes with the others.
    ///
    /// # Errors
    /// An address is taken, or the files of a certificate cannot be used.
    pub async fn listen<F>(
        self,
        trainer: Option<Server>,
        operations_routes: F,
    ) -> anyhow::Result<GatewayServer>
    where
        F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
    {
        let (config, metrics) = (&self.config, &self.deps.metrics);
        let state = self.handle.state().clone();
        let (models, time) = (state.models.clone(), state.relay.time.clone());
        let period = config.tuning.models_poll;
        let models_poll = models::poll_served(self.deps.scheduler, models, period).await;
        let readiness = self.handle.readiness();
        let operations = operations::listen(config, metrics, readiness, move |app| {
            http::operations_routes(app);
            operations_routes(app);
        })?;
        let (options, public) = public_options(config, operations.is_some())?;
        let server = serve_public(options, public, metrics, readiness.clone(), move |app| {
            http::routes(&state, app);
        })
        .context("the listener of gateway.listen, which --listen of `refrain up` sets")?;
        log_addresses(&server, operations.as_ref());
        let overdue = time.clone();
        let end_overdue = move || overdue.clone().end_overdue_requests();
        Ok(GatewayServer {
            server,
            operations,
            trainer,
            drain: self.handle.drain().clone(),
            models_poll,
            accounts: self.accounts,
            time,
            end_overdue: actors::start("overdue requests", end_overdue),
        })
    }
}

async fn start_accounts(
    config: &GatewayConfig,
    deps: &GatewayDeps,
    metrics: &GatewayMetrics,
    stored: Arc<ResponseStore>,
) -> anyhow::Result<AccountsService> {
    let deps = AccountsDeps {
        store: deps.store.clone(),
        registry: deps.metrics.clone(),
        metrics: metrics.accounts.clone(),
        requests_max: config
            .requests_in_flight_max
            .saturating_add(config.rollouts_in_flight_max),
        on_erasure: Arc::new(move |tenant, age| stored.forget_tenant(tenant, age, Instant::now())),
    };
    AccountsService::start(config.accounts(), deps).await
}

fn readiness(
    config: &GatewayConfig,
    deps: &GatewayDeps,
    drain: &Drain,
    models: &Arc<Models>,
    accounts: Arc<Accounts>,
) -> Readiness {
    let (drain, models, clocks) = (drain.clone(), models.clone(), deps.clocks.clone());
    let (adopts_engines, usage_wait) = (deps.adopts_engines, config.tuning.usage_wait);
    Arc::new(move || {
        if drain.is_draining() {
            return Err("draining".to_owned());
        }
        if !adopts_engines {
            models.check_served()?;
        }
        accounts.readiness(usage_wait)?;
        clocks.readiness()
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

/// Bytes of bodies that wait. Any single body can wait, however large bodies may be.
fn waiting_bytes_max(config: &GatewayConfig) -> usize {
    let most = config.tuning.tokenizing_waiting_bytes_max;
    most.max(config.body_bytes_max)
}

fn body_limits(config: &GatewayConfig, arrived_bytes_max: usize) -> intake::BodyLimits {
    intake::BodyLimits {
        bytes_max: config.body_bytes_max,
        time_max: config.http.body_time_max(),
        bodies_max: config.requests_in_flight_max,
        tenant_bodies_max: config.tenant_requests_in_flight_max,
        arrived_bytes_max,
    }
}

fn form_limits(config: &GatewayConfig) -> intake::FormLimits {
    intake::FormLimits {
        compiling_max: config.forms_compiling_max,
        waiting_max: config.forms_waiting_max,
        bytes_max: config.form_bytes_max,
    }
}

fn store_limits(config: &GatewayConfig) -> StoreLimits {
    StoreLimits {
        bytes_max: config.responses_stored_bytes_max,
        tenant_responses_max: config.tuning.responses_tenant_max,
        age_max: config.tuning.responses_age_max,
    }
}

/// The options of the listener of clients.
fn public_options(
    config: &GatewayConfig,
    has_operations: bool,
) -> anyhow::Result<(ServeOptions, PublicOptions)> {
    let mut http = config.http.clone();
    // Bodies that are late are refused by `BodyReader`, which counts them. The listener's own limit comes after it.
    http.body_ms_max = http.body_ms_max.saturating_add(BODY_SLACK_MS);
    let options = ServeOptions {
        service: "gateway",
        listen: config.listen.parse().context("listen")?,
        threads: config.threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: config.connections_max,
        http,
    };
    let public = PublicOptions {
        address: config.address_limit(),
        cors_origins: config.cors_origins.clone(),
        logs_access: true,
        hides_metrics: has_operations && !config.shows_metrics,
        page_guard: None,
    };
    Ok((options, public))
}

fn log_addresses(server: &Server, operations: Option<&Server>) {
    tracing::info!(addr = %server.addr(), "the gateway listens");
    if let Some(operations) = operations {
        tracing::info!(addr = %operations.addr(), "the gateway's operations listener listens");
    } else if !server.addr().ip().is_loopback() {
        tracing::warn!(
            addr = %server.addr(),
            "whoever reaches this address can read /metrics, which name the tenants; set gateway.operations_listen"
        );
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
        self.trainer.as_ref().map(Server::addr)
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
        self.accounts.close().await;
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
