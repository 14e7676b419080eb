//! Each service behind its own listener, in this process or as a child.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;
use refrain::config::{MeshFile, Role};
use refrain::roles::Process;
use refrain_service_kit::mesh::MeshConfig;
use tempfile::TempDir;
use toml::{Table, Value};

use crate::{Client, KEY, Program, Scrape, TINY_MODEL, wait_until};

/// A service of the mesh. Workers and engines are numbered; worker `n` drives engine `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// Grants leases.
    Scheduler,
    /// Remembers.
    DraftStore,
    /// Computes.
    Engine(usize),
    /// Decodes.
    Worker(usize),
    /// Takes requests.
    Gateway,
}

/// A mesh of services that speak HTTP with each other.
pub struct HttpMesh {
    dir: TempDir,
    keys: MeshConfig,
    settings: Table,
    variables: Vec<(String, String)>,
    addrs: BTreeMap<Service, SocketAddr>,
    running: BTreeMap<Service, Running>,
}

enum Running {
    Here(Box<Process>),
    Child(Box<Program>),
}

impl HttpMesh {
    /// Starts all services in this process.
    ///
    /// # Errors
    /// One does not start.
    pub async fn start_here(workers: usize, settings: &str) -> anyhow::Result<Self> {
        let mut mesh = HttpMesh::prepare(workers, settings, &[])?;
        for service in mesh.services() {
            let file: MeshFile = mesh.file(service)?.try_into()?;
            let process = Process::start(service.role(), file).await?;
            mesh.running.insert(service, Running::Here(process.into()));
        }
        mesh.ready().await;
        Ok(mesh)
    }

    /// Starts each service as a child with these variables.
    ///
    /// # Errors
    /// One does not start.
    pub async fn start_children(
        workers: usize,
        settings: &str,
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let mut mesh = HttpMesh::prepare(workers, settings, variables)?;
        for service in mesh.services() {
            mesh.start_child(service).await?;
        }
        mesh.ready().await;
        Ok(mesh)
    }

    fn prepare(workers: usize, settings: &str, variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let numbered =
            (0..workers).flat_map(|number| [Service::Engine(number), Service::Worker(number)]);
        let services = [Service::Scheduler, Service::DraftStore, Service::Gateway]
            .into_iter()
            .chain(numbered);
        let addrs = services
            .map(|service| Ok((service, free_addr()?)))
            .collect::<anyhow::Result<_>>()?;
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Ok(HttpMesh {
            dir: tempfile::tempdir()?,
            keys: MeshConfig::generate()?,
            settings: settings.parse()?,
            variables: variables.iter().map(own).collect(),
            addrs,
            running: BTreeMap::new(),
        })
    }

