//! Arguments -> configuration -> telemetry -> start -> wait for a signal -> drain.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use refrain::config::{MeshFile, Role, dev_keys};
use refrain::roles::Process;
use refrain::store::{self, StoreArgs};
use refrain_lab::analyze::{self, AnalyzeOptions};
use refrain_lab::bench::{self, BenchOptions};
use refrain_lab::replay::{self, ProgressLine, ReplayOptions};
use refrain_service_kit::descriptors;
use refrain_service_kit::mesh::MeshConfig;
use refrain_service_kit::telemetry;

/// A mesh that makes LLM serving faster by remembering what models said.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start everything in one process: gateway, scheduler, worker, draft store and reference engine.
    Up(UpArgs),
    /// Start the OpenAI-compatible gateway.
    Gateway(ServiceArgs),
    /// Start the scheduler.
    Scheduler(ServiceArgs),
    /// Start a worker.
    Worker(ServiceArgs),
    /// Start the draft store.
    DraftStore(ServiceArgs),
    /// Start the shipped CPU engine.
    ReferenceEngine(ServiceArgs),
    /// Print fresh keys for the mesh section of a configuration file.
    Keys,
    /// Measure a running mesh: decoding with drafts and without, in one run.
    Bench(BenchArgs),
    /// Tell what drafting would be worth on recorded calls, without an engine.
    Replay(ReplayOptions),
    /// Tell of recorded calls, by workload and tenant, whether drafting would help.
    Analyze(AnalyzeOptions),
    /// Look at a draft store, fill it, or take out of it: a running one or its directory.
    Store(StoreArgs),
}

#[derive(Args)]
struct UpArgs {
    /// Configuration file; without it the embedded default is used.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Where the gateway listens [default: 127.0.0.1:8080].
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Where outputs are kept [default: ./refrain-data].
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

#[derive(Args)]
struct ServiceArgs {
    /// Configuration file.
    #[arg(long)]
    config: PathBuf,
}

#[derive(Args)]
struct BenchArgs {
    /// The gateway.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// API key, once per tenant; every mode needs tenants of its own [default: the keys of `refrain up`].
    #[arg(long = "api-key", default_values_t = dev_keys())]
    api_keys: Vec<String>,
    /// Values of `speculation` to compare; `off` is what speed-ups are measured against.
    #[arg(long, value_delimiter = ',', default_values_t = ["off", "suffix", "eagle3", "auto"].map(str::to_owned))]
    modes: Vec<String>,
    /// Model [default: the first that the gateway lists].
    #[arg(long)]
    model: Option<String>,
    /// Rounds of each part of the workload; ratios are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// Calls of a round.
    #[arg(long, default_value_t = 32)]
    calls: usize,
    /// Calls under way at once.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// The workload follows from it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Up(args) => up(args),
        Command::Gateway(args) => service(Role::Gateway, args),
        Command::Scheduler(args) => service(Role::Scheduler, args),
        Command::Worker(args) => service(Role::Worker, args),
        Command::DraftStore(args) => service(Role::DraftStore, args),
        Command::ReferenceEngine(args) => service(Role::ReferenceEngine, args),
        Command::Keys => keys(),
        Command::Bench(args) => run_bench(args),
        Command::Store(args) => store::run(args),
        Command::Replay(options) => run_replay(&options),
        Command::Analyze(options) => run_analyze(&options),
    }
}

fn up(args: UpArgs) -> anyhow::Result<()> {
    let mut file = MeshFile::load(Role::Up, args.config.as_deref())?;
    if let Some(listen) = args.listen {
        file.gateway.listen = listen.to_string();
    }
    if let Some(data_dir) = args.data_dir {
        file.draft_store.data_dir = data_dir;
    }
    if args.config.is_none() && std::env::var_os("REFRAIN_TELEMETRY__LOG").is_none() {
        // On a laptop the log should say what goes wrong and leave the rest to the page of metrics.
        file.telemetry.log = "warn".into();
    }
    file.fill_in_for_up();
    let model = file
        .gateway
        .models
        .first()
        .map(|model| model.id.clone())
        .unwrap_or_default();
    let key = file
        .gateway
        .keys
        .first()
        .and_then(|key| key.key.clone())
        .unwrap_or_default();
    let drafts = !file.worker.engine.is_external();
    run(Role::Up, file, |addr| {
        println!("Refrain is up: http://{addr}/v1\n");
        println!("Try it:");
        println!("  curl -s http://{addr}/v1/chat/completions -H 'authorization: Bearer {key}' \\");
        println!("    -H 'content-type: application/json' -d '{{");
        println!(
            "      \"model\": \"{model}\", \"temperature\": 0, \"messages\": [{DEMO_MESSAGES}]}}'\n"
        );
        if drafts {
            println!(
                "Say it twice: the second answer is drafted from the first (metrics.speculative_decoding)."
            );
        }
        println!("Metrics:   http://{addr}/metrics");
        println!("Benchmark: refrain bench --url http://{addr}");
    })
}

