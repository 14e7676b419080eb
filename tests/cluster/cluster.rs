//! Three brokers, three stores and the mesh in front of them as processes in one network.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use refrain_service_kit::mesh::MeshConfig;
use tempfile::TempDir;

use crate::broker::Broker;
use crate::mesh::Mesh;
use crate::network::{NODES, Network, Node};
use crate::store::{Calls, Store};

/// The store with a small disk.
pub(crate) const STORE_WITH_DISK: usize = NODES - 1;

/// How long anything may take that has to happen. It is far longer than needed, since machines are busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

const PAUSE: Duration = Duration::from_millis(100);

/// The cluster. Processes are dropped before the network that they are in, and before their files.
pub(crate) struct Cluster {
    pub(crate) stores: Vec<Store>,
    pub(crate) brokers: Vec<Broker>,
    pub(crate) mesh: Mesh,
    pub(crate) network: Network,
    pub(crate) keys: MeshConfig,
    dir: TempDir,
}

impl Cluster {
    /// Prepares all processes. [`start_missing`](Self::start_missing) starts them.
    pub(crate) async fn prepare(may_be_real: bool) -> anyhow::Result<Cluster> {
        let dir = tempfile::tempdir()?;
        let network = Network::build(may_be_real).await?;
        let keys = MeshConfig::generate()?;
        let brokers = (0..NODES).map(|number| Broker::prepare(dir.path(), number, &network));
        let brokers = brokers.collect::<anyhow::Result<_>>()?;
        let mut stores = Vec::new();
        for number in 0..NODES {
            let prepare =
                |with_disk| Store::prepare(dir.path(), number, &network, &keys, with_disk);
            let store = match prepare(number == STORE_WITH_DISK) {
                Err(error) if number == STORE_WITH_DISK => {
                    eprintln!("cluster: no disk becomes full, since {error:#}");
                    prepare(false)
                }
                prepared => prepared,
            };
            stores.push(store?);
        }
        Ok(Cluster {
            stores,
            brokers,
            mesh: Mesh::prepare(dir.path(), &network, &keys)?,
            network,
            keys,
            dir,
        })
    }

    pub(crate) fn calls(&self) -> Vec<Calls> {
        self.stores
            .iter()
            .map(|store| store.calls.clone())
            .collect()
    }

    /// Starts the processes that are not running.
    pub(crate) async fn start_missing(&mut self) -> anyhow::Result<()> {
        self.start_all(|_| true).await
    }

    /// Starts all processes but the workers after the first, and their engines.
    pub(crate) async fn start_with_one_worker(&mut self) -> anyhow::Result<()> {
        self.start_all(|node| !matches!(node, Node::Worker(1..) | Node::Engine(1..)))
            .await
    }

    async fn start_all(&mut self, is_wanted: impl Fn(Node) -> bool) -> anyhow::Result<()> {
        for number in 0..NODES {
            self.start_broker(number)?;
        }
        for number in 0..NODES {
            self.start_store(number).await?;
        }
        for node in Mesh::nodes().filter(|node| is_wanted(*node)) {
            self.start_node(node).await?;
        }
        Ok(())
    }

    /// Starts a process of the mesh, unless it runs.
    pub(crate) async fn start_node(&mut self, node: Node) -> anyhow::Result<()> {
        self.mesh.start(node, &self.network).await
    }

    /// kill -9 of a process of the mesh, which must not have ended before.
    pub(crate) async fn kill_node(&mut self, node: Node) -> anyhow::Result<()> {
        self.check_running()?;
        self.mesh.kill(node).await
    }

    pub(crate) fn start_broker(&mut self, number: usize) -> anyhow::Result<()> {
        match self.brokers[number].is_running() {
            true => Ok(()),
            false => self.brokers[number].start(&self.network),
        }
    }

    /// Starts a store, unless it runs. A store does not start on a disk that is full, so that has room again.
    pub(crate) async fn start_store(&mut self, number: usize) -> anyhow::Result<()> {
        let store = &mut self.stores[number];
        if store.is_running() {
            return Ok(());
        }
        if let Some(disk) = &store.disk {
            disk.set_full(false)?;
        }
        store.start(&self.network).await
    }

    /// kill -9 of a store, which must not have ended before.
    pub(crate) async fn kill_store(&mut self, number: usize) -> anyhow::Result<()> {
        self.check_running()?;
        self.stores[number].kill().await
    }

