//! Starting and stopping.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor;
use refrain_service_kit::actor_thread::ActorThread;
use refrain_service_kit::config::Validate as _;
use refrain_service_kit::http::{ServeOptions, Server, serve};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::SchedulerConfig;
use crate::dispatch::actor::DispatchActor;
use crate::handle::SchedulerHandle;
use crate::http;
use crate::metrics::SchedulerMetrics;

#[cfg(test)]
mod tests;

/// Threads of the listener. Calls wait on the dispatcher, not on these.
const HTTP_THREADS: usize = 2;

/// A running scheduler.
pub struct Running {
    handle: SchedulerHandle,
    server: Option<Server>,
    dispatch: ActorThread,
}

/// Starts the dispatcher and, if the configuration says so, its listener.
///
/// # Errors
/// A faulty configuration, an address that cannot be bound, a metric name that is taken.
pub async fn start(
    config: SchedulerConfig,
    mesh: MeshAuth,
    metrics: &Metrics,
) -> anyhow::Result<Running> {
    let faults = config.faults();
    anyhow::ensure!(
        faults.is_empty(),
        "scheduler configuration: {}",
        faults.join("; ")
    );
    let scheduler_metrics = SchedulerMetrics::new(metrics)?;
    let (core_config, core_metrics) = (config.clone(), scheduler_metrics.clone());
    let begin = move || {
        let actor = DispatchActor::new(core_config, core_metrics);
        Ok(actor.start().recipient())
    };
    let (dispatch, recipient) = ActorThread::start("scheduler-dispatch", begin).await?;
    let handle = SchedulerHandle::new(recipient, mesh.clone(), scheduler_metrics);
    let server = match config.listen {
        None => None,
        Some(listen) => {
            let options = ServeOptions {
                service: "scheduler",
                listen,
                threads: HTTP_THREADS,
                body_bytes_max: config.body_bytes_max,
                // Per thread, and connections are not spread evenly: each may hold them all.
                connections_max: config.connections_max,
            };
            let ready = handle.clone();
            let routes_handle = handle.clone();
            Some(serve(
                options,
                metrics,
                Arc::new(move || ready.readiness()),
                move |app| {
                    http::routes(app, routes_handle.clone(), mesh.clone());
                },
            )?)
        }
    };
    Ok(Running {
        handle,
        server,
        dispatch,
    })
}

impl Running {
    /// Where it listens, if it does.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// The scheduler for callers in this process.
    pub fn handle(&self) -> SchedulerHandle {
        self.handle.clone()
    }

    /// Tells those who wait to go elsewhere, answers what is under way for at most `grace`, and stops.
    /// Chunks that run need no scheduler to end, so it does not wait for them.
    pub async fn drain(self, grace: Duration) {
        self.handle.drain().await;
        if let Some(server) = &self.server {
            server.stop_within(grace).await;
        }
        self.dispatch.stop().await;
    }
}
