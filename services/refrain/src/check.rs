//! `refrain check`: says what a configuration comes to, and whether a process could start with it, without starting
//! one.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use refrain_service_kit::config::{SetBy, SetKey};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshCredentials, RoleCredential};
use refrain_service_kit::telemetry::Metrics;
use refrain_worker::{WorkerEngine, look_up};
use reqwest::Url;
use tokio::net::TcpStream;

use crate::command;
use crate::config::MeshFile;
use crate::health::role;
use crate::late_worker::EngineConnector;
use crate::mesh_roles::check_own;
use crate::model_files::{expected_model, model_files};
use crate::role::Role;
use crate::up_engines::engine_parts;

/// How long a service may take to answer.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Arguments of `refrain check`.
#[derive(Args)]
pub struct CheckArgs {
    /// The command that the configuration is for.
    #[arg(long, env = "REFRAIN_ROLE", default_value = "up", value_parser = role())]
    role: Role,
    /// The configuration file; without it, only variables and defaults count.
    #[arg(long, env = "REFRAIN_CONFIG")]
    config: Option<PathBuf>,
    /// Check keys, values and files alone. No port is opened, and nobody is called.
    #[arg(long)]
    offline: bool,
    /// Print the keys at their defaults as well.
    #[arg(long)]
    all: bool,
}

/// Prints the configuration and what was found. It is an error if a process could not start, or would have to wait
/// for another one.
///
/// # Errors
/// The configuration has faults, or something that it names cannot be used.
pub fn run(args: &CheckArgs) -> anyhow::Result<()> {
    let keys = MeshFile::set_keys(args.config.as_deref())?;
    print!("{}", shown(&keys, args.all));
    let mut file = MeshFile::load(args.role, args.config.as_deref())?;
    if args.role == Role::Up {
        file.fill_in_for_up();
        if let Some(fault) = file.door_fault() {
            bail!("{fault}");
        }
    }
    command::run(async {
        let mut found = Findings::default();
        let credentials = credentials(args.role, &file, &mut found)?;
        files(args.role, &file, &mut found);
        if !args.offline {
            ports(args.role, &file, &mut found);
            services(args.role, &file, &mut found).await;
            engines(args.role, &file, credentials, &mut found).await;
        }
        found.end()
    })
}

/// The keys with their values and who set them.
fn shown(keys: &[SetKey], all: bool) -> String {
    let lines = keys.iter().filter_map(|SetKey { path, value, by }| {
        let by = match by {
            SetBy::File => "the file",
            SetBy::Variable(name) => name,
            SetBy::Default if all => "default",
            SetBy::Default => return None,
        };
        Some(format!("{path} = {value}  # {by}\n"))
    });
    let lines: String = lines.collect();
    match lines.is_empty() {
        true => "Every key has its default.\n\n".to_owned(),
        false => format!("{lines}\n"),
    }
}

/// The outcome so far.
#[derive(Default)]
struct Findings {
    faults: usize,
}

impl Findings {
    /// Prints what was found of `what`.
    fn add(&mut self, what: &str, found: anyhow::Result<String>) {
        match found {
            Ok(found) => println!("ok     {what}: {found}"),
            Err(error) => {
                self.faults += 1;
                println!("fault  {what}: {error:#}");
            }
        }
    }

    fn end(self) -> anyhow::Result<()> {
        match self.faults {
            0 => {
                println!("\nNothing is wrong.");
                Ok(())
            }
            1 => bail!("one fault was found; see above"),
            count => bail!("{count} faults were found; see above"),
        }
    }
}

/// Checks the credentials by which a process proves its role. `None`: it needs none, or they cannot be used.
fn credentials(
    role: Role,
    file: &MeshFile,
    found: &mut Findings,
) -> anyhow::Result<Option<MeshCredentials>> {
    if role == Role::Up && !file.mesh.has_keys() {
        return Ok(None);
    }
    let worker = file.worker.id.clone();
    let is_own = move |own: &RoleCredential| check_own(role, &worker, own);
    let opened = MeshCredentials::open_own(&file.mesh, &Metrics::new()?, is_own);
    let (credentials, opened) = match opened {
        Ok(credentials) => (Some(credentials), Ok("the credentials can be used".into())),
        Err(error) => (None, Err(error)),
    };
    found.add("mesh", opened);
    Ok(credentials)
}

