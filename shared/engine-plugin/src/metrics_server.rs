//! The server of `/metrics`, for Prometheus.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use refrain_draft_replica::DraftReplica;
use refrain_service_kit::http::{ListenerConfig, ServeOptions, Server, serve};
use refrain_service_kit::telemetry::Metrics;

/// How often the sizes of the replica are counted.
const OBSERVE_EVERY: Duration = Duration::from_secs(5);
/// Only Prometheus is expected to connect.
const CONNECTIONS_MAX: usize = 16;
/// No route reads a body.
const BODY_BYTES_MAX: usize = 1024;

/// Starts the server, on the runtime of the caller. Where the address is taken, for example by another engine of the
/// machine, the engine goes on without a server.
pub(crate) fn serve_metrics(
    addr: SocketAddr,
    metrics: &Metrics,
    replica: Arc<DraftReplica>,
) -> Option<Server> {
    let options = ServeOptions {
        service: "refrain-client",
        listen: addr,
        threads: 1,
        body_bytes_max: BODY_BYTES_MAX,
        connections_max: CONNECTIONS_MAX,
        http: ListenerConfig::default(),
    };
    let server = serve(options, metrics, Arc::new(|| Ok(())), |_| {});
    let server = server.inspect_err(|error| {
        tracing::error!(%addr, %error, "metrics_listen: cannot listen there, so no metrics are served");
    });
    let server = server.ok()?;
    tokio::spawn(async move {
        loop {
            replica.observe();
            tokio::time::sleep(OBSERVE_EVERY).await;
        }
    });
    Some(server)
}
