//! The command line: each command is a function elsewhere.

use clap::{CommandFactory, Parser, Subcommand};
use refrain::chat::{self, ChatArgs};
use refrain::check::{self, CheckArgs};
use refrain::config::dev_keys;
use refrain::health::{self, HealthArgs};
use refrain::manual::{self, CompletionsArgs, ManArgs};
use refrain::mesh_roles::{self, MeshArgs};
use refrain::record::{self, RecordArgs};
use refrain::role::Role;
use refrain::serve::{self, ServiceArgs, UpArgs};
use refrain::store::{self, StoreArgs};
use refrain::tenants::{self, KeysArgs, TenantsArgs};
use refrain::usage::{self, UsageArgs};
use refrain_lab::analyze::{self, AnalyzeOptions};
use refrain_lab::bench::{self, BenchOptions};
use refrain_lab::paper::{self, PaperOptions};
use refrain_lab::replay::{self, ReplayOptions};
use refrain_lab::simulate::{self, SimulateOptions};
use refrain_service_kit::build_info;

/// Requests allocate hundreds of small values on several threads. The system's allocator takes a tenth of their time,
/// and changes the protection of memory about once per request.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Make LLM serving faster by remembering outputs.
#[derive(Parser)]
#[command(version = manual::VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the whole mesh in one process: gateway, scheduler, worker, draft store and reference engine.
    Up(UpArgs),
    /// Start the OpenAI-compatible gateway.
    Gateway(ServiceArgs),
    /// Start the scheduler.
    Scheduler(ServiceArgs),
    /// Start a worker.
    Worker(ServiceArgs),
    /// Start the draft store.
    DraftStore(ServiceArgs),
    /// Start the CPU engine that ships with Refrain.
    ReferenceEngine(ServiceArgs),
    /// Check a configuration without starting: its keys, its files, its ports and the services that it names.
    Check(CheckArgs),
    /// Ask a running process whether it can serve, and fail if it cannot.
    Health(HealthArgs),
    /// Print fresh keys for the [mesh] section of a configuration file, or manage the API keys of tenants.
    Keys(KeysArgs),
    /// Manage the tenants of the gateways and their limits.
    Tenants(TenantsArgs),
    /// Make credentials, by which each process of a mesh proves its role.
    Mesh(MeshArgs),
    /// Chat with a running gateway, and see which text drafts brought.
    Chat(ChatArgs),
    /// Measure a running mesh with drafts and without.
    Bench(BenchOptions),
    /// Replay recorded calls without an engine, and print what drafting brings.
    Replay(ReplayOptions),
    /// Say for each workload and tenant of recorded calls whether drafting would help.
    Analyze(AnalyzeOptions),
    /// Stand in front of a server and write its calls down, for `analyze`.
    Record(RecordArgs),
    /// Simulate rollouts and conversations on several instances, and compare how they are scheduled.
    Simulate(Box<SimulateOptions>),
    /// Repeat an experiment of a paper, with the published figures beside.
    Paper(PaperOptions),
    /// Inspect, fill, verify or erase a draft store: a running one, or its directory.
    Store(StoreArgs),
    /// Print the usage of tenants, keys and models, for bills, or erase that of a tenant.
    Usage(Box<UsageArgs>),
    /// Print completions for a shell.
    Completions(CompletionsArgs),
    /// Print the page for `man`.
    Man(ManArgs),
}

fn main() -> anyhow::Result<()> {
    build_info::set_commit(manual::COMMIT);
    match Cli::parse().command {
        Command::Up(args) => serve::up(args),
        Command::Gateway(args) => serve::service(Role::Gateway, args),
        Command::Scheduler(args) => serve::service(Role::Scheduler, args),
        Command::Worker(args) => serve::service(Role::Worker, args),
        Command::DraftStore(args) => serve::service(Role::DraftStore, args),
        Command::ReferenceEngine(args) => serve::service(Role::ReferenceEngine, args),
        Command::Check(args) => check::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Keys(args) => tenants::keys(args),
        Command::Tenants(args) => tenants::tenants(args),
        Command::Mesh(args) => mesh_roles::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Bench(options) => {
            warn_if_not_optimised();
            bench::command(options.or_api_keys(dev_keys))
        }
        Command::Replay(options) => replay::command(&options),
        Command::Analyze(options) => analyze::command(&options),
        Command::Record(args) => record::run(args),
        Command::Simulate(options) => simulate::command(&options),
        Command::Paper(options) => paper::command(&options),
        Command::Store(args) => store::run(args),
        Command::Usage(args) => usage::run(*args),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
        Command::Man(args) => manual::man(&args, Cli::command()),
    }
}

/// Says so where the figures of this build would mislead: it spends its time elsewhere than an installed one.
fn warn_if_not_optimised() {
    if env!("BUILD_OPT_LEVEL") == "0" {
        eprintln!(
            "This build is not optimised, so its figures say little. \
             Build mesh and benchmark with `cargo build --profile dist -p refrain`."
        );
    }
}
