//! The running engine: the handle that callers use, its thread, its metrics and its HTTP listener.

mod forgetting;
mod handle;
mod http;
mod metrics;
mod model_thread;
mod orders;
mod pool;
mod prefill_price;
mod weight_loading;

use std::net::SocketAddr;
use std::time::Duration;

use refrain_service_kit::http::{MeshClient, Server};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::EngineConfig;

pub use handle::EngineHandle;

/// A running engine, with its HTTP listener if it has one.
pub struct EngineServer {
    handle: EngineHandle,
    listener: Option<Server>,
}

/// Loads the model and starts its thread. If `config.listen` is set, starts the HTTP listener too.
///
/// Routes require the mesh's secret, except `/healthz`, `/readyz` and `/metrics`.
///
/// # Errors
/// Fails if the model cannot be loaded, the address cannot be bound, or the metrics are already registered.
pub async fn start(
    config: EngineConfig,
    mesh: MeshAuth,
    metrics: Metrics,
) -> anyhow::Result<EngineServer> {
    let handle = {
        let (config, metrics) = (config.clone(), metrics.clone());
        let peers = peers(&config, &mesh)?;
        // Reading and packing the weights of a large model takes seconds.
        let started = move || EngineHandle::start_among(&config, &metrics, peers);
        tokio::task::spawn_blocking(started).await??
    };
    let listener = match config.listen {
        None => None,
        Some(listen) => Some(http::listen(listen, &config, &handle, mesh, &metrics)?),
    };
    Ok(EngineServer { handle, listener })
}

/// The clients of the other engines, which are asked for KV blocks.
fn peers(config: &EngineConfig, mesh: &MeshAuth) -> anyhow::Result<Vec<MeshClient>> {
    let pool = &config.kv_pool;
    let wait = Duration::from_millis(pool.wait_ms);
    let client = |url: &String| {
        let client = MeshClient::with_credentials(url, mesh.credentials().clone(), wait)?;
        Ok(client.with_clocks(mesh.clocks().clone()))
    };
    pool.peers.iter().map(client).collect()
}

impl EngineServer {
    /// Returns the engine, for callers in this process.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }

    /// Returns the address of the HTTP listener, if there is one.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().map(Server::addr)
    }

    /// Waits for requests in progress, and then ends the model's thread.
    pub async fn stop(self) {
        if let Some(listener) = &self.listener {
            listener.stop(true).await;
        }
        let handle = self.handle;
        if let Err(error) = tokio::task::spawn_blocking(move || handle.shutdown()).await {
            tracing::error!(%error, "the engine did not shut down cleanly");
        }
    }
}