    /// kill -9 of a broker, which must not have ended before.
    pub(crate) fn kill_broker(&mut self, number: usize) -> anyhow::Result<()> {
        self.check_running()?;
        self.brokers[number].kill()
    }

    /// # Errors
    /// A process has ended by itself.
    pub(crate) fn check_running(&mut self) -> anyhow::Result<()> {
        for (number, store) in self.stores.iter_mut().enumerate() {
            if let Some(status) = store.ended() {
                bail!("store {number} ended by itself: {status}");
            }
        }
        for (number, broker) in self.brokers.iter_mut().enumerate() {
            if let Some(status) = broker.ended() {
                bail!("broker {number} ended by itself: {status}");
            }
        }
        if let Some((node, status)) = self.mesh.ended() {
            bail!("{node} ended by itself: {status}");
        }
        Ok(())
    }

    /// Cuts a store off from all brokers, or connects it again.
    pub(crate) fn set_store_cut(&self, store: usize, is_cut: bool) -> anyhow::Result<()> {
        for broker in 0..NODES {
            let (store, broker) = (Node::Store(store), Node::Broker(broker));
            self.network.set_cut(store, broker, is_cut)?;
        }
        Ok(())
    }

    /// Cuts a broker off from the other brokers, or connects it again. Stores reach it all the time.
    pub(crate) fn set_broker_cut(&self, broker: usize, is_cut: bool) -> anyhow::Result<()> {
        for other in (0..NODES).filter(|other| *other != broker) {
            let (broker, other) = (Node::Broker(broker), Node::Broker(other));
            self.network.set_cut(broker, other, is_cut)?;
        }
        Ok(())
    }

    /// Cuts a worker off from a store, or connects it again.
    pub(crate) fn set_worker_cut(
        &self,
        worker: usize,
        store: usize,
        is_cut: bool,
    ) -> anyhow::Result<()> {
        self.network
            .set_cut(Node::Worker(worker), Node::Store(store), is_cut)
    }

    /// Whether all processes are ready, and stores have sent and applied everything. Otherwise the text says what is
    /// missing.
    pub(crate) async fn trouble(&self) -> Result<(), String> {
        for (number, store) in self.stores.iter().enumerate() {
            let failed = |error: anyhow::Error| format!("store {number}: {error:#}");
            if let Err(trouble) = store.calls.readiness().await.map_err(failed)? {
                return Err(format!("store {number} is not ready: {trouble}"));
            }
            let scrape = store.calls.scrape().await.map_err(failed)?;
            let metric = |name: &str| scrape.sum(&format!("refrain_draft_store_{name}"), &[]);
            if metric("feed_connected") != 1.0 {
                return Err(format!("store {number} is not connected"));
            }
            let (waiting, lag) = (metric("outbox_entries"), metric("feed_lag_messages"));
            if waiting > 0.0 || lag > 0.0 {
                return Err(format!(
                    "store {number} has {waiting} entries in its outbox, and lags {lag} messages"
                ));
            }
        }
        self.mesh.trouble().await
    }

    /// How often stores have applied their stream from the beginning, since brokers had lost or renumbered messages.
    pub(crate) async fn restarts(&self) -> anyhow::Result<f64> {
        let mut restarts = 0.0;
        for store in &self.stores {
            let scrape = store.calls.scrape().await?;
            restarts += scrape.sum("refrain_draft_store_feed_restarts_total", &[]);
        }
        Ok(restarts)
    }

    /// Writes the output of all processes to the folder of the cluster and keeps it, for somebody to read.
    pub(crate) async fn keep(mut self) -> anyhow::Result<PathBuf> {
        self.mesh.keep()?;
        for number in 0..NODES {
            self.stores[number].kill().await?;
            self.stores[number].keep()?;
        }
        Ok(self.dir.keep())
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Waits until a condition holds. Processes have clocks of their own, so there is nothing that could notify the test.
///
/// # Errors
/// It does not hold within [`PATIENCE`]. Then the error has what the condition said last.
pub(crate) async fn eventually(
    what: &str,
    mut condition: impl AsyncFnMut() -> Result<(), String>,
) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    while let Err(trouble) = condition().await {
        ensure!(
            Instant::now() < until,
            "after {PATIENCE:?} it is still not true that {what}: {trouble}"
        );
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}
