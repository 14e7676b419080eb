//! The operations listener: metrics, health and readiness, apart from the listener that strangers reach.

use std::net::SocketAddr;

use actix_web::web;
use anyhow::Context as _;
use refrain_service_kit::http::{PublicOptions, Readiness, ServeOptions, Server, serve_public};
use refrain_service_kit::telemetry::Metrics;

use crate::config::GatewayConfig;

/// Most connections of the listener. Callers are scrapers, probes and operators.
const CONNECTIONS_MAX: usize = 256;
/// Threads of the listener.
const THREADS: usize = 1;
/// Largest body of a call, bytes: a batch of an import into the draft store. Only those of operators are read.
const BODY_BYTES_MAX: usize = 8 << 20;

/// Starts the listener, if the configuration has one. `routes` adds routes to `/metrics`, `/healthz` and `/readyz`.
///
/// # Errors
/// The address cannot be bound, or the files of the certificate cannot be used.
pub(crate) fn listen<F>(
    config: &GatewayConfig,
    metrics: &Metrics,
    readiness: &Readiness,
    routes: F,
) -> anyhow::Result<Option<Server>>
where
    F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
{
    let Some(listen) = config.operations_listen else {
        return Ok(None);
    };
    let listen_on = |listen: SocketAddr| {
        let options = ServeOptions {
            service: "gateway-operations",
            listen,
            threads: THREADS,
            body_bytes_max: BODY_BYTES_MAX,
            connections_max: CONNECTIONS_MAX,
            http: config.operations_http.clone(),
        };
        let public = PublicOptions {
            page_guard: Some(config.page_guard()),
            ..PublicOptions::default()
        };
        serve_public(options, public, metrics, readiness.clone(), routes.clone())
    };
    let server = match listen_on(listen) {
        Err(_) if config.is_trial => listen_on((listen.ip(), 0).into())?,
        server => server.context("gateway.operations_listen cannot be used")?,
    };
    Ok(Some(server))
}