/// Checks the files that a role reads and the folder that it writes to.
fn files(role: Role, file: &MeshFile, found: &mut Findings) {
    let tokenizer = |source: &str| {
        let tokenizer = model_files(source)?.tokenizer()?;
        Ok(format!("{source} has {} tokens", tokenizer.vocab_size()))
    };
    if matches!(role, Role::Up | Role::Gateway) {
        for (at, model) in file.gateway.models.iter().enumerate() {
            let key = format!("gateway.models[{at}].files");
            found.add(&key, tokenizer(&model.files));
        }
    }
    if role == Role::Worker && !file.worker.engine.files.is_empty() {
        let key = "worker.engine.files";
        found.add(key, tokenizer(&file.worker.engine.files));
    }
    let (is_edge, is_store) = match role {
        Role::Up => (true, true),
        role => (role == Role::Gateway, role == Role::DraftStore),
    };
    let mut read: Vec<(&str, &Path)> = Vec::new();
    let listeners = [
        ("gateway.http.tls", &file.gateway.http, is_edge),
        (
            "gateway.operations_http.tls",
            &file.gateway.operations_http,
            is_edge,
        ),
        (
            "gateway.trainer.http.tls",
            &file.gateway.trainer.http,
            is_edge,
        ),
        (
            "scheduler.http.tls",
            &file.scheduler.http,
            role == Role::Scheduler,
        ),
        ("worker.http.tls", &file.worker.http, role == Role::Worker),
        (
            "draft_store.http.tls",
            &file.draft_store.http,
            role == Role::DraftStore,
        ),
        (
            "engine.http.tls",
            &file.engine.http,
            role == Role::ReferenceEngine,
        ),
    ];
    for (key, listener, _) in listeners.into_iter().filter(|(.., is_own)| *is_own) {
        let tls = listener.tls.iter();
        read.extend(
            tls.flat_map(|tls| {
                let own = [tls.certificate.as_path(), tls.key.as_path()];
                own.into_iter().chain(tls.client_ca.as_deref())
            })
            .map(|path| (key, path)),
        );
    }
    if is_edge {
        let tenants = file.gateway.tenants_file.as_deref();
        read.extend(tenants.map(|path| ("gateway.tenants_file", path)));
        let keys = file
            .gateway
            .jwt
            .as_ref()
            .and_then(|jwt| jwt.jwks_file.as_deref());
        read.extend(keys.map(|path| ("gateway.jwt.jwks_file", path)));
    }
    for (key, path) in read {
        let opened = std::fs::read(path).map(|bytes| format!("{} bytes", bytes.len()));
        let key = format!("{key}, {}", path.display());
        found.add(&key, opened.context("cannot be read"));
    }
    let usage = file.gateway.usage_dir.as_deref().filter(|_| is_edge);
    let data = is_store.then_some(file.draft_store.data_dir.as_path());
    let written = [("gateway.usage_dir", usage), ("draft_store.data_dir", data)];
    for (key, folder) in written {
        let Some(folder) = folder else {
            continue;
        };
        found.add(&format!("{key} = {}", folder.display()), writable(folder));
    }
}

/// Checks that a folder, or the lowest folder above it that exists, can be written to. Nothing is left there.
fn writable(folder: &Path) -> anyhow::Result<String> {
    let absolute = std::path::absolute(folder)?;
    let exists = absolute.ancestors().find(|path| path.exists());
    let exists = exists.context("there is no such folder")?;
    ensure!(exists.is_dir(), "{} is no folder", exists.display());
    tempfile::tempfile_in(exists).with_context(|| format!("in {}", exists.display()))?;
    Ok("can be written to".to_owned())
}

