//! The mesh in front of the stores, as processes: two gateways, the scheduler, and two workers with an engine each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use e2e::{Client, KEY, Program, Scrape, TINY_MODEL};
use refrain_service_kit::mesh::MeshConfig;
use toml::{Table, Value};

use crate::network::{GATEWAYS, NODES, Network, Node, Port, WORKERS};

/// The tenant of all clients.
pub(crate) const TENANT: &str = "clients";

/// The processes of the mesh. They are killed when this is dropped.
pub(crate) struct Mesh {
    dir: PathBuf,
    clients: Vec<Client>,
    workers: Vec<Client>,
    pub(crate) lives: Lives,
    running: BTreeMap<Node, Program>,
    /// Output of processes that were killed.
    earlier: BTreeMap<Node, String>,
}

/// How often each gateway was started or killed so far. A gateway serves while its number is odd.
#[derive(Clone, Default)]
pub(crate) struct Lives(Arc<[AtomicU64; GATEWAYS]>);

impl Lives {
    /// The life of a gateway. `None` while it is not running.
    pub(crate) fn of(&self, gateway: usize) -> Option<u64> {
        let changes = self.0[gateway].load(Ordering::SeqCst);
        (changes % 2 == 1).then_some(changes)
    }

    fn change(&self, node: Node) {
        if let Node::Gateway(number) = node {
            self.0[number].fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Mesh {
    /// All processes of the mesh, in the order in which they are started.
    pub(crate) fn nodes() -> impl Iterator<Item = Node> {
        let workers = (0..WORKERS).flat_map(|number| [Node::Engine(number), Node::Worker(number)]);
        let gateways = (0..GATEWAYS).map(Node::Gateway);
        std::iter::once(Node::Scheduler)
            .chain(workers)
            .chain(gateways)
    }

    /// Writes the configurations of all processes, which are not started yet.
    pub(crate) fn prepare(
        dir: &Path,
        network: &Network,
        keys: &MeshConfig,
    ) -> anyhow::Result<Mesh> {
        let dir = dir.join("mesh");
        std::fs::create_dir_all(&dir)?;
        for node in Mesh::nodes() {
            let file = file(node, network, keys);
            std::fs::write(config_path(&dir, node), file.to_string())?;
        }
        let client = |node| Client::new(&url(network.listen(node, Port::Calls)), KEY);
        Ok(Mesh {
            dir,
            clients: (0..GATEWAYS).map(Node::Gateway).map(client).collect(),
            workers: (0..WORKERS).map(Node::Worker).map(client).collect(),
            lives: Lives::default(),
            running: BTreeMap::new(),
            earlier: BTreeMap::new(),
        })
    }

    /// Clients of the gateways.
    pub(crate) fn clients(&self) -> &[Client] {
        &self.clients
    }

    pub(crate) fn is_running(&self, node: Node) -> bool {
        self.running.contains_key(&node)
    }

    /// Starts a process, unless it runs, and waits until it listens.
    pub(crate) async fn start(&mut self, node: Node, network: &Network) -> anyhow::Result<()> {
        if self.is_running(node) {
            return Ok(());
        }
        let config = config_path(&self.dir, node);
        let arguments = [role(node), "--config", &*config.to_string_lossy()];
        let through = network.through(node);
        let mut program = Program::start_through(&through, &self.dir, &arguments, &[])?;
        let listens = program.line_with("listens on").await;
        listens.with_context(|| format!("{node} does not start"))?;
        self.running.insert(node, program);
        self.lives.change(node);
        Ok(())
    }

    /// kill -9.
    pub(crate) async fn kill(&mut self, node: Node) -> anyhow::Result<()> {
        if let Some(program) = self.running.remove(&node) {
            self.lives.change(node);
            let earlier = self.earlier.entry(node).or_default();
            earlier.push_str(&program.output());
            program.kill().await?;
        }
        Ok(())
    }

    /// A process that has ended by itself.
    pub(crate) fn ended(&mut self) -> Option<(Node, ExitStatus)> {
        let mut running = self.running.iter_mut();
        running.find_map(|(node, program)| Some((*node, program.status()?)))
    }

    /// Writes the output of all processes to files.
    pub(crate) fn keep(&self) -> anyhow::Result<()> {
        for node in Mesh::nodes() {
            let mut log = self.earlier.get(&node).cloned().unwrap_or_default();
            if let Some(program) = self.running.get(&node) {
                log.push_str(&program.output());
            }
            std::fs::write(self.dir.join(format!("{node}.log")), log)?;
        }
        Ok(())
    }

    /// Metrics of a worker.
    pub(crate) async fn scrape(&self, worker: usize) -> anyhow::Result<Scrape> {
        let scrape = self.workers[worker].scrape().await;
        scrape.with_context(|| format!("worker {worker} has no metrics"))
    }

    /// Whether all processes that run are ready. Otherwise the text says which is not.
    pub(crate) async fn trouble(&self) -> Result<(), String> {
        for (number, client) in self.clients.iter().chain(&self.workers).enumerate() {
            let node = match number.checked_sub(GATEWAYS) {
                Some(worker) => Node::Worker(worker),
                None => Node::Gateway(number),
            };
            if !self.is_running(node) {
                continue;
            }
            let reply = client.get("/readyz").await;
            let reply = reply.map_err(|error| format!("{node}: {error:#}"))?;
            if reply.status != 200 {
                return Err(format!("{node} is not ready: {}", reply.text));
            }
        }
        Ok(())
    }
}

fn config_path(dir: &Path, node: Node) -> PathBuf {
    dir.join(format!("{node}.toml"))
}

/// The subcommand that starts a process.
fn role(node: Node) -> &'static str {
    match node {
        Node::Scheduler => "scheduler",
        Node::Gateway(_) => "gateway",
        Node::Worker(_) => "worker",
        Node::Engine(_) => "reference-engine",
        Node::Store(_) => "draft-store",
        Node::Broker(_) => unreachable!("a broker is no program of the mesh"),
    }
}

fn url(addr: std::net::SocketAddr) -> String {
    format!("http://{addr}")
}

fn table<const N: usize>(fields: [(&str, Value); N]) -> Table {
    fields
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

/// The configuration of a process.
fn file(node: Node, network: &Network, keys: &MeshConfig) -> Table {
    let reach = |to: Node| Value::from(url(network.reach(node, to, Port::Calls)));
    let listen = network.listen(node, Port::Calls);
    let number = match node {
        Node::Worker(number) | Node::Engine(number) => number,
        _ => 0,
    };
    let mut mesh = table([
        ("secret", keys.secret.clone().into()),
        (
            "namespace_public_key",
            keys.namespace_public_key.clone().into(),
        ),
    ]);
    if let Node::Gateway(_) = node {
        let key = keys.namespace_signing_key.clone();
        mesh.insert("namespace_signing_key".to_owned(), key.into());
    }
    let stores = (0..NODES).map(|store| reach(Node::Store(store)));
    let urls = table([
        ("scheduler", reach(Node::Scheduler)),
        ("draft_stores", stores.collect::<Vec<_>>().into()),
        ("engine", reach(Node::Engine(number))),
    ]);
    let listens = ("listen", Value::from(listen.to_string()));
    let (section, settings) = match node {
        // A lost worker is noticed sooner than by default, so that rounds are short.
        Node::Scheduler => (
            "scheduler",
            table([
                listens,
                ("worker_ttl_ms", 2_000.into()),
                ("lease_ttl_ms", 4_000.into()),
            ]),
        ),
        Node::Worker(_) => (
            "worker",
            table([
                listens,
                ("id", format!("worker-{number}").into()),
                ("advertise_url", url(listen).into()),
            ]),
        ),
        Node::Engine(_) => ("engine", table([listens])),
        _ => {
            let key = table([("key", KEY.into()), ("tenant", TENANT.into())]);
            let model = table([
                ("id", TINY_MODEL.into()),
                ("files", "builtin:refrain-tiny".into()),
            ]);
            let gateway = table([
                listens,
                ("keys", vec![Value::from(key)].into()),
                ("models", vec![Value::from(model)].into()),
            ]);
            ("gateway", gateway)
        }
    };
    table([
        ("mesh", mesh.into()),
        ("telemetry", table([("log", "warn".into())]).into()),
        ("urls", urls.into()),
        (section, settings.into()),
    ])
}
