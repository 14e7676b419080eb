//! Measures what a request costs the mesh, beside SGLang's gateway `smg`, in front of an engine that answers at once:
//!
//! ```text
//! services/refrain/benches/gateway/fetch_smg       # once; without it, the mesh is measured alone
//! cargo bench -p refrain --bench gateway           # all cases
//! cargo bench -p refrain --bench gateway -- --cases short,streamed --rounds 9
//! ```
//!
//! `refrain up`, built for release, runs in a process of its own, and so does `smg`. Another process stands in for
//! the engine (`engine.rs`). This process is the client. Rounds through the mesh and rounds through `smg` alternate,
//! with the same bodies, and both log warnings only.
//!
//! *CPU* is the CPU time of the process, user and kernel, over the requests or tokens of a round, with the pause
//! after it, in which outputs reach the store. Figures are medians over the rounds. *Added* is the time of a
//! one-token answer at half of what one core can do, less that of the engine alone at the same rate (`latency.rs`).
//!
//! `--stages` then measures where the time of the mesh goes (`stages.rs`), in rounds of their own, since the clock
//! itself takes time.

mod engine;
mod latency;
mod load;
#[path = "../streaming/process.rs"]
mod process;
mod stages;
mod texts;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Parser, ValueEnum};
use refrain_tokenization::{ModelFiles, Tokenizer};
use serde_json::Value;

use crate::latency::Asked;
use crate::load::Target;
use crate::process::{Child, Used};
use crate::texts::Texts;

/// The name of the model, everywhere.
const MODEL: &str = "model";
/// Longest text of the model, tokens, as the engine says.
const CONTEXT_TOKENS: u32 = 1 << 20;
const MODEL_FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference-engine/model");
const SMG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/smg/bin/smg");
/// How long `smg` may take to find its engine.
const SMG_START_MAX: Duration = Duration::from_secs(60);

/// The requests of a round.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Case {
    /// A short question, answered by one token.
    Short,
    /// A short question, answered by 128 streamed tokens, 32 streams at once, as fast as they are read.
    Streamed,
    /// The same at 200 tokens per second of each stream.
    Paced,
    /// A new prompt of 12 KB, answered by one token.
    #[value(name = "12kb")]
    Prompt12Kb,
    /// A conversation of 50,000 tokens that grows by a turn with each request, each answered by one token.
    #[value(name = "50k-tokens")]
    Chat50kTokens,
    /// A body of 500 KB, answered by one token.
    #[value(name = "500kb")]
    Body500Kb,
}

/// Pause after a round. Uploads to the store come every 250 ms, and are a part of what a request costs.
const SETTLE: Duration = Duration::from_millis(600);
/// Requests of a round at half load.
const LATENCY_REQUESTS: usize = 400;

/// Tokens of a streamed answer.
const STREAMED_TOKENS: u64 = 128;
const PACED_PER_S: u64 = 200;

impl Case {
    /// Requests of a round.
    fn requests(self) -> usize {
        match self {
            Case::Short => 1_600,
            Case::Streamed => 288,
            Case::Paced => 64,
            Case::Prompt12Kb => 240,
            Case::Chat50kTokens | Case::Body500Kb => 32,
        }
    }

    fn at_once(self) -> usize {
        match self {
            Case::Short => 8,
            Case::Streamed | Case::Paced => 32,
            Case::Prompt12Kb => 4,
            Case::Chat50kTokens | Case::Body500Kb => 2,
        }
    }

    /// The unit of its figures, and how many of them a request has.
    fn unit(self) -> (&'static str, f64) {
        match self {
            Case::Streamed | Case::Paced => ("token", STREAMED_TOKENS as f64),
            _ => ("request", 1.0),
        }
    }

    /// The bodies of a round.
    fn bodies(self, texts: &mut Texts, conversation: &mut Vec<Value>) -> Vec<Vec<u8>> {
        let body = |_| match self {
            Case::Short => texts::chat(&texts::short(texts), 1, false, 0),
            Case::Streamed => texts::chat(&texts::short(texts), STREAMED_TOKENS, true, 0),
            Case::Paced => texts::chat(&texts::short(texts), STREAMED_TOKENS, true, PACED_PER_S),
            Case::Prompt12Kb => texts::chat(&texts::long(texts, 12_000), 1, false, 0),
            Case::Chat50kTokens => {
                texts::turn(texts, conversation);
                texts::chat(conversation, 1, false, 0)
            }
            Case::Body500Kb => texts::chat(&texts::of_bytes(texts, 500_000), 1, false, 0),
        };
        (0..self.requests()).map(body).collect()
    }
}

