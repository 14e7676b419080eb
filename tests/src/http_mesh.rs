//! A mesh with each service behind its own listener, in this process or as a child.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;
use refrain::config::MeshFile;
use refrain::role::Role;
use refrain::roles::Process;
use refrain_service_kit::mesh::MeshConfig;
use tempfile::TempDir;
use toml::{Table, Value};

use crate::settings::{GATEWAY_SCHEDULER_WAIT_MS, SCHEDULER_PATIENCE, api_keys, set_defaults};
use crate::{Client, KEY, Program, Scrape, TINY_MODEL, wait_until};

/// A service of the mesh. Workers and engines are numbered, and worker `n` uses engine `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// The scheduler.
    Scheduler,
    /// Another scheduler, if the settings have a section `scheduler.standby`.
    Standby,
    /// The draft store.
    DraftStore,
    /// A reference engine.
    Engine(usize),
    /// A worker.
    Worker(usize),
    /// The gateway.
    Gateway,
}

/// A mesh of services that call each other over HTTP.
pub struct HttpMesh {
    dir: TempDir,
    keys: MeshConfig,
    settings: Table,
    variables: Vec<(String, String)>,
    addrs: BTreeMap<Service, SocketAddr>,
    /// Whether the listeners inside the mesh speak TLS. The gateway's does not.
    is_tls: bool,
    /// The public key of an issuer, and the credentials that services have in place of the secret.
    credentials: Option<(String, BTreeMap<Service, PathBuf>)>,
    /// The binary of the children that start next, if it is not this version's.
    binary: Option<PathBuf>,
    running: BTreeMap<Service, RunningService>,
}

enum RunningService {
    Here(Box<Process>),
    Child(Box<Program>),
}

