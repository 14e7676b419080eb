//! The commands that start services: read the configuration, start, wait for a signal, drain.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use refrain_accounts::tenants::key::KeyConfig;
use refrain_gateway::ModelConfig;
use refrain_service_kit::descriptors;
use refrain_service_kit::telemetry;

use crate::cluster;
use crate::config::MeshFile;
use crate::local_operator;
use crate::own_model::OwnModelArgs;
use crate::role::Role;
use crate::roles::Process;
use crate::signals::StopSignals;
use crate::welcome::{ShownKey, example_request};

/// Arguments of `refrain up`.
#[derive(Args)]
pub struct UpArgs {
    /// Configuration file; without it, an embedded default is used.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Address on which the gateway listens [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    listen: Option<SocketAddr>,
    /// Address of the listener for operators: the console, metrics and the admin API [default: 127.0.0.1:8090].
    /// Whoever reaches it reads the metrics, which name tenants. All else there needs the token in the data
    /// directory.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "cluster", value_parser = address)]
    operations_listen: Option<SocketAddr>,
    /// Make an API key at the first start, into the file `api-key` of the data directory, in place of the well-known
    /// `refrain-dev`. A configuration that says who may call goes first.
    #[arg(long, conflicts_with = "cluster")]
    make_key: bool,
    /// Directory of the draft store [default: ./refrain-data].
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Address of a listener for trainers, such as 127.0.0.1:8091, which needs no key. Without it there is none.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "cluster", value_parser = address)]
    trainer: Option<SocketAddr>,
    /// Start without an engine: so many engines may register with the listener for trainers.
    #[arg(long, value_name = "ENGINES", requires = "trainer", value_parser = clap::value_parser!(u32).range(1..=1024))]
    adopt: Option<u32>,
    /// Start separate processes instead, to see what happens when one goes: so many replicas of the draft store, two
    /// workers with engines, two gateways, a scheduler and a nats-server, which has to be installed. Their data go to
    /// the directory `cluster` under the data directory.
    #[arg(long, value_name = "STORES", conflicts_with = "config", value_parser = clap::value_parser!(u16).range(1..=9))]
    cluster: Option<u16>,
    #[command(flatten)]
    own_model: OwnModelArgs,
}

/// Reads an address.
fn address(text: &str) -> Result<SocketAddr, String> {
    let fault = || "must be an IP address and a port, such as 127.0.0.1:8080".to_owned();
    text.parse().map_err(|_| fault())
}

/// Arguments of the commands that start a single service.
#[derive(Args)]
pub struct ServiceArgs {
    /// Configuration file.
    #[arg(long)]
    config: PathBuf,
}

/// `refrain up`: runs the whole mesh in this process until a signal stops it.
///
/// # Errors
/// A faulty configuration, or a service that cannot start.
pub fn up(args: UpArgs) -> anyhow::Result<()> {
    let mut file = MeshFile::load(Role::Up, args.config.as_deref())?;
    if let Some(stores) = args.cluster {
        let listen = args
            .listen
            .map_or_else(|| file.gateway.listen.parse(), Ok)?;
        ensure!(
            listen.ip().to_canonical().is_loopback(),
            "--listen: with --cluster this must be an address of this machine alone, such as 127.0.0.1:8080, since \
             everybody knows its key"
        );
        let data_dir = args.data_dir.unwrap_or(file.draft_store.data_dir);
        return cluster::run(stores.into(), listen, &data_dir.join("cluster"));
    }
    if let Some(listen) = args.listen {
        file.gateway.listen = listen.to_string();
    }
    if args.operations_listen.is_some() {
        file.gateway.operations_listen = args.operations_listen;
        file.has_operator_for_others = true;
    }
    if let Some(data_dir) = args.data_dir {
        file.draft_store.data_dir = data_dir;
    }
    if args.trainer.is_some() {
        file.gateway.trainer.listen = args.trainer;
    }
    if let Some(engines) = args.adopt {
        file.worker.adoption.engines_max = engines;
    }
    for said in args.own_model.apply(&mut file)? {
        eprintln!("{said}");
    }
    let is_configured =
        args.config.is_some() || std::env::var_os("REFRAIN_TELEMETRY__LOG").is_some();
    if logs_only_warnings(is_configured, std::io::stderr().is_terminal()) {
        file.telemetry.log = "warn".into();
    }
    let mut key_file = None;
    if args.make_key && !file.has_callers() {
        let (key, path) = local_operator::own_key(&file.draft_store.data_dir)?;
        file.add_callers(std::iter::once(KeyConfig {
            key: Some(key),
            key_sha256: None,
            tenant: OWN_TENANT.parse().map_err(anyhow::Error::msg)?,
        }));
        key_file = Some(path);
    }
    file.fill_in_for_up();
    if let Some(fault) = file.door_fault() {
        bail!("{fault}");
    }
    let model = file.gateway.models.first().cloned().unwrap_or_default();
    let key = shown_key(&file);
    let is_trial = file.well_known_key().is_some();
    let is_external = match file.engines.first() {
        Some(engine) => !engine.is_here(),
        None => file.worker.engine.is_external(),
    };
    let verifies_drafts = !is_external && !file.worker.adoption.is_on();
    let gateway = file.gateway.http.scheme();
    let operations = file.gateway.operations_http.scheme();
    let trainer = file.gateway.trainer.http.scheme();
    let has_console = file.gateway.console == Some(true);
    let token_file = local_operator::token_file(&file);
    run(Role::Up, file, |addr, process| {
        let url = format!("{gateway}://{addr}");
        let operations = process
            .operations_addr()
            .map(|addr| format!("{operations}://{addr}"));
        let metrics = operations.as_ref().unwrap_or(&url);
        if process.waits_for_engine() {
            println!(
                "Not ready yet: it waits for its engine (urls.engine). {url}/readyz says more."
            );
        }
        println!("{}", welcome(&url, metrics, &model, &key, verifies_drafts));
        if is_trial {
            println!("Chat:      refrain chat --url {url}");
            println!("Benchmark: refrain bench --url {url}");
        }
        if let Some(file) = key_file {
            println!("API key:   in {}", file.display());
        }
        if let Some(addr) = process.trainer_addr() {
            println!("Trainers:  {trainer}://{addr}");
        }
        if let Some(operations) = operations.filter(|_| has_console) {
            println!("{}", console_lines(&operations, token_file.as_deref()));
        }
    })
}

