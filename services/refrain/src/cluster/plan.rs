//! The processes of a mesh, each with its arguments, variables and address. The only I/O is writing one file.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context;
use refrain_service_kit::mesh::MeshConfig;
use toml::{Table, Value};

use crate::role::Role;

/// The configuration that all processes share. It is also the example for several machines.
const CONFIG: &str = include_str!("../../../../deploy/config/cluster.toml");

/// Workers, each with an engine of its own.
pub(super) const WORKERS: usize = 2;

/// Room of the stream between the stores, bytes. A trial does not need the 8 GiB of the default.
const STREAM_BYTES: i64 = 256 << 20;

/// Where each process listens.
pub(super) struct Addresses {
    pub(super) gateways: [SocketAddr; 2],
    pub(super) scheduler: SocketAddr,
    pub(super) broker: SocketAddr,
    pub(super) stores: Vec<SocketAddr>,
    pub(super) workers: Vec<SocketAddr>,
    pub(super) engines: Vec<SocketAddr>,
}

/// A process of the mesh.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: String,
    /// `None`: the broker.
    pub(super) role: Option<Role>,
    /// `None`: this program.
    pub(super) program: Option<PathBuf>,
    pub(super) arguments: Vec<String>,
    pub(super) variables: Vec<(&'static str, String)>,
    pub(super) addr: SocketAddr,
}

/// All processes, in the order in which they stop.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) members: Vec<Member>,
    pub(super) gateways: [SocketAddr; 2],
    /// The configuration of all, and where it is to be written.
    pub(super) file: Table,
    pub(super) config: PathBuf,
}

/// Plans a mesh whose data are in `data_dir`, with these keys.
pub(super) fn plan(
    addresses: &Addresses,
    data_dir: &Path,
    broker: &Path,
    keys: &MeshConfig,
) -> anyhow::Result<Plan> {
    let config = data_dir.join("cluster.toml");
    let url = |addr: &SocketAddr| format!("http://{addr}");
    let store_urls: Vec<Value> = addresses
        .stores
        .iter()
        .map(|addr| url(addr).into())
        .collect();
    let mut file: Table = CONFIG.parse().context("deploy/config/cluster.toml")?;
    file.insert("mesh".into(), Value::try_from(keys)?);
    let mut set = |path: &[&str], value: Value| set_in(&mut file, path, value);
    set(&["urls", "scheduler"], url(&addresses.scheduler).into());
    set(&["urls", "draft_stores"], store_urls.clone().into());
    let broker_url = format!("nats://{}", addresses.broker);
    set(&["draft_store", "feed", "servers"], vec![broker_url].into());
    set(&["draft_store", "feed", "stream_replicas"], 1.into());
    set(&["draft_store", "feed", "peers"], store_urls.into());
    // The broker sets the whole room of its stream aside, and refuses a stream for which the disk has none.
    set(&["draft_store", "feed", "max_bytes"], STREAM_BYTES.into());

    let of_role =
        |role: Role, number: Option<usize>, addr: SocketAddr, more: Vec<(&'static str, String)>| {
            let (name, listen) = match role {
                Role::Gateway => ("gateway", "REFRAIN_GATEWAY__LISTEN"),
                Role::Scheduler => ("scheduler", "REFRAIN_SCHEDULER__LISTEN"),
                Role::Worker => ("worker", "REFRAIN_WORKER__LISTEN"),
                Role::DraftStore => ("store", "REFRAIN_DRAFT_STORE__LISTEN"),
                Role::ReferenceEngine | Role::Up => ("engine", "REFRAIN_ENGINE__LISTEN"),
            };
            let mut variables = vec![(listen, addr.to_string())];
            variables.extend(more);
            let config = config.to_string_lossy().into_owned();
            Member {
                name: number.map_or(name.to_owned(), |number| format!("{name}-{number}")),
                role: Some(role),
                program: None,
                arguments: vec![role.command().into(), "--config".into(), config],
                variables,
                addr,
            }
        };
    let mut members = Vec::new();
    for (number, addr) in addresses.gateways.iter().enumerate() {
        let dir = data_dir.join(format!("usage-{number}"));
        let more = vec![(
            "REFRAIN_GATEWAY__USAGE_DIR",
            dir.to_string_lossy().into_owned(),
        )];
        members.push(of_role(Role::Gateway, Some(number), *addr, more));
    }
    for (number, (addr, engine)) in addresses.workers.iter().zip(&addresses.engines).enumerate() {
        let more = vec![
            ("REFRAIN_WORKER__ID", format!("worker-{number}")),
            ("REFRAIN_WORKER__ADVERTISE_URL", url(addr)),
            ("REFRAIN_URLS__ENGINE", url(engine)),
        ];
        members.push(of_role(Role::Worker, Some(number), *addr, more));
    }
    members.push(of_role(
        Role::Scheduler,
        None,
        addresses.scheduler,
        Vec::new(),
    ));
    for (number, addr) in addresses.engines.iter().enumerate() {
        members.push(of_role(
            Role::ReferenceEngine,
            Some(number),
            *addr,
            Vec::new(),
        ));
    }
    for (number, addr) in addresses.stores.iter().enumerate() {
        let dir = data_dir.join(format!("store-{number}"));
        let more = vec![
            (
                "REFRAIN_DRAFT_STORE__DATA_DIR",
                dir.to_string_lossy().into_owned(),
            ),
            ("REFRAIN_DRAFT_STORE__FEED__ADVERTISE_URL", url(addr)),
        ];
        members.push(of_role(Role::DraftStore, Some(number), *addr, more));
    }
    let broker_dir = data_dir.join("nats").to_string_lossy().into_owned();
    let (ip, port) = (addresses.broker.ip(), addresses.broker.port());
    members.push(Member {
        name: "nats".into(),
        role: None,
        program: Some(broker.to_owned()),
        arguments: [
            "-js",
            "-sd",
            &broker_dir,
            "-a",
            &ip.to_string(),
            "-p",
            &port.to_string(),
        ]
        .map(str::to_owned)
        .to_vec(),
        variables: Vec::new(),
        addr: addresses.broker,
    });
    Ok(Plan {
        members,
        gateways: addresses.gateways,
        file,
        config,
    })
}