impl HttpMesh {
    /// Starts all services in this process.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_here(workers: usize, settings: &str) -> anyhow::Result<Self> {
        Box::pin(HttpMesh::start_here_tuned(workers, settings, |_, _| {})).await
    }

    /// [`start_here`](Self::start_here) with values that no configuration has: `tune` sets fields that are not
    /// deserialised.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_here_tuned(
        workers: usize,
        settings: &str,
        tune: impl Fn(Service, &mut MeshFile),
    ) -> anyhow::Result<Self> {
        let mesh = HttpMesh::prepare(workers, settings, &[])?;
        Box::pin(mesh.start_tuned(tune)).await
    }

    /// [`start_here`](Self::start_here) with `https://` URLs inside the mesh: `tune` sets the certificates.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_here_with_tls(
        workers: usize,
        tune: impl Fn(Service, &mut MeshFile),
    ) -> anyhow::Result<Self> {
        let mesh = HttpMesh {
            is_tls: true,
            ..HttpMesh::prepare(workers, "", &[])?
        };
        Box::pin(mesh.start_tuned(tune)).await
    }

    async fn start_tuned(self, tune: impl Fn(Service, &mut MeshFile)) -> anyhow::Result<Self> {
        let mut mesh = self;
        for service in mesh.services() {
            let mut file: MeshFile = mesh.file(service)?.try_into()?;
            tune(service, &mut file);
            let process = Box::pin(Process::start(service.role(), file)).await?;
            mesh.running
                .insert(service, RunningService::Here(process.into()));
        }
        mesh.ready().await;
        Ok(mesh)
    }

    /// Starts each service as a child with these environment variables.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_children(
        workers: usize,
        settings: &str,
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let mesh = HttpMesh::prepare(workers, settings, variables)?;
        mesh.started().await
    }

    /// As [`start_children`](Self::start_children), with another binary.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_children_of(
        binary: Option<&Path>,
        workers: usize,
        settings: &str,
    ) -> anyhow::Result<Self> {
        let mut mesh = HttpMesh::prepare(workers, settings, &[])?;
        mesh.binary = binary.map(Path::to_path_buf);
        mesh.started().await
    }

    /// Starts each service as a child that has no secret, but the credential in its file, which an issuer with this
    /// public key has signed.
    ///
    /// # Errors
    /// A service does not start.
    pub async fn start_children_with_credentials(
        workers: usize,
        issuer_public_key: &str,
        file_of: impl Fn(Service) -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<Self> {
        let mut mesh = HttpMesh::prepare(workers, "", &[])?;
        let services = mesh.services();
        let files = services
            .iter()
            .map(|service| Ok((*service, file_of(*service)?)));
        let files = files.collect::<anyhow::Result<_>>()?;
        mesh.credentials = Some((issuer_public_key.to_owned(), files));
        mesh.started().await
    }

    /// Starts all services as children.
    async fn started(mut self) -> anyhow::Result<Self> {
        for service in self.services() {
            self.start_child(service).await?;
        }
        self.ready().await;
        Ok(self)
    }

    fn prepare(workers: usize, settings: &str, variables: &[(&str, &str)]) -> anyhow::Result<Self> {
        let numbered =
            (0..workers).flat_map(|number| [Service::Engine(number), Service::Worker(number)]);
        let settings: Table = settings.parse()?;
        let standby = has_standby(&settings).then_some(Service::Standby);
        let services = [Service::Scheduler, Service::DraftStore, Service::Gateway]
            .into_iter()
            .chain(standby)
            .chain(numbered);
        let addrs = services
            .map(|service| Ok((service, free_addr()?)))
            .collect::<anyhow::Result<_>>()?;
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Ok(HttpMesh {
            dir: tempfile::tempdir()?,
            keys: MeshConfig::generate()?,
            settings,
            variables: variables.iter().map(own).collect(),
            addrs,
            is_tls: false,
            credentials: None,
            binary: None,
            running: BTreeMap::new(),
        })
    }

    /// Starts a service as a child, for instance one that was killed.
    ///
    /// # Errors
    /// The child does not start.
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
        let mut child = match &self.binary {
            None => Program::start(self.dir.path(), &arguments, &variables)?,
            Some(binary) => Program::start_binary(binary, self.dir.path(), &arguments, &variables)?,
        };
        child.line_with("listens on").await?;
        self.running
            .insert(service, RunningService::Child(child.into()));
        Ok(())
    }

    /// Stops a child by a signal, waits for its end, and starts it again with a binary. `None` is this version's.
    ///
    /// # Errors
    /// The service is not a child, or does not stop or start.
    pub async fn replace(&mut self, service: Service, binary: Option<&Path>) -> anyhow::Result<()> {
        let Some(RunningService::Child(mut child)) = self.running.remove(&service) else {
            anyhow::bail!("{} is not a child", service.name());
        };
        child.terminate().await?;
        let status = child.ended().await?;
        anyhow::ensure!(status.success(), "{}: {status}", service.name());
        self.binary = binary.map(Path::to_path_buf);
        self.start_child(service).await
    }

    /// Kills a child without warning.
    ///
    /// # Errors
    /// The service is not a child.
    pub async fn kill(&mut self, service: Service) -> anyhow::Result<()> {
        match self.running.remove(&service) {
            Some(RunningService::Child(child)) => child.kill().await,
            _ => anyhow::bail!("{} is not a child", service.name()),
        }
    }

    /// The output of a child so far, of both its streams.
    ///
    /// # Errors
    /// The service is not a child.
    pub fn output(&self, service: Service) -> anyhow::Result<String> {
        match self.running.get(&service) {
            Some(RunningService::Child(child)) => Ok(child.output()),
            _ => anyhow::bail!("{} is not a child", service.name()),
        }
    }

    /// Sends a signal to a child, such as `STOP`.
    ///
    /// # Errors
    /// The service is not a child.
    pub async fn signal(&self, service: Service, name: &str) -> anyhow::Result<()> {
        match self.running.get(&service) {
            Some(RunningService::Child(child)) => child.signal(name).await,
            _ => anyhow::bail!("{} is not a child", service.name()),
        }
    }

    /// Stops all services as signals would, callers first.
    ///
    /// # Errors
    /// A child does not stop, or exits with an error.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        // Gateway, workers, engines, store, scheduler: the reverse order of the enumeration.
        while let Some((service, running)) = self.running.pop_last() {
            match running {
                RunningService::Here(process) => process.drain().await,
                RunningService::Child(mut child) => {
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

    /// The folder with everything that the services write.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The keys of the mesh.
    pub fn keys(&self) -> &MeshConfig {
        &self.keys
    }

    /// The URL of a service.
    ///
    /// # Panics
    /// The mesh has no such service.
    pub fn url(&self, service: Service) -> String {
        let scheme = match self.is_tls && service != Service::Gateway {
            true => "https",
            false => "http",
        };
        format!("{scheme}://{}", self.addrs[&service])
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
    /// The service does not answer.
    pub async fn scrape(&self, service: Service) -> anyhow::Result<Scrape> {
        self.client_of(service)
            .scrape()
            .await
            .with_context(|| service.name())
    }

    /// Waits until every service is ready. Under TLS that is the gateway, which is ready last.
    pub async fn ready(&self) {
        let services = self.addrs.keys();
        for service in services.filter(|service| !self.is_tls || **service == Service::Gateway) {
            self.client_of(*service).ready(&service.name()).await;
        }
    }

    /// Waits until so many workers report to the scheduler. Before, it could give all requests to the first one.
    pub async fn workers_report(&self, workers: usize) {
        wait_until("all workers report", async || {
            let scrape = self.scrape(Service::Scheduler).await.ok()?;
            (scrape.sum("refrain_scheduler_workers", &[]) == workers as f64).then_some(())
        })
        .await;
    }

    fn services(&self) -> Vec<Service> {
        let mut services: Vec<Service> = self.addrs.keys().copied().collect();
        services.sort();
        services
    }

    fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Whether a worker adopts engines that register, and has none of its own.
    fn adopts(&self, number: usize) -> bool {
        let own = format!("worker-{number}");
        let sections = [self.settings.get("worker"), self.settings.get(&own)];
        let mut sections = sections.into_iter().flatten();
        sections.any(|section| section.get("adoption").is_some())
    }

    /// The configuration of a service: the test's settings, and everything else that the mesh needs.
    fn file(&self, service: Service) -> anyhow::Result<Table> {
        let number = match service {
            Service::Engine(number) | Service::Worker(number) => number,
            _ => 0,
        };
        let listen = |service: Service| Value::from(self.addrs[&service].to_string());
        let url = |service: Service| Value::from(self.url(service));
        // A section with a service's own name, such as `[worker-1]`, takes precedence over the section of its role.
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
        if let Some(Value::Table(scheduler)) = file.get_mut("scheduler")
            && let Some(Value::Table(standby)) = scheduler.get_mut("standby")
        {
            standby.insert("id".into(), service.name().into());
        }
        // Engines that register with a gateway go to the workers that adopt them.
        if let Some(Value::Table(gateway)) = file.get_mut("gateway")
            && let Some(Value::Table(trainer)) = gateway.get_mut("trainer")
        {
            let workers = self.addrs.keys();
            let adopters =
                workers.filter(|it| matches!(it, Service::Worker(number) if self.adopts(*number)));
            let adopters: Vec<Value> = adopters.map(|adopter| url(*adopter)).collect();
            trainer.insert("adopters".into(), adopters.into());
        }
        // Engines with a pool take blocks from all others.
        if let Some(Value::Table(engine)) = file.get_mut("engine")
            && let Some(Value::Table(pool)) = engine.get_mut("kv_pool")
        {
            let others = self.addrs.keys().filter(|other| {
                matches!(other, Service::Engine(_)) && **other != Service::Engine(number)
            });
            let peers: Vec<Value> = others.map(|other| url(*other)).collect();
            pool.insert("peers".into(), peers.into());
        }
        let mut set = |section: &str, defaults: Vec<(&'static str, Value)>| {
            set_defaults(&mut file, section, defaults);
        };
        let mut keys = vec![(
            "namespace_public_key",
            Value::from(self.keys.namespace_public_key.clone()),
        )];
        match &self.credentials {
            None => keys.push(("secret", self.keys.secret.clone().into())),
            Some((issuer, files)) => {
                let file = files[&service].display().to_string();
                keys.push(("credential_file", file.into()));
                keys.push(("issuer_public_keys", vec![issuer.clone()].into()));
            }
        }
        if service == Service::Gateway {
            keys.push((
                "namespace_signing_key",
                self.keys.namespace_signing_key.clone().into(),
            ));
        }
        set("mesh", keys);
        set("telemetry", vec![("log", "warn".into())]);
        let mut urls = vec![("draft_store", url(Service::DraftStore))];
        urls.push(match self.addrs.contains_key(&Service::Standby) {
            false => ("scheduler", url(Service::Scheduler)),
            true => {
                let both = [Service::Scheduler, Service::Standby].map(url);
                ("schedulers", both.to_vec().into())
            }
        });
        if matches!(service, Service::Worker(number) if self.adopts(number)) {
            let engine = [("model", TINY_MODEL), ("files", "builtin:refrain-tiny")];
            let engine = engine.map(|(key, value)| (key.to_owned(), Value::from(value)));
            set("worker", vec![("engine", Table::from_iter(engine).into())]);
        } else {
            urls.push(("engine", url(Service::Engine(number))));
        }
        set("urls", urls);
        let listens_as = match service {
            Service::Standby => Service::Standby,
            _ => Service::Scheduler,
        };
        let mut scheduler = vec![("listen", listen(listens_as))];
        scheduler.extend(SCHEDULER_PATIENCE.map(|(key, value)| (key, value.into())));
        set("scheduler", scheduler);
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
        let model = Table::from_iter([
            ("id".to_owned(), TINY_MODEL.into()),
            ("files".to_owned(), "builtin:refrain-tiny".into()),
        ]);
        set(
            "gateway",
            vec![
                ("scheduler_wait_ms", GATEWAY_SCHEDULER_WAIT_MS.into()),
                ("listen", listen(Service::Gateway)),
                ("keys", api_keys(&[(KEY, "one")])),
                ("models", vec![Value::from(model)].into()),
            ],
        );
        Ok(file)
    }
}

fn has_standby(settings: &Table) -> bool {
    let scheduler = settings.get("scheduler");
    scheduler.is_some_and(|scheduler| scheduler.get("standby").is_some())
}

impl Service {
    fn role(self) -> Role {
        match self {
            Service::Scheduler | Service::Standby => Role::Scheduler,
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
            Service::Standby => "standby".to_owned(),
            _ => self.role().name().to_owned(),
        }
    }
}

/// An address on which nothing listens now, and which no other test gets.
///
/// Port 0 would not do: the system chooses from the range for outgoing connections, and such a connection may take
/// the port before the service does.
///
/// # Errors
/// All ports are taken.
pub fn free_addr() -> anyhow::Result<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORTS.len() {
        // Another run of the tests may be in progress, so each run starts at another port.
        let number = std::process::id()
            .wrapping_mul(97)
            .wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = PORTS.start + (number % PORTS.len() as u32) as u16;
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        if TcpListener::bind(addr).is_ok() {
            return Ok(addr);
        }
    }
    anyhow::bail!("all ports of {PORTS:?} are taken")
}

/// Ports below the range from which Linux chooses ports for outgoing connections.
const PORTS: Range<u16> = 20_000..30_000;