/// Whether only warnings are logged. A terminal without a configuration is a trial on a laptop, where a line per
/// request would bury them. Everywhere else somebody operates a service, and wants these lines.
fn logs_only_warnings(is_configured: bool, is_terminal: bool) -> bool {
    is_terminal && !is_configured
}

/// Runs a single service until a signal stops it.
///
/// # Errors
/// A faulty configuration, or a service that cannot start.
pub fn service(role: Role, args: ServiceArgs) -> anyhow::Result<()> {
    let file = MeshFile::load(role, Some(&args.config))?;
    if matches!(role, Role::Gateway | Role::Scheduler) {
        refuse_huge_pages();
    }
    run(role, file, |addr, _| {
        println!("{} listens on {addr}", role.name());
    })
}

/// Asks the system for pages of the usual size only.
///
/// The allocator wants pages of 2 MiB. Ten thousand open streams are many small values of different ages, and hold
/// most such pages half empty: a stream then takes half as much memory again. An index of drafts is read at random
/// places and gains from large pages, so only processes without one refuse them.
fn refuse_huge_pages() {
    // After an error the process takes more memory, and nothing else is different.
    // SAFETY: the call has no pointers. It only changes how the system backs the memory of this process.
    let _ = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
}

/// The tenant of the key that a first start makes.
const OWN_TENANT: &str = "default";

/// The callers' key as the example shows it. Only one that everybody knows is printed, since output goes to logs.
fn shown_key(file: &MeshFile) -> ShownKey {
    match file.well_known_key() {
        Some(key) => ShownKey::WellKnown(key.to_owned()),
        None if file.gateway.anonymous_tenant.is_some() => ShownKey::None,
        None => ShownKey::Variable,
    }
}

fn welcome(
    url: &str,
    metrics: &str,
    model: &ModelConfig,
    key: &ShownKey,
    verifies_drafts: bool,
) -> String {
    let repeat = match verifies_drafts {
        true => {
            "Send it twice: the second answer is drafted from the first (metrics.speculative_decoding).\n"
        }
        false => "",
    };
    let example = example_request(url, model, key);
    format!(
        "Refrain is up: {url}/v1\n\n\
         {example}\n\n\
         {repeat}\
         Metrics:   {metrics}/metrics"
    )
}

/// How the console is reached, and where its token is.
fn console_lines(operations: &str, token_file: Option<&Path>) -> String {
    let console = format!("Console:   {operations}/console");
    match token_file {
        Some(file) => format!("{console}, with the token in {}", file.display()),
        None => console,
    }
}

/// Starts a role, waits for a signal, and drains. A second signal skips the drain.
fn run(
    role: Role,
    file: MeshFile,
    on_start: impl FnOnce(SocketAddr, &Process),
) -> anyhow::Result<()> {
    let _telemetry = telemetry::init(&file.telemetry, role.name())?;
    // The limit on connections follows from the limit on open files, so it is raised before anything listens.
    descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        let process = tokio::select! {
            process = Process::start(role, file) => process?,
            () = stop.received() => return Ok(()),
        };
        let addr = process.addr().context("the service has no listener")?;
        on_start(addr, &process);
        stop.received().await;
        tracing::info!("draining");
        tokio::select! {
            () = process.drain() => {}
            () = stop.received() => tracing::warn!("second signal: stopping at once"),
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::shipped_model;

    #[test]
    fn only_a_trial_in_a_terminal_is_quiet() {
        assert!(logs_only_warnings(false, true));
        assert!(!logs_only_warnings(false, false));
        assert!(!logs_only_warnings(true, true) && !logs_only_warnings(true, false));
    }

    #[test]
    fn only_a_key_that_everybody_knows_is_printed() {
        let example = |toml: &str| {
            let mut file: MeshFile = toml::from_str(toml).unwrap();
            file.fill_in_for_up();
            welcome(
                "http://a",
                "http://b",
                &shipped_model(),
                &shown_key(&file),
                true,
            )
        };
        assert!(example("").contains("'authorization: Bearer refrain-dev'"));
        let own = example("[gateway]\nkeys = [{ key = \"sk-mine\", tenant = \"a\" }]");
        assert!(!own.contains("sk-mine") && own.contains("\"authorization: Bearer $API_KEY\""));
        let anybody = example("[gateway]\nanonymous_tenant = \"a\"");
        assert!(!anybody.contains("authorization"));
    }

    #[test]
    fn an_address_without_its_parts_is_answered_with_an_example() {
        for text in ["localhost:8080", ":8080", "8080", "127.0.0.1"] {
            assert!(address(text).unwrap_err().contains("127.0.0.1:8080"));
        }
        assert_eq!(address("[::1]:80").unwrap().port(), 80);
    }
}
