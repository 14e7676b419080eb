//! Starts and drains the scheduler.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::config::Validate as _;
use refrain_service_kit::http::{ServeOptions, Server, serve};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::SchedulerConfig;
use crate::dispatcher::{Dispatcher, SharedDispatcher};
use crate::handle::SchedulerHandle;
use crate::http;
use crate::leadership::{Election, Leadership};
use crate::metrics::SchedulerMetrics;

#[cfg(test)]
mod tests;

/// Threads of the listener. Calls wait for the dispatcher, not for these threads, so two are enough.
const HTTP_THREADS: usize = 2;
/// Largest body of a call. The largest one is a heartbeat that names some thousand leases.
const BODY_BYTES_MAX: usize = 1 << 20;

/// A running scheduler.
pub struct SchedulerServer {
    handle: SchedulerHandle,
    listener: Option<Server>,
    /// Keeps the timer of the dispatcher until this is dropped.
    _timer: Actor,
    /// Stands for election, if there are several schedulers.
    election: Option<(Arc<Election>, Actor)>,
}

/// Starts the dispatcher and, if `config.listen` is set, its listener.
///
/// # Errors
/// Fails if the configuration is invalid, the address cannot be bound, or a metric name is taken.
pub async fn start(
    config: SchedulerConfig,
    mesh: MeshAuth,
    metrics: &Metrics,
) -> anyhow::Result<SchedulerServer> {
    let faults = config.faults();
    anyhow::ensure!(
        faults.is_empty(),
        "scheduler configuration: {}",
        faults.join("; ")
    );
    let scheduler_metrics = SchedulerMetrics::register(metrics.registry())?;
    let election = config.standby.as_ref().map(Election::new).transpose()?;
    let leadership = election
        .as_ref()
        .map_or_else(Leadership::alone, Election::leadership);
    scheduler_metrics.led(leadership.leads());
    let dispatcher = SharedDispatcher::new(
        config.clone(),
        scheduler_metrics.clone(),
        leadership.clone(),
    );
    let election = election.map(|election| {
        let election = Arc::new(election);
        let (stands, told) = (election.clone(), dispatcher.clone());
        let body = move || {
            let (election, dispatcher) = (stands.clone(), told.clone());
            async move {
                let changed = |_| dispatcher.apply(Dispatcher::follow_leadership);
                election.run(changed).await;
            }
        };
        (election, actors::start("election", body))
    });
    let timed = dispatcher.clone();
    let timer = actors::start("dispatch timer", move || timed.clone().keep_time());
    let handle = SchedulerHandle::new(dispatcher, mesh.clone(), scheduler_metrics, leadership);
    let listen = |listen| {
        let options = ServeOptions {
            service: "scheduler",
            listen,
            threads: HTTP_THREADS,
            body_bytes_max: BODY_BYTES_MAX,
            connections_max: config.connections_max,
            http: config.http.clone(),
        };
        let (ready, handle) = (handle.clone(), handle.clone());
        let readiness = Arc::new(move || ready.readiness());
        serve(options, metrics, readiness, move |app| {
            http::routes(app, handle.clone(), mesh.clone());
        })
    };
    let listener = config.listen.map(listen).transpose()?;
    Ok(SchedulerServer {
        handle,
        listener,
        _timer: timer,
        election,
    })
}

impl SchedulerServer {
    /// The address it listens on, if it has a listener.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().map(Server::addr)
    }

    /// The scheduler for callers in this process.
    pub fn handle(&self) -> SchedulerHandle {
        self.handle.clone()
    }

    /// Refuses all waiting calls, answers calls in flight for at most `grace`, and stops.
    ///
    /// Running chunks end without the scheduler, so the drain does not wait for them.
    pub async fn drain(self, grace: Duration) {
        if let Some((election, actor)) = self.election {
            actor.stop(Duration::ZERO).await;
            election.resign().await;
            self.handle.follow_leadership();
        }
        self.handle.drain();
        if let Some(listener) = &self.listener {
            listener.stop_within(grace).await;
        }
    }
}