/// Measure what a request costs the mesh.
#[derive(Parser)]
struct Options {
    /// Cases to measure [default: all].
    #[arg(long, value_enum, value_delimiter = ',')]
    cases: Vec<Case>,
    /// Rounds. Figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure the CPU time of each stage instead.
    #[arg(long)]
    stages: bool,
    /// Rounds at half load.
    #[arg(long, default_value_t = 25)]
    latency_rounds: usize,
    /// Leave out the rounds at half load.
    #[arg(long)]
    no_latency: bool,
    /// The `refrain` program to measure, to compare with another build.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_refrain"))]
    program: PathBuf,
    /// The `smg` program.
    #[arg(long, default_value = SMG)]
    smg: PathBuf,
    /// Run as the engine.
    #[arg(long, hide = true)]
    engine: bool,
    /// Run as the mesh with a clock on its stages, with this configuration.
    #[arg(long, hide = true)]
    mesh: Option<PathBuf>,
    /// Cargo passes this to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.engine {
        return engine::serve();
    }
    if let Some(config) = &options.mesh {
        return stages::serve(config);
    }
    refrain_service_kit::telemetry::install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    match options.stages {
        true => runtime.block_on(measure_stages(&options)),
        false => runtime.block_on(measure(&options)),
    }
}

/// A process that is measured.
struct Measured {
    name: &'static str,
    child: Child,
    url: String,
    target: Target,
}

impl Options {
    fn cases(&self) -> Vec<Case> {
        match self.cases.is_empty() {
            true => Case::value_variants().to_vec(),
            false => self.cases.clone(),
        }
    }
}

/// Makes the bodies of all rounds.
struct Bodies {
    texts: Texts,
    conversation: Vec<Value>,
}

impl Bodies {
    fn new() -> anyhow::Result<Self> {
        let tokenizer: Tokenizer = ModelFiles::from_dir(MODEL_FILES)?.tokenizer()?;
        let mut texts = Texts::new(1);
        let conversation = texts::conversation(&mut texts, &tokenizer, 50_000)?;
        Ok(Bodies {
            texts,
            conversation,
        })
    }

    fn of(&mut self, case: Case) -> Vec<Vec<u8>> {
        // Each round begins with the same conversation, so that all rounds have the same length.
        let mut conversation = self.conversation.clone();
        case.bodies(&mut self.texts, &mut conversation)
    }
}

async fn measure(options: &Options) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (_engine, engine_url) = start_engine()?;
    let (mesh, mesh_url) = start_mesh(&options.program, dir.path(), &engine_url)?;
    let mut measured = vec![Measured {
        name: "mesh",
        child: mesh,
        target: Target::new(&mesh_url),
        url: mesh_url,
    }];
    match options.smg.exists() {
        true => measured.push(start_smg(&options.smg, dir.path(), &engine_url).await?),
        false => println!("without smg: there is no {}", options.smg.display()),
    }
    let mut bodies = Bodies::new()?;
    println!(
        "{:<12} {:>8} {:>12} {:>12} {:>14} {:>14} {:>8}",
        "case", "unit", "mesh CPU us", "smg CPU us", "mesh/s a core", "smg/s a core", "ratio"
    );
    for case in options.cases() {
        let mut rounds: Vec<Vec<f64>> = vec![Vec::new(); measured.len()];
        // The first round opens connections and starts threads.
        for round in 0..=options.rounds {
            let bodies = bodies.of(case);
            for (each, figures) in measured.iter().zip(&mut rounds) {
                let before = Used::by(each.child.pid())?;
                let sent = each.target.send_all(bodies.clone(), case.at_once());
                sent.await.context(each.name)?;
                tokio::time::sleep(SETTLE).await;
                let used = Used::by(each.child.pid())?.since(&before);
                if round > 0 {
                    let units = bodies.len() as f64 * case.unit().1;
                    figures.push(used.cpu_ns as f64 / 1e3 / units);
                }
            }
        }
        let medians: Vec<f64> = rounds.iter().map(|round| quantile(round, 0.5)).collect();
        let mesh = medians[0];
        let smg = medians.get(1).copied().unwrap_or(f64::NAN);
        println!(
            "{:<12} {:>8} {:>12.1} {:>12.1} {:>14.0} {:>14.0} {:>8.2}",
            name(case),
            case.unit().0,
            mesh,
            smg,
            1e6 / mesh,
            1e6 / smg,
            smg / mesh
        );
        if case == Case::Short && !options.no_latency {
            let mut all = vec![Asked::new("direct", &engine_url)];
            all.extend(measured.iter().map(|each| Asked::new(each.name, &each.url)));
            latency::measure(&all, 0.5e6 / mesh, options.latency_rounds, || {
                let mut round = bodies.of(Case::Short);
                round.truncate(LATENCY_REQUESTS);
                round
            })?;
        }
    }
    Ok(())
}