    /// Starts a child again that was killed.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_child(&mut self, service: Service) -> anyhow::Result<()> {
        let path = self.dir.path().join(format!("{}.toml", service.name()));
        std::fs::write(&path, self.file(service)?.to_string())?;
        let path = path.to_string_lossy();
        let variables: Vec<(&str, &str)> = self
            .variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        let arguments = [service.role().name(), "--config", &*path];
        let mut child = Program::start(self.dir.path(), &arguments, &variables)?;
        child.line_with("listens on").await?;
        self.running.insert(service, Running::Child(child.into()));
        Ok(())
    }

    /// Kills a child without warning.
    ///
    /// # Errors
    /// It is none.
    pub async fn kill(&mut self, service: Service) -> anyhow::Result<()> {
        match self.running.remove(&service) {
            Some(Running::Child(child)) => child.kill().await,
            _ => anyhow::bail!("{} is no child", service.name()),
        }
    }

    /// Sends a child a signal, such as `STOP`.
    ///
    /// # Errors
    /// It is none.
    pub async fn signal(&self, service: Service, name: &str) -> anyhow::Result<()> {
        match self.running.get(&service) {
            Some(Running::Child(child)) => child.signal(name).await,
            _ => anyhow::bail!("{} is no child", service.name()),
        }
    }

    /// Stops everything as signals would, callers first.
    ///
    /// # Errors
    /// A child does not stop, or complains.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        // Gateway, workers, engines, store, scheduler: the order of the enumeration, backwards.
        while let Some((service, running)) = self.running.pop_last() {
            match running {
                Running::Here(process) => process.drain().await,
                Running::Child(mut child) => {
                    child.terminate().await?;
                    let status = child.ended().await?;
                    anyhow::ensure!(
                        status.success(),
                        "{}: {status}\n{}",
                        service.name(),
                        child.output()
                    );
                }
            }
        }
        Ok(())
    }

    /// Its keys.
    pub fn keys(&self) -> &MeshConfig {
        &self.keys
    }

    /// Where a service listens.
    ///
    /// # Panics
    /// The mesh has no such service.
    pub fn url(&self, service: Service) -> String {
        format!("http://{}", self.addrs[&service])
    }

    /// A client of the gateway.
    pub fn client(&self) -> Client {
        self.client_of(Service::Gateway)
    }

    /// A client of any service.
    pub fn client_of(&self, service: Service) -> Client {
        Client::new(&self.url(service), KEY)
    }

    /// A service's metrics.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn scrape(&self, service: Service) -> anyhow::Result<Scrape> {
        self.client_of(service)
            .scrape()
            .await
            .with_context(|| service.name())
    }

    /// Waits until every service says that it is ready.
    pub async fn ready(&self) {
        for service in self.addrs.keys() {
            let client = self.client_of(*service);
            wait_until(&format!("{} is ready", service.name()), async || {
                client
                    .get("/readyz")
                    .await
                    .ok()
                    .filter(|reply| reply.status == 200)
            })
            .await;
        }
    }

    fn services(&self) -> Vec<Service> {
        let mut services: Vec<Service> = self.addrs.keys().copied().collect();
        services.sort();
        services
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// The configuration of a service: what the mesh needs, and the test's settings.
    fn file(&self, service: Service) -> anyhow::Result<Table> {
        let number = match service {
            Service::Engine(number) | Service::Worker(number) => number,
            _ => 0,
        };
        let listen = |service: Service| Value::from(self.addrs[&service].to_string());
        let url = |service: Service| Value::from(self.url(service));
        // A section under a service's own name, such as `[worker-1]`, goes before what all of its role share.
        let (own, mut file): (Table, Table) = self
            .settings
            .clone()
            .into_iter()
            .partition(|(section, _)| section.contains('-'));
        if let Some(Value::Table(own)) = own.get(&service.name()).cloned() {
            let section = match service {
                Service::Engine(_) => "engine",
                _ => "worker",
            };
            let shared = file.entry(section).or_insert_with(|| Table::new().into());
            if let Some(shared) = shared.as_table_mut() {
                shared.extend(own);
            }
        }
        let mut set = |section: &str, pairs: Vec<(&str, Value)>| {
            let section = file.entry(section).or_insert_with(|| Table::new().into());
            if let Some(section) = section.as_table_mut() {
                for (key, value) in pairs {
                    section.entry(key).or_insert(value);
                }
            }
        };
        let mut keys = vec![
            ("secret", Value::from(self.keys.secret.clone())),
            (
                "namespace_public_key",
                self.keys.namespace_public_key.clone().into(),
            ),
        ];
        if service == Service::Gateway {
            keys.push((
                "namespace_signing_key",
                self.keys.namespace_signing_key.clone().into(),
            ));
        }
        set("mesh", keys);
        set("telemetry", vec![("log", "warn".into())]);
        set(
            "urls",
            vec![
                ("scheduler", url(Service::Scheduler)),
                ("draft_store", url(Service::DraftStore)),
                ("engine", url(Service::Engine(number))),
            ],
        );
        // A lost worker is noticed sooner than by default, so that the tests are fast.
        set(
            "scheduler",
            vec![
                ("listen", listen(Service::Scheduler)),
                ("worker_ttl_ms", 2_000.into()),
            ],
        );
        set(
            "draft_store",
            vec![
                ("listen", listen(Service::DraftStore)),
                ("data_dir", self.data_dir().display().to_string().into()),
            ],
        );
        set("engine", vec![("listen", listen(Service::Engine(number)))]);
        set(
            "worker",
            vec![
                ("id", format!("worker-{number}").into()),
                ("listen", listen(Service::Worker(number))),
                ("advertise_url", url(Service::Worker(number))),
            ],
        );
        let key = Table::from_iter([
            ("key".to_owned(), KEY.into()),
            ("tenant".to_owned(), "one".into()),
        ]);
        let model = Table::from_iter([
            ("id".to_owned(), TINY_MODEL.into()),
            ("files".to_owned(), "builtin:refrain-tiny".into()),
        ]);
        set(
            "gateway",
            vec![
                ("listen", listen(Service::Gateway)),
                ("keys", vec![Value::from(key)].into()),
                ("models", vec![Value::from(model)].into()),
            ],
        );
        Ok(file)
    }
}

impl Service {
    fn role(self) -> Role {
        match self {
            Service::Scheduler => Role::Scheduler,
            Service::DraftStore => Role::DraftStore,
            Service::Engine(_) => Role::ReferenceEngine,
            Service::Worker(_) => Role::Worker,
            Service::Gateway => Role::Gateway,
        }
    }

    fn name(self) -> String {
        match self {
            Service::Engine(number) | Service::Worker(number) => {
                format!("{}-{number}", self.role().name())
            }
            _ => self.role().name().to_owned(),
        }
    }
}

/// An address that nobody listens on now and that no other test is given.
///
/// Port 0 would not do: the system picks from the range that outgoing connections use, and one of those may
/// take the port before its service does.
///
/// # Errors
/// There is none.
pub fn free_addr() -> anyhow::Result<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORTS.len() {
        // Another run of the tests may be under way: each starts somewhere else.
        let place = std::process::id()
            .wrapping_mul(97)
            .wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + (place % PORTS.len() as u32) as u16;
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(addr).is_ok() {
            return Ok(addr);
        }
    }
    anyhow::bail!("all ports of {PORTS:?} are taken")
}

/// Below the range from which Linux picks ports for outgoing connections.
const PORTS: Range<u16> = 20_000..30_000;
