//! Measures what a token that a third-party engine streams costs the mesh, and how long the mesh delays it:
//!
//! ```text
//! cargo bench -p refrain --bench streaming        # both dialects, 1 and 16 streams at once
//! cargo bench -p refrain --bench streaming -- --kinds vllm --streams 4 --rate 50 --rounds 9
//! ```
//!
//! `refrain up`, built for release, runs in a process of its own. Another process stands in for the engine
//! (`engine.rs`): it streams letters at a fixed rate in the format of llama-server or vLLM, one to each request at
//! every tick. This process is the client. Rounds through the mesh and rounds directly to the engine alternate.
//!
//! *CPU* is the CPU time of the mesh's process, user and kernel, over the tokens. It includes starting and ending
//! streams, confirming the engine and storing outputs. *Idle* is the CPU time that the idle mesh uses per second.
//! *Sleeps* are the number of times per token that a thread had to be woken. *Delay* is the time from the engine's
//! sending of a token to its arrival here, by one clock; *direct* is the same without the mesh, which is the
//! machine's own part.

mod client;
mod engine;
mod process;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::{Parser, ValueEnum};

use crate::client::{Client, Read};
use crate::process::{Child, Counts, Used};

/// The model's name at the engine.
const SERVED: &str = "letters";
/// The model's name at the mesh.
const PUBLIC: &str = "public-letters";

/// The format in which the engine streams.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dialect {
    LlamaCpp,
    Vllm,
}

impl Dialect {
    fn kind(self) -> &'static str {
        match self {
            Dialect::LlamaCpp => "llama-cpp",
            Dialect::Vllm => "vllm",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Dialect::LlamaCpp => "/completion",
            Dialect::Vllm => "/v1/completions",
        }
    }

    /// The request field with the number of tokens.
    fn limit(self) -> &'static str {
        match self {
            Dialect::LlamaCpp => "n_predict",
            Dialect::Vllm => "max_tokens",
        }
    }
}

/// Measure what a streamed token costs the mesh.
#[derive(Parser)]
struct Options {
    /// Formats in which the engine streams.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Dialect::LlamaCpp, Dialect::Vllm])]
    kinds: Vec<Dialect>,
    /// Numbers of streams at once.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    streams: Vec<usize>,
    /// Tokens per second of each stream.
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// Tokens of a stream, at most the shipped model's context.
    #[arg(long, default_value_t = 300)]
    tokens: u64,
    /// Rounds. Figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The `refrain` program to measure, to compare with another build.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_refrain"))]
    program: PathBuf,
    /// Run as the engine.
    #[arg(long, hide = true)]
    engine: Option<Dialect>,
    /// Cargo passes this to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if let Some(dialect) = options.engine {
        return engine::serve(dialect, options.rate);
    }
    refrain_service_kit::telemetry::install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(measure(&options))
}

async fn measure(options: &Options) -> anyhow::Result<()> {
    println!(
        "{:<10} {:>7} {:>7} {:>13} {:>10} {:>10} {:>10} {:>13} {:>13} {:>13}",
        "engine",
        "streams",
        "tokens",
        "CPU us/token",
        "idle ms/s",
        "sleeps/tok",
        "events/tok",
        "delay p50 ms",
        "direct p50 ms",
        "p99 / direct"
    );
    for &kind in &options.kinds {
        let (_engine, engine_url) = start_engine(kind, options.rate)?;
        let dir = tempfile::tempdir()?;
        let (mesh, mesh_url) = start_mesh(&options.program, dir.path(), kind, &engine_url)?;
        let pid = mesh.pid();
        let through = Client::new(kind, &engine_url, Some(&mesh_url));
        let direct = Client::new(kind, &engine_url, None);
        // This opens connections and starts threads.
        through
            .read(options.streams.iter().copied().max().unwrap_or(1), 20)
            .await?;
        let idle = idle_ms_per_s(pid).await?;
        for &streams in &options.streams {
            let mut rounds = Rounds::default();
            for _ in 0..options.rounds {
                let before = Used::by(pid)?;
                let read = through.read(streams, options.tokens).await?;
                let used = Used::by(pid)?.since(&before);
                rounds.add(&used, &read, &direct.read(streams, options.tokens).await?);
            }
            println!(
                "{:<10} {:>7} {:>7} {:>13.1} {:>10.2} {:>10.2} {:>10.2} {:>13.3} {:>13.3} {:>13}",
                kind.kind(),
                streams,
                rounds.tokens,
                median(&mut rounds.cpu_us),
                idle,
                median(&mut rounds.sleeps),
                median(&mut rounds.events),
                median(&mut rounds.delay_ms),
                median(&mut rounds.direct_ms),
                format!(
                    "{:.2} / {:.2}",
                    median(&mut rounds.delay_p99_ms),
                    median(&mut rounds.direct_p99_ms)
                ),
            );
        }
    }
    Ok(())
}

