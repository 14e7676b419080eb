//! Starting and stopping the service.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use refrain_service_kit::actor_thread::ActorThread;
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::config::Validate as _;
use refrain_service_kit::http::{ServeOptions, Server, serve};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::DraftStoreConfig;
use crate::handle::DraftStoreHandle;
use crate::metrics::StoreMetrics;
use crate::replicas::status::FeedStatus;
use crate::replication::run;
use crate::replication::session::Session;
use crate::service::routes;
use crate::shared_store::SharedStore;
use crate::writer::actor::WriterActor;
use crate::writer::actor::handle::WriterHandle;

/// Threads of the listener. They only decode and encode; the disk and the writer's thread limit the throughput.
const LISTENER_THREADS: usize = 2;

/// Largest request body, in bytes. It holds a full batch of updates from a worker several times over.
const BODY_BYTES_MAX: usize = 16 << 20;

/// A running draft store.
pub struct DraftStoreServer {
    handle: DraftStoreHandle,
    server: Option<Server>,
    thread: ActorThread,
    feed: Option<Actor>,
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
    let (feed, shard) = match &config.feed {
        Some(feed) => ("on", feed.shard),
        None => ("off", 0),
    };
    let info = &store_metrics.info;
    info.with_label_values(&[feed, &*shard.to_string()]).set(1);
    let shared = Arc::new(SharedStore::default());
    shared.clocks.get_or_init(|| mesh.clocks().clone());
    let (of_writer, shown) = (config.clone(), shared.clone());
    let counted = store_metrics.clone();
    let begin = move || {
        let data_dir = of_writer.data_dir.clone();
        let writer = WriterActor::open(of_writer, shown, counted)
            .with_context(|| format!("draft store in {}", data_dir.display()))?;
        Ok(WriterHandle::start(writer))
    };
    let (thread, writer) = ActorThread::start("draft-store-writer", begin).await?;
    let status = config
        .feed
        .as_ref()
        .map(|_| Arc::new(FeedStatus::default()));
    let handle = DraftStoreHandle::new(
        writer.clone(),
        shared.clone(),
        config.clone(),
        store_metrics.clone(),
        mesh.clone(),
        status.clone(),
    );
    let feed = config.feed.clone().zip(status).map(|(feed, status)| {
        let session = Session {
            feed,
            handle: handle.clone(),
            writer,
            shared,
            status,
            metrics: store_metrics,
            credentials: mesh.credentials().clone(),
            data_dir: config.data_dir.clone(),
            disk_reserve_bytes: config.disk_reserve_bytes,
            adopted: Default::default(),
            is_erasing: Arc::default(),
        };
        let session = Arc::new(session);
        actors::start("feed", move || run::run(session.clone()))
    });
    let server = match config.listen {
        None => None,
        Some(listen) => {
            let options = ServeOptions {
                service: "draft-store",
                listen,
                threads: LISTENER_THREADS,
                body_bytes_max: BODY_BYTES_MAX,
                connections_max: config.connections_max,
                http: config.http.clone(),
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
        feed,
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
        // All that is not sent by now is in the outbox, and is sent after the next start.
        if let Some(feed) = self.feed {
            feed.stop(grace).await;
        }
        self.handle.close().await;
        self.thread.stop().await;
    }
}
