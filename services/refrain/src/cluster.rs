//! `refrain up --cluster N`: the mesh as processes of their own on this machine, with N replicas of the draft store.
//!
//! It is for seeing what happens when one of them goes. `plan` decides what runs, and `processes` runs it.

mod plan;
mod processes;

use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use refrain_service_kit::mesh::MeshConfig;
use refrain_service_kit::telemetry::install_crypto_provider;

use self::plan::{Addresses, Member, Plan};
use self::processes::Processes;
use crate::config::shipped_model;
use crate::signals::StopSignals;
use crate::welcome::{ShownKey, example_request};

/// The brokers' program.
const BROKER: &str = "nats-server";

/// Ports for processes that nobody gave one. They lie below the range from which Linux chooses ports for outgoing
/// connections. Such a connection could take the port of a process that ended, before it is started again.
const PORTS: Range<u16> = 10_000..20_000;

/// Runs a mesh with `stores` replicas until a signal stops it. The first gateway listens on `listen`, the second one
/// on the next port; with port 0 both listen on free ports. Data, logs and the configuration are in `data_dir`.
///
/// # Errors
/// There is no `nats-server`, or a process does not start.
pub(crate) fn run(stores: usize, listen: SocketAddr, data_dir: &Path) -> anyhow::Result<()> {
    install_crypto_provider();
    let broker = find_program(BROKER, std::env::var_os("PATH")).with_context(|| {
        format!(
            "{BROKER} is not on PATH: the replicas keep themselves equal through it. Install it, as with \
             `apt install {BROKER}`"
        )
    })?;
    std::fs::create_dir_all(data_dir)
        .with_context(|| format!("{}: cannot be created", data_dir.display()))?;
    let data_dir = data_dir.canonicalize()?;
    let addresses = Addresses::choose(stores, listen)?;
    let plan = plan::plan(&addresses, &data_dir, &broker, &MeshConfig::generate()?)?;
    plan::write_private(&plan.config, &plan.file.to_string())?;
    let Plan {
        members,
        gateways,
        config,
        ..
    } = plan;
    // The children get a signal when the thread that started them ends, so all are started by this one.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        let mut processes = Processes::start(members, &data_dir)?;
        let started = tokio::select! {
            started = processes.wait_until_ready() => started,
            () = stop.received() => bail!("stopped before all processes were ready"),
        };
        if let Err(error) = started {
            processes.stop().await;
            return Err(error);
        }
        println!("{}", welcome(gateways, &config, &processes));
        tokio::select! {
            never = processes.keep_running() => match never {},
            () = stop.received() => {}
        }
        println!("Stopping.");
        tokio::select! {
            () = processes.stop() => {}
            () = stop.received() => println!("Second signal: stopping at once."),
        }
        Ok(())
    })
}

fn find_program(name: &str, path: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let path = path.unwrap_or_default();
    // Debian's server programs are not on everybody's PATH.
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    folders
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}

impl Addresses {
    /// Chooses free ports. Another process may take one of them before the child does, which then says so.
    fn choose(stores: usize, listen: SocketAddr) -> anyhow::Result<Self> {
        let mut open = Vec::new();
        // Several meshes may start at the same time, so each begins elsewhere.
        let first = std::process::id().wrapping_mul(97) as usize % PORTS.len();
        let mut ports = PORTS.cycle().skip(first).take(PORTS.len());
        let mut free = |ip| {
            let mut listeners =
                (&mut ports).map(|port| TcpListener::bind(SocketAddr::new(ip, port)));
            let listener = listeners.find_map(Result::ok);
            let listener =
                listener.with_context(|| format!("all ports of {PORTS:?} are taken at {ip}"))?;
            let addr = listener.local_addr()?;
            open.push(listener);
            anyhow::Ok(addr)
        };
        let local = SocketAddr::from(([127, 0, 0, 1], 0)).ip();
        let gateways = match listen.port() {
            0 => [free(listen.ip())?, free(listen.ip())?],
            u16::MAX => {
                bail!("--listen: the second gateway needs the next port, and there is none")
            }
            port => [listen, SocketAddr::new(listen.ip(), port + 1)],
        };
        let mut several = |count: usize| {
            (0..count)
                .map(|_| free(local))
                .collect::<Result<Vec<_>, _>>()
        };
        let addresses = Addresses {
            gateways,
            scheduler: several(1)?[0],
            broker: several(1)?[0],
            stores: several(stores)?,
            workers: several(plan::WORKERS)?,
            engines: several(plan::WORKERS)?,
        };
        // All were open until the last was known, so none came twice.
        drop(open);
        Ok(addresses)
    }
}

fn welcome([first, second]: [SocketAddr; 2], config: &Path, processes: &Processes) -> String {
    let rows: String = processes
        .iter()
        .map(|(Member { name, addr, .. }, pid)| {
            format!("  {name:<10} {:<16} pid {pid}\n", addr.to_string())
        })
        .collect();
    format!(
        "Refrain is up, as processes that share nothing but the network:\n\n{rows}\n\
         {request}\n\n\
         Then end a store or the first gateway with `kill -9 PID`, and ask the other gateway, http://{second}/v1.\n\
         The answer is the same, and it is still drafted from the first one. A process that ended is started again.\n\n\
         Compare the stores: refrain store verify --config {config}\n\
         Logs and data:      {dir}",
        request = example_request(
            &format!("http://{first}"),
            &shipped_model(),
            &ShownKey::WellKnown("refrain-dev".to_owned())
        ),
        config = config.display(),
        dir = config.parent().unwrap_or(Path::new(".")).display(),
    )
}