/// Figures of each round, per token.
#[derive(Default)]
struct Rounds {
    tokens: u64,
    cpu_us: Vec<f64>,
    sleeps: Vec<f64>,
    events: Vec<f64>,
    delay_ms: Vec<f64>,
    delay_p99_ms: Vec<f64>,
    direct_ms: Vec<f64>,
    direct_p99_ms: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, used: &Counts, through: &Read, direct: &Read) {
        let tokens = through.tokens as f64;
        self.tokens += through.tokens;
        self.cpu_us.push(used.cpu_ns as f64 / 1e3 / tokens);
        self.sleeps.push(used.sleeps as f64 / tokens);
        self.events.push(through.events as f64 / tokens);
        self.delay_ms.push(quantile(&through.delays_ms, 0.5));
        self.delay_p99_ms.push(quantile(&through.delays_ms, 0.99));
        self.direct_ms.push(quantile(&direct.delays_ms, 0.5));
        self.direct_p99_ms.push(quantile(&direct.delays_ms, 0.99));
    }
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len().saturating_sub(1)) as f64 * share;
    sorted
        .get(place.round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

fn median(values: &mut [f64]) -> f64 {
    quantile(values, 0.5)
}

async fn idle_ms_per_s(pid: u32) -> anyhow::Result<f64> {
    let seconds = 3.0;
    let before = Used::by(pid)?;
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    Ok(Used::by(pid)?.since(&before).cpu_ns as f64 / 1e6 / seconds)
}

/// Starts this program as the engine, and returns its address.
fn start_engine(dialect: Dialect, rate: f64) -> anyhow::Result<(Child, String)> {
    let value = dialect
        .to_possible_value()
        .context("a dialect without a name")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--engine", value.get_name(), "--rate", &rate.to_string()]);
    let (child, line) = Child::start(command, ":")?;
    Ok((child, format!("http://{line}")))
}

/// Starts `refrain up` in front of the engine, and returns its address.
fn start_mesh(
    program: &Path,
    dir: &Path,
    kind: Dialect,
    engine_url: &str,
) -> anyhow::Result<(Child, String)> {
    let settings = dir.join("mesh.toml");
    std::fs::write(&settings, mesh_settings(kind, engine_url))?;
    let mut command = Command::new(program);
    command
        .args(["up", "--listen", "127.0.0.1:0", "--config"])
        .arg(settings)
        .arg("--data-dir")
        .arg(dir.join("data"))
        .stderr(File::create(dir.join("log"))?);
    let (child, line) = Child::start(command, "Refrain is up: ")?;
    let url = line.trim_start_matches("Refrain is up: ");
    Ok((child, url.trim_end_matches("/v1").to_owned()))
}

fn mesh_settings(kind: Dialect, engine_url: &str) -> String {
    let kind = kind.kind();
    format!(
        r#"
[urls]
engine = "{engine_url}"
[telemetry]
log = "info"
[gateway]
anonymous_tenant = "tenant"
[[gateway.models]]
id = "{PUBLIC}"
files = "builtin:refrain-tiny"
[worker]
running_max = 64
[worker.engine]
kind = "{kind}"
model = "{PUBLIC}"
served_model = "{SERVED}"
files = "builtin:refrain-tiny"
"#
    )
}

/// Nanoseconds of the system's clock, which all processes of a machine share.
fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}