/// Checks that the ports of a role are free.
fn ports(role: Role, file: &MeshFile, found: &mut Findings) {
    let gateway = &file.gateway;
    let listeners: [(&str, Option<SocketAddr>, &[Role]); 7] = [
        (
            "gateway.listen",
            gateway.listen.parse().ok(),
            &[Role::Up, Role::Gateway],
        ),
        (
            "gateway.operations_listen",
            gateway.operations_listen,
            &[Role::Up, Role::Gateway],
        ),
        (
            "gateway.trainer.listen",
            gateway.trainer.listen,
            &[Role::Up, Role::Gateway],
        ),
        (
            "scheduler.listen",
            file.scheduler.listen,
            &[Role::Scheduler],
        ),
        ("worker.listen", file.worker.listen, &[Role::Worker]),
        (
            "draft_store.listen",
            file.draft_store.listen,
            &[Role::DraftStore],
        ),
        (
            "engine.listen",
            file.engine.listen,
            &[Role::ReferenceEngine],
        ),
    ];
    let own = listeners.into_iter().filter(|(.., of)| of.contains(&role));
    let bound = own.filter_map(|(key, listen, _)| {
        let listen = listen?;
        Some((key, listen, TcpListener::bind(listen)))
    });
    // All stay open until the last is, since two of them may have the same address.
    let bound: Vec<_> = bound.collect();
    for (key, listen, bound) in bound {
        let bound = bound.context(
            "another process has this address, perhaps the one of this configuration, or it cannot be had here",
        );
        found.add(
            &format!("{key} = {listen}"),
            bound.map(|_| "is free".into()),
        );
    }
}

/// Checks that somebody listens where the services are that a role calls.
async fn services(role: Role, file: &MeshFile, found: &mut Findings) {
    let (urls, gateway) = (&file.urls, &file.gateway);
    let mut calls: Vec<(&str, &str)> = Vec::new();
    if matches!(role, Role::Gateway | Role::Worker) {
        let schedulers = urls.schedulers().iter();
        calls.extend(schedulers.map(|url| ("urls.scheduler", url.as_str())));
        calls.push(("urls.draft_store", &urls.draft_store));
        calls.extend(
            urls.draft_stores
                .iter()
                .map(|url| ("urls.draft_stores", url.as_str())),
        );
    }
    if matches!(role, Role::Gateway | Role::Up) {
        let redis = gateway.limits_redis.as_ref();
        calls.extend(redis.map(|redis| ("gateway.limits_redis.url", redis.url.as_str())));
        let keys = gateway.jwt.as_ref().and_then(|jwt| jwt.jwks_url.as_deref());
        calls.extend(keys.map(|url| ("gateway.jwt.jwks_url", url)));
    }
    if role == Role::Gateway {
        let adopters = gateway.trainer.adopters.iter();
        calls.extend(adopters.map(|url| ("gateway.trainer.adopters", url.as_str())));
    }
    if matches!(role, Role::DraftStore | Role::Up)
        && let Some(feed) = &file.draft_store.feed
    {
        let servers = feed.servers.iter();
        calls.extend(servers.map(|url| ("draft_store.feed.servers", url.as_str())));
        let peers = feed.peers.iter();
        calls.extend(peers.map(|url| ("draft_store.feed.peers", url.as_str())));
    }
    if role == Role::Scheduler
        && let Some(standby) = &file.scheduler.standby
    {
        let servers = standby.servers.iter();
        calls.extend(servers.map(|url| ("scheduler.standby.servers", url.as_str())));
    }
    calls.push(("telemetry.otlp_endpoint", &file.telemetry.otlp_endpoint));
    for (key, url) in calls.into_iter().filter(|(_, url)| !url.is_empty()) {
        let place = place(url);
        let what = match &place {
            Ok(place) => format!("{key} = {place}"),
            Err(_) => key.to_owned(),
        };
        let listens = async { reach(&place?).await };
        found.add(&what, listens.await);
    }
}

/// Host and port of a URL, without a password. Brokers are named without a scheme as well.
fn place(url: &str) -> anyhow::Result<String> {
    let url = match url.contains("://") {
        true => Url::parse(url),
        false => Url::parse(&format!("nats://{url}")),
    };
    let url = url.context("must be a URL, such as http://host:8080")?;
    let host = url.host_str().context("the URL has no host")?;
    let usual = match url.scheme() {
        "nats" | "tls" => Some(4222),
        "redis" | "rediss" => Some(6379),
        _ => url.port_or_known_default(),
    };
    let port = url.port().or(usual).context("the URL has no port")?;
    Ok(format!("{host}:{port}"))
}