/// Prints the CPU time of each stage of the mesh.
async fn measure_stages(options: &Options) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (_engine, engine_url) = start_engine()?;
    let config = write_settings(dir.path(), &engine_url)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--mesh").arg(config);
    let (mut mesh, url) = Child::start(command, "http://")?;
    let target = Target::new(&url);
    let mut bodies = Bodies::new()?;
    for case in options.cases() {
        let mut rounds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for round in 0..=options.rounds {
            let bodies = bodies.of(case);
            let units = bodies.len() as f64 * case.unit().1;
            mesh.ask()?;
            let before = Used::by(mesh.pid())?;
            target.send_all(bodies, case.at_once()).await?;
            tokio::time::sleep(SETTLE).await;
            let all = Used::by(mesh.pid())?.since(&before).cpu_ns;
            let mut times: BTreeMap<String, u64> = serde_json::from_str(&mesh.ask()?)?;
            if round == 0 {
                continue;
            }
            let rest = all.saturating_sub(times.values().sum());
            times.insert("rest".to_owned(), rest);
            times.insert("all".to_owned(), all);
            for (stage, ns) in times {
                let figures = rounds.entry(stage).or_default();
                figures.push(ns as f64 / 1e3 / units);
            }
        }
        print!("{:<12} us of CPU per {}:", name(case), case.unit().0);
        for (stage, figures) in &rounds {
            print!(" {stage} {:.1}", quantile(figures, 0.5));
        }
        println!();
    }
    Ok(())
}

fn name(case: Case) -> String {
    let value = case.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
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

/// Starts this program as the engine, and returns its address.
fn start_engine() -> anyhow::Result<(Child, String)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--engine");
    let (child, line) = Child::start(command, ":")?;
    Ok((child, format!("http://{line}")))
}

/// Starts `refrain up` in front of the engine, and returns its address.
fn start_mesh(program: &Path, dir: &Path, engine_url: &str) -> anyhow::Result<(Child, String)> {
    let mut command = Command::new(program);
    command
        .args(["up", "--listen", "127.0.0.1:0", "--config"])
        .arg(write_settings(dir, engine_url)?)
        .arg("--data-dir")
        .arg(dir.join("data"))
        .stderr(File::create(dir.join("mesh.log"))?);
    let (child, line) = Child::start(command, "Refrain is up: ")?;
    let url = line.trim_start_matches("Refrain is up: ");
    Ok((child, url.trim_end_matches("/v1").to_owned()))
}

/// Writes the configuration of the mesh. The model's files lack their `config.json`, so that the engine's context
/// counts, which has room for the longest prompts.
fn write_settings(dir: &Path, engine_url: &str) -> anyhow::Result<PathBuf> {
    let files = dir.join("model");
    std::fs::create_dir_all(&files)?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(Path::new(MODEL_FILES).join(name), files.join(name))?;
    }
    let files = files.display();
    let settings = format!(
        r#"
[urls]
engine = "{engine_url}"
[telemetry]
log = "warn"
[gateway]
anonymous_tenant = "tenant"
[[gateway.models]]
id = "{MODEL}"
files = "{files}"
[worker]
running_max = 64
[worker.engine]
kind = "vllm"
model = "{MODEL}"
files = "{files}"
"#
    );
    let path = dir.join("mesh.toml");
    std::fs::write(&path, settings)?;
    Ok(path)
}

/// Starts `smg` in front of the engine, and waits until it answers.
async fn start_smg(program: &Path, dir: &Path, engine_url: &str) -> anyhow::Result<Measured> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port()
        .to_string();
    let metrics_port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port()
        .to_string();
    let log = File::create(dir.join("smg.log"))?;
    let mut command = Command::new("sh");
    // The first line tells that it starts; later ones are of no interest.
    command
        .args(["-c", "echo starts; exec \"$0\" \"$@\" >&2"])
        .arg(program)
        .args(["launch", "--worker-urls", engine_url])
        .args(["--policy", "round_robin", "--log-level", "warn"])
        .args(["--host", "127.0.0.1", "--port", &port])
        .args(["--prometheus-port", &metrics_port])
        .stderr(log);
    let (child, _) = Child::start(command, "starts")?;
    let url = format!("http://127.0.0.1:{port}");
    let target = Target::new(&url);
    let began = Instant::now();
    loop {
        let body = texts::chat(&texts::short(&mut Texts::new(0)), 1, false, 0);
        match target.send_all(vec![body], 1).await {
            Ok(()) => break,
            Err(error) if began.elapsed() > SMG_START_MAX => {
                let log = std::fs::read_to_string(dir.join("smg.log"))?;
                bail!("smg does not answer: {error:#}\n{log}");
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
    Ok(Measured {
        name: "smg",
        child,
        url,
        target,
    })
}
