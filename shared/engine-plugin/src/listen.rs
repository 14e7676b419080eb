//! `/metrics`, for Prometheus.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use refrain_draft_replica::Memory;
use refrain_service_kit::http::{ServeOptions, Server, serve};
use refrain_service_kit::telemetry::Metrics;

/// How often the sizes of the memory are counted.
const OBSERVE_EVERY: Duration = Duration::from_secs(5);
/// Nobody but Prometheus is expected.
const CONNECTIONS_MAX: usize = 16;
/// No route reads a body.
const BODY_BYTES_MAX: usize = 1024;

/// Listens, on the runtime that this is called on. Where the address is taken, as by another engine of the machine, the
/// engine goes on without.
pub(crate) fn listen(addr: SocketAddr, metrics: &Metrics, memory: Arc<Memory>) -> Option<Server> {
    let options = ServeOptions {
        service: "refrain-client",
        listen: addr,
        threads: 1,
        body_bytes_max: BODY_BYTES_MAX,
        connections_max: CONNECTIONS_MAX,
    };
    let server = serve(options, metrics, Arc::new(|| Ok(())), |_| {});
    let server = server.inspect_err(|error| {
        tracing::error!(%error, "metrics_listen: nobody can read the metrics there");
    });
    let server = server.ok()?;
    tokio::spawn(async move {
        loop {
            memory.observe();
            tokio::time::sleep(OBSERVE_EVERY).await;
        }
    });
    Some(server)
}
