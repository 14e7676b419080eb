//! Starts the listener.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use refrain_gateway::{GatewayConfig, GatewayDeps, GatewayHandle};
use refrain_rpc::EngineAdopter;
use refrain_service_kit::actors;
use refrain_service_kit::http::{PublicOptions, ServeOptions, Server, serve_public};

use super::adopters::Adopters;
use super::data::DataSurface;
use super::fleet::{Fleet, ORDERS};
use super::hold::{HELD_LIMIT, Hold};
use super::in_flight::{InFlight, Outcome};
use super::metrics::TrainerFamilies;
use super::routes;
use super::sessions::{SESSIONS_LIMIT, SessionTable};
use super::state::TrainerState;

/// Pause between searches for sessions that have expired.
const EXPIRY_PERIOD: Duration = Duration::from_secs(30);

/// Lets the series of the listener exist, so that their first count is a rise.
fn show(families: &TrainerFamilies) {
    for surface in DataSurface::ALL {
        for outcome in Outcome::ALL {
            let labels = [surface.route(), outcome.as_str()];
            families.requests.with_label_values(&labels);
        }
    }
    for prompt in ["first", "continued", "rendered_anew"] {
        families.session_turns.with_label_values(&[prompt]);
    }
    for reason in ["erased", "expired"] {
        families.sessions_ended.with_label_values(&[reason]);
    }
    for order in ORDERS {
        for outcome in ["done", "failed"] {
            families.orders.with_label_values(&[order, outcome]);
        }
    }
}

/// Starts the listener beside a gateway, if the configuration has one. Engines that register go to `adopters`.
///
/// # Errors
/// The address cannot be bound, or the files of the certificate cannot be used.
pub fn listen(
    config: &GatewayConfig,
    gateway: &GatewayHandle,
    deps: &GatewayDeps,
    adopters: Vec<Arc<dyn EngineAdopter>>,
) -> anyhow::Result<Option<Server>> {
    let trainer = &config.trainer;
    let families = Arc::new(TrainerFamilies::register(deps.metrics.registry())?);
    show(&families);
    gateway
        .accounts()
        .metrics()
        .show_limits(&[HELD_LIMIT, SESSIONS_LIMIT]);
    let Some(listen) = trainer.listen else {
        return Ok(None);
    };
    let first = config.models.first().map(|model| model.id.clone());
    let model = trainer.model.clone().or(first);
    let model = model.context("gateway.trainer needs a model")?;
    let tenant = trainer.tenant.clone();
    let tenant = tenant.context("gateway.trainer needs a tenant")?;
    let fleet = Fleet::new(
        model.clone(),
        deps.scheduler.clone(),
        deps.workers.clone(),
        families.clone(),
        gateway.weights(&model),
    );
    let accounts = gateway.accounts().metrics().clone();
    let sessions = SessionTable::open(
        trainer.sessions.clone(),
        tenant.clone(),
        accounts,
        families.clone(),
    )?;
    let sessions = Arc::new(sessions);
    let kept = sessions.clone();
    let expiry = actors::start("expiry of sessions", move || {
        let kept = kept.clone();
        async move {
            loop {
                tokio::time::sleep(EXPIRY_PERIOD).await;
                kept.expire();
            }
        }
    });
    let state = Arc::new(TrainerState {
        sessions,
        _expiry: expiry,
        fleet: Arc::new(fleet),
        adopters: Adopters::new(adopters),
        gateway: gateway.clone(),
        in_flight: Arc::new(InFlight::new(families.clone())),
        hold: Hold::new(
            tenant.clone(),
            trainer,
            gateway.drain().clone(),
            gateway.accounts().metrics().clone(),
            gateway.held_requests().clone(),
            families.held_bytes.clone(),
        ),
        tenant,
        model,
        body_bytes_max: config.body_bytes_max,
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
    let readiness = gateway.readiness().clone();
    let server = serve_public(options, public, &deps.metrics, readiness, move |app| {
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
    Ok(Some(server))
}
