//! Starting and stopping the service.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::Actor as _;
use anyhow::Context as _;
use refrain_service_kit::actor_thread::ActorThread;
use refrain_service_kit::config::Validate as _;
use refrain_service_kit::http::{ServeOptions, Server, serve};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::DraftStoreConfig;
use crate::metrics::StoreMetrics;
use crate::reading::lookup::LookupViews;
use crate::service::handle::DraftStoreHandle;
use crate::service::routes;
use crate::shared_store::SharedStore;
use crate::writer::actor::WriterActor;
use crate::writer::handle::WriterHandle;

/// Threads of the listener. They only decode and encode; the disk and the writer's thread limit the throughput.
const LISTENER_THREADS: usize = 2;

/// Largest request body, in bytes. It holds a full batch of updates from a worker several times over.
const BODY_BYTES_MAX: usize = 16 << 20;

/// A running draft store.
pub struct DraftStoreServer {
    handle: DraftStoreHandle,
    server: Option<Server>,
    thread: ActorThread,
}

/// Opens the store, starts its writer, and starts the listener if the configuration has an address.
///
/// # Errors
/// An invalid configuration, a data directory that the disk refuses or another process holds, an address that cannot
/// be bound, a metric name that is taken. Damaged data is no error: it moves to quarantine.
pub async fn start(
    config: DraftStoreConfig,
    mesh: MeshAuth,
    metrics: &Metrics,
) -> anyhow::Result<DraftStoreServer> {
    let faults = config.faults();
    anyhow::ensure!(
        faults.is_empty(),
        "draft store configuration: {}",
        faults.join("; ")
    );
    let store_metrics = StoreMetrics::new(metrics)?;
    let shared = Arc::new(SharedStore::default());
    shared.clocks.get_or_init(|| mesh.clocks().clone());
    let lookup_views = Arc::new(LookupViews::default());
    let (of_writer, shown) = (config.clone(), shared.clone());
    let (counted, views) = (store_metrics.clone(), lookup_views.clone());
    let begin = move || {
        let data_dir = of_writer.data_dir.clone();
        let writer = WriterActor::open(of_writer, shown, views, counted)
            .with_context(|| format!("draft store in {}", data_dir.display()))?;
        Ok(WriterHandle::from(writer.start()))
    };
    let (thread, writer) = ActorThread::start("draft-store-writer", begin).await?;
    let handle = DraftStoreHandle::new(
        writer,
        shared,
        lookup_views,
        config.clone(),
        store_metrics,
        mesh.clone(),
    );
    let server = match config.listen {
        None => None,
        Some(listen) => {
            let options = ServeOptions {
                service: "draft-store",
                listen,
                threads: LISTENER_THREADS,
                body_bytes_max: BODY_BYTES_MAX,
                connections_max: config.connections_max,
            };
            let (ready, routed) = (handle.clone(), handle.clone());
            Some(serve(
                options,
                metrics,
                Arc::new(move || ready.readiness()),
                move |app| {
                    routes::routes(app, routed.clone(), mesh.clone());
                },
            )?)
        }
    };
    Ok(DraftStoreServer {
        handle,
        server,
        thread,
    })
}

impl DraftStoreServer {
    /// The address of the listener, if there is one.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// The store for callers in this process.
    pub fn handle(&self) -> DraftStoreHandle {
        self.handle.clone()
    }

    /// Accepts no new calls, answers running ones for at most `grace`, makes the last updates durable, and closes the
    /// log.
    pub async fn drain(self, grace: Duration) {
        self.handle.drain(grace).await;
        if let Some(server) = &self.server {
            server.stop_within(grace).await;
        }
        self.handle.close().await;
        self.thread.stop().await;
    }
}