/// A question of the kind that the shipped model was trained on.
const DEMO_MESSAGES: &str = r#"
        {"role": "system", "content": "You write SQL. Answer with one statement."},
        {"role": "user", "content": "CREATE TABLE orders (\n  id INTEGER PRIMARY KEY,\n  city TEXT,\n  amount INTEGER\n);\n\nWhat is the average amount of the orders per city?"}"#;

fn service(role: Role, args: ServiceArgs) -> anyhow::Result<()> {
    let file = MeshFile::load(role, Some(&args.config))?;
    run(role, file, |addr| {
        println!("{} listens on {addr}", role.name())
    })
}

/// Starts, waits for a signal, drains.
fn run(role: Role, file: MeshFile, started: impl FnOnce(SocketAddr)) -> anyhow::Result<()> {
    let _telemetry = telemetry::init(&file.telemetry, role.name())?;
    // Before anything listens: how many callers get a place follows from it.
    descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut stop = Signals::listen()?;
        let process = tokio::select! {
            process = Process::start(role, file) => process?,
            () = stop.received() => return Ok(()),
        };
        started(process.addr().context("a service without a listener")?);
        stop.received().await;
        tracing::info!("draining");
        tokio::select! {
            () = process.drain() => {}
            () = stop.received() => tracing::warn!("second signal: stopping at once"),
        }
        Ok(())
    })
}

/// What asks the process to stop. There is no configuration to be read anew, so a hang-up is such a signal, too: its own
/// default would end the process without a drain.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    /// `None` under `nohup`, which asks that hang-ups go unheard.
    hang_up: Option<tokio::signal::unix::Signal>,
}

impl Signals {
    fn listen() -> anyhow::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: match ignores_hang_ups(&status) {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
        })
    }

    async fn received(&mut self) {
        let hang_up = async {
            match &mut self.hang_up {
                Some(hang_up) => hang_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = hang_up => {}
        }
    }
}

/// Whether a process was started with SIGHUP ignored, by its `/proc/*/status`: signal 1 is the lowest bit of a mask in hex.
/// A system without such a file says no.
fn ignores_hang_ups(status: &str) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}

fn keys() -> anyhow::Result<()> {
    let keys = MeshConfig::generate()?;
    println!("[mesh]\n# Every service.\nsecret = \"{}\"", keys.secret);
    println!("namespace_public_key = \"{}\"", keys.namespace_public_key);
    println!(
        "# The gateway alone.\nnamespace_signing_key = \"{}\"",
        keys.namespace_signing_key
    );
    Ok(())
}

fn run_bench(args: BenchArgs) -> anyhow::Result<()> {
    let options = BenchOptions {
        url: args.url,
        api_keys: args.api_keys,
        model: args.model,
        rounds: args.rounds,
        calls: args.calls,
        concurrency: args.concurrency,
        seed: args.seed,
        modes: args.modes,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let report = runtime.block_on(bench::run(&options, |line| eprintln!("{line}")))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn run_replay(options: &ReplayOptions) -> anyhow::Result<()> {
    let mut line = ProgressLine::default();
    let report = replay::run(options, |progress| line.show(progress))?;
    drop(line);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
        if options.reliability {
            print!("{}", report.reliability_table());
        }
    }
    Ok(())
}

fn run_analyze(options: &AnalyzeOptions) -> anyhow::Result<()> {
    let mut line = ProgressLine::default();
    let report = analyze::run(options, |progress| line.show(progress))?;
    drop(line);
    if let Some(path) = &options.html {
        std::fs::write(path, analyze::html(&report)?)
            .with_context(|| path.display().to_string())?;
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_under_nohup_is_told_apart() {
        let status =
            |mask: &str| format!("Name:\trefrain\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\n");
        assert!(ignores_hang_ups(&status("0000000000000001")));
        assert!(ignores_hang_ups(&status("0000000000001001")));
        assert!(!ignores_hang_ups(&status("0000000000001000")));
        assert!(!ignores_hang_ups(""));
    }
}