/// Sets a value in nested tables, which are made where they are missing.
fn set_in(table: &mut Table, path: &[&str], value: Value) {
    match path {
        [] => {}
        [key] => drop(table.insert((*key).to_owned(), value)),
        [key, rest @ ..] => {
            let inner = table
                .entry(*key)
                .or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                set_in(inner, rest, value);
            }
        }
    }
}

/// Writes a file that only its owner may read, since it has keys.
pub(super) fn write_private(path: &Path, text: &str) -> anyhow::Result<()> {
    let name = || format!("{}: cannot be written", path.display());
    // An earlier file may be readable by others.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(name);
        }
        _ => {}
    }
    let mut options = std::fs::OpenOptions::new();
    let file = options.create_new(true).write(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::MeshFile;

    fn addresses(stores: u16) -> Addresses {
        let addr = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        Addresses {
            gateways: [addr(1), addr(2)],
            scheduler: addr(3),
            broker: addr(4),
            stores: (0..stores).map(|number| addr(100 + number)).collect(),
            workers: vec![addr(5), addr(6)],
            engines: vec![addr(7), addr(8)],
        }
    }

    #[test]
    fn every_process_has_a_configuration_without_faults() {
        let keys = MeshConfig::generate().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(&addresses(3), dir.path(), Path::new("/nats"), &keys).unwrap();
        write_private(&plan.config, &plan.file.to_string()).unwrap();
        assert_eq!(plan.members.len(), 3 + 2 + 2 + 2 + 1 + 1);
        let is_store = |member: &&Member| member.role == Some(Role::DraftStore);
        assert_eq!(plan.members.iter().filter(is_store).count(), 3);
        let names: BTreeSet<&str> = plan.members.iter().map(|member| &*member.name).collect();
        assert_eq!(names.len(), plan.members.len());
        for member in &plan.members {
            let Some(role) = member.role else { continue };
            assert_eq!(member.arguments[0], role.command());
            let variables = member.variables.iter();
            let variables = variables.map(|(name, value)| ((*name).into(), value.into()));
            let read = MeshFile::read(role, Some(&plan.config), variables);
            let read = read.unwrap_or_else(|error| panic!("{}: {error:#}", member.name));
            assert_eq!(read.urls.draft_stores.len(), 3);
            let own = format!("http://{}", member.addr);
            match role {
                Role::DraftStore => {
                    let feed = read.draft_store.feed.unwrap();
                    assert_eq!(feed.advertise_url, own);
                    assert!(feed.peers.contains(&own));
                    assert_eq!(feed.servers, ["nats://127.0.0.1:4"]);
                }
                Role::Worker => assert_eq!(read.worker.advertise_url, own),
                _ => {}
            }
        }
        let written = MeshFile::read(Role::Scheduler, Some(&plan.config), std::iter::empty());
        let written = written.unwrap();
        assert_eq!(
            written.gateway.models[0].id,
            crate::config::shipped_model().id
        );
        assert_eq!(written.gateway.keys[0].key.as_deref(), Some("refrain-dev"));
    }

    #[test]
    fn the_file_with_the_keys_is_its_owners() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.toml");
        std::fs::write(&path, "earlier").unwrap();
        write_private(&path, "now").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "now");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
