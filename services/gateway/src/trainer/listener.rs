//! Starts the listener.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use refrain_rpc::{EngineAdopter, Scheduler, Workers};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::{PublicOptions, Readiness, ServeOptions, Server, serve_public};
use refrain_service_kit::telemetry::Metrics;

use super::adopters::Adopters;
use super::data::DataSurface;
use super::fleet::ORDERS;
use super::hold::{Hold, HoldLimits};
use super::in_flight::{InFlight, Outcome};
use super::routes;
use super::state::TrainerState;
use crate::config::GatewayConfig;
use crate::http::GatewayState;
use crate::metrics::GatewayMetrics;

/// The running listener.
pub(crate) struct TrainerListener {
    server: Server,
}

/// The services that the listener needs.
pub(crate) struct TrainerDeps<'a> {
    pub(crate) gateway: &'a Arc<GatewayState>,
    pub(crate) scheduler: Arc<dyn Scheduler>,
    pub(crate) workers: Arc<dyn Workers>,
    pub(crate) adopters: Vec<Arc<dyn EngineAdopter>>,
    pub(crate) drain: Drain,
    pub(crate) readiness: Readiness,
    pub(crate) metrics: &'a Metrics,
}

/// Lets the series of the listener exist, so that their first count is a rise.
fn show(metrics: &GatewayMetrics) {
    for surface in DataSurface::ALL {
        for outcome in Outcome::ALL {
            let labels = [surface.route(), outcome.as_str()];
            metrics.families.trainer_requests.with_label_values(&labels);
        }
    }
    for order in ORDERS {
        for outcome in ["done", "failed"] {
            let labels = [order, outcome];
            metrics.families.trainer_orders.with_label_values(&labels);
        }
    }
}

/// Starts the listener, if the configuration has one.
///
/// # Errors
/// The address cannot be bound, or the files of the certificate cannot be used.
pub(crate) fn listen(
    config: &GatewayConfig,
    deps: TrainerDeps<'_>,
) -> anyhow::Result<Option<TrainerListener>> {
    let trainer = &config.trainer;
    let gateway = deps.gateway;
    show(&gateway.metrics);
    let Some(listen) = trainer.listen else {
        return Ok(None);
    };
    let first = config.models.first().map(|model| model.id.clone());
    let model = trainer.model.clone().or(first);
    let model = model.context("gateway.trainer needs a model")?;
    let tenant = trainer.tenant.clone();
    let tenant = tenant.context("gateway.trainer needs a tenant")?;
    let limits = HoldLimits {
        bytes_max: trainer.held_bytes_max,
        in_flight_max: trainer.in_flight_max,
        held_max: trainer.held_max,
    };
    let metrics = gateway.metrics.clone();
    let state = Arc::new(TrainerState {
        fleet: TrainerState::fleet_of(gateway, &model, deps.scheduler, deps.workers),
        adopters: Adopters::new(deps.adopters),
        gateway: gateway.clone(),
        tenant,
        model,
        body_bytes_max: config.body_bytes_max,
        in_flight: Arc::new(InFlight::new(metrics.clone())),
        hold: Hold::new(limits, deps.drain, metrics),
        scheme: trainer.http.scheme(),
        listen,
    });
    let options = ServeOptions {
        service: "gateway-trainer",
        listen,
        threads: config.threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: trainer.connections_max,
        http: trainer.http.clone(),
    };
    let public = PublicOptions {
        logs_access: true,
        hides_metrics: true,
        page_guard: Some(config.page_guard()),
        ..PublicOptions::default()
    };
    let server = serve_public(options, public, deps.metrics, deps.readiness, move |app| {
        routes::add(&state, app);
    })?;
    let addr = server.addr();
    match addr.ip().is_loopback() {
        true => tracing::info!(%addr, "the gateway's listener for trainers listens"),
        false => tracing::warn!(
            %addr,
            "the gateway's listener for trainers needs no key, and other machines may reach it"
        ),
    }
    Ok(Some(TrainerListener { server }))
}

impl TrainerListener {
    /// The address that it listens on.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Stops the listener, and waits at most `grace` for answers in flight.
    pub(crate) async fn stop_within(&self, grace: Duration) {
        self.server.stop_within(grace).await;
    }
}