async fn reach(place: &str) -> anyhow::Result<String> {
    let connected = tokio::time::timeout(ANSWER_WAIT, TcpStream::connect(place)).await;
    let connected = connected.map_err(|_| anyhow::anyhow!("no answer within {ANSWER_WAIT:?}"))?;
    connected.context("nobody listens there")?;
    Ok("somebody listens there".to_owned())
}

/// Checks the engines that a role drives: each has to answer, and to serve the model with the tokenizer.
async fn engines(
    role: Role,
    file: &MeshFile,
    credentials: Option<MeshCredentials>,
    found: &mut Findings,
) {
    let adoption = &file.worker.adoption;
    if matches!(role, Role::Worker | Role::Up) && adoption.is_on() {
        let expected = expected_model(&file.worker.engine);
        found.add(
            "worker.engine",
            expected.map(|it| format!("{} is served", it.model)),
        );
        for source in &adoption.sources {
            let engines = look_up(adoption, source).await;
            let shown = engines.map(|engines| match engines.len() {
                0 => "names no engine now".to_owned(),
                _ => engines.into_iter().collect::<Vec<_>>().join(", "),
            });
            found.add(&format!("worker.adoption.sources, {source}"), shown);
        }
        return;
    }
    let url = &file.urls.engine;
    let driven: Vec<_> = match role {
        Role::Worker => vec![(file.worker.engine.clone(), url.clone())],
        Role::Up => engine_parts(&file.engines, &file.worker, &file.engine, url)
            .into_iter()
            .filter_map(|part| Some((part.worker.engine, part.url?)))
            .collect(),
        _ => return,
    };
    let credentials = credentials.unwrap_or_else(|| MeshCredentials::of_secret(""));
    for (config, url) in driven {
        let connected = async {
            let (timeout, credentials) = (ANSWER_WAIT, credentials.clone());
            let client = MeshClient::with_credentials("", credentials, timeout)?;
            let connector = EngineConnector::new(&config, url.clone(), &client)?;
            let engine = tokio::time::timeout(timeout, connector.connect()).await;
            let engine = engine.map_err(|_| anyhow::anyhow!("no answer within {timeout:?}"))??;
            anyhow::Ok(served(&engine))
        };
        let shown = place(&url).unwrap_or_default();
        found.add(&format!("engine {shown}"), connected.await);
    }
}

fn served(engine: &WorkerEngine) -> String {
    let drafts = match engine {
        WorkerEngine::Verifying(_) => "verifies drafts",
        WorkerEngine::Streaming(_) => "generates by itself, with drafts only by a plugin in it",
    };
    format!("serves {}; it {drafts}", engine.model())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_shown_without_its_password() {
        for (url, expected) in [
            ("nats://user:secret@n", "n:4222"),
            ("rediss://:secret@r:7000/2", "r:7000"),
            ("https://h", "h:443"),
            ("http://[::1]:8", "[::1]:8"),
        ] {
            assert_eq!(place(url).unwrap(), expected);
        }
        assert_eq!(place("user:secret@h:1").unwrap(), "h:1");
        assert!(place("").is_err() && place("http://").is_err());
    }

    #[test]
    fn defaults_are_shown_when_they_are_asked_for() {
        let key = |path: &str, by| SetKey {
            path: path.into(),
            value: "1".into(),
            by,
        };
        let keys = [
            key("a", SetBy::File),
            key("b", SetBy::Variable("REFRAIN_B".into())),
            key("c", SetBy::Default),
        ];
        assert_eq!(
            shown(&keys, false),
            "a = 1  # the file\nb = 1  # REFRAIN_B\n\n"
        );
        assert!(shown(&keys, true).contains("c = 1  # default"));
        assert!(shown(&[], false).contains("default"));
    }

    #[test]
    fn a_folder_that_is_not_there_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("a/b");
        writable(&below).unwrap();
        assert!(!below.exists());
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(writable(&file.join("b")).is_err());
    }
}
