//! `refrain store`: what operators do with a draft store, a running one over HTTP or a closed one's directory.
//!
//! `import` and `export` speak the format of trace files, a JSON object per line; the other commands are a
//! call each.

mod export;
mod import;
mod progress;
mod sign;
mod target;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, Subcommand};
use refrain_protocol::admin::{ConfirmRequest, EraseRequest, VerifyReply};
use refrain_protocol::document::StoreStats;
use refrain_service_kit::telemetry::install_crypto_provider;

use target::{Access, Target, TargetArgs};

/// Arguments of `refrain store`.
#[derive(Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Subcommand)]
enum StoreCommand {
    /// Print the store in numbers.
    Stats(PlainArgs),
    /// Store the outputs of a trace file: a JSON object per line, plain or zstd. What was erased comes back by this.
    Import(ImportArgs),
    /// Write a tenant's documents as a trace file.
    Export(ExportArgs),
    /// Read and check every record; fails when something is damaged.
    Verify(PlainArgs),
    /// Give unused disk space back.
    Compact(PlainArgs),
    /// Erase documents for good, from every file.
    Erase(EraseArgs),
    /// Have the store go on after a loss of documents, or believe a clock that jumped.
    Confirm(ConfirmArgs),
    /// Print a token for an engine that drafts by itself: it may read and write one namespace, for a day.
    Sign(SignArgs),
}

#[derive(Args)]
struct PlainArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Arguments of `refrain store import`.
#[derive(Args, Clone, Default)]
struct ImportArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// The trace file; `-` is standard input.
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Whose outputs they are [default: each line's `tenant`].
    #[arg(long)]
    tenant: Option<String>,
    /// Which model's, by its public name [default: each line's `model`].
    #[arg(long)]
    model: Option<String>,
    /// The model's tokenizer: names it, and turns text into tokens.
    #[arg(long, value_name = "TOKENIZER.JSON")]
    tokenizer: Option<PathBuf>,
    /// The tokenizer's identity, where the file is not at hand [default: each line's `tokenizer`, else `unknown`].
    #[arg(long, conflicts_with = "tokenizer")]
    tokenizer_id: Option<String>,
    /// For good: no budget and no age removes them, only `erase`.
    #[arg(long = "static")]
    is_static: bool,
    /// Print one JSON object per acknowledged batch: {"acknowledged": documents durable so far}.
    #[arg(long)]
    json: bool,
}

/// Arguments of `refrain store export`.
#[derive(Args, Clone, Default)]
struct ExportArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Whose documents.
    #[arg(long)]
    tenant: String,
    /// Of this model only.
    #[arg(long)]
    model: Option<String>,
    /// The trace file; compressed when its name ends in .zst [default: standard output].
    #[arg(long, short)]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct EraseArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// All of a tenant, or what else is said of it.
    #[arg(long)]
    tenant: Option<String>,
    /// Of this model only.
    #[arg(long)]
    model: Option<String>,
    /// One session of the tenant.
    #[arg(long, requires = "tenant")]
    session: Option<String>,
    /// What began at this time or later, Unix milliseconds.
    #[arg(long)]
    from_ms: Option<u64>,
    /// What began before this time, Unix milliseconds.
    #[arg(long)]
    until_ms: Option<u64>,
    /// Delete quarantined logs and segments as well, whatever they hold. They may be the only copy of documents that
    /// could not be read.
    #[arg(long)]
    quarantines: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ConfirmArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// The store came up with far fewer documents than it had: serve without them.
    #[arg(long, required_unless_present = "clock")]
    loss: bool,
    /// The system's clock is right although it jumped: documents age by it from now on.
    #[arg(long)]
    clock: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Arguments of `refrain store sign`.
#[derive(Args, Clone, Default)]
struct SignArgs {
    /// The gateway's configuration file: its keys and its models.
    #[arg(long)]
    config: PathBuf,
    /// Whose outputs they are: a tenant of that file.
    #[arg(long)]
    tenant: String,
    /// Which model's, by its public name.
    #[arg(long)]
    model: String,
}

/// Does what the arguments say.
///
/// # Errors
/// What the store or a file refuses, and damage that was found.
pub fn run(args: StoreArgs) -> anyhow::Result<()> {
    install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match args.command {
            StoreCommand::Stats(args) => stats(args).await,
            StoreCommand::Import(args) => {
                let mut stdout = std::io::stdout();
                import::run(&args, &mut stdout).await.map(drop)
            }
            StoreCommand::Export(args) => export::run(&args).await.map(drop),
            StoreCommand::Verify(args) => verify(args).await,
            StoreCommand::Compact(args) => compact(args).await,
            StoreCommand::Erase(args) => erase(args).await,
            StoreCommand::Confirm(args) => confirm(args).await,
            StoreCommand::Sign(args) => {
                println!("{}", sign::token(&args)?);
                Ok(())
            }
        }
    })
}

async fn stats(args: PlainArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Read).await?;
    let stats = target.store().store_stats().await?;
    target.close().await;
    if args.json {
        println!("{}", serde_json::to_string(&stats)?);
    } else {
        print!("{}", table(&stats));
    }
    Ok(())
}

fn table(stats: &StoreStats) -> String {
    let rows = [
        ("documents", stats.documents),
        ("tokens", stats.tokens),
        ("namespaces", stats.namespaces),
        ("bytes of records", stats.logical_bytes),
        ("bytes of the log", stats.log_bytes),
        ("bytes of segments", stats.segment_bytes),
        ("bytes on disk", stats.disk_bytes),
        ("evicted since start", stats.evicted_documents),
    ];
    rows.map(|(name, value)| format!("{name:<20} {value:>16}\n"))
        .concat()
}

async fn verify(args: PlainArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Read).await?;
    let reply = target.store().verify().await?;
    target.close().await;
    if args.json {
        println!("{}", serde_json::to_string(&reply)?);
    } else {
        println!(
            "{} records read, {} documents with {} tokens",
            reply.records, reply.documents, reply.tokens
        );
    }
    sound(&reply)
}

/// Names what is damaged.
fn sound(reply: &VerifyReply) -> anyhow::Result<()> {
    if reply.damaged == 0 {
        return unread(reply);
    }
    for damage in &reply.damage {
        eprintln!("{}: {}", damage.what, damage.why);
    }
    bail!("{} records or documents are damaged", reply.damaged)
}

/// Says what lies in quarantine.
fn unread(reply: &VerifyReply) -> anyhow::Result<()> {
    if reply.quarantines == 0 {
        return Ok(());
    }
    bail!(
        "the store is sound, but {} quarantine-* folders in data_dir could not be read as a whole, and may hold \
         documents that it lacks",
        reply.quarantines
    )
}

async fn compact(args: PlainArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Write).await?;
    let reply = target.store().compact().await?;
    target.close().await;
    if args.json {
        println!("{}", serde_json::to_string(&reply)?);
    } else {
        println!(
            "{} bytes before, {} after",
            reply.before_bytes, reply.after_bytes
        );
    }
    Ok(())
}

async fn erase(args: EraseArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Write).await?;
    let request = EraseRequest {
        tenant: args.tenant,
        model: args.model,
        session: args.session,
        from_ms: args.from_ms,
        until_ms: args.until_ms,
        quarantines: args.quarantines,
    };
    let reply = target.store().erase(request).await?;
    target.close().await;
    if args.json {
        println!("{}", serde_json::to_string(&reply)?);
    } else {
        println!(
            "{} documents erased, {} quarantined logs deleted",
            reply.documents, reply.quarantines
        );
    }
    if reply.quarantines_kept > 0 {
        bail!(
            "{} quarantine-* folders in data_dir could not be read as a whole, and may hold some of what was to be \
             erased: look at them, then erase once more with --quarantines, which deletes them",
            reply.quarantines_kept
        );
    }
    Ok(())
}

async fn confirm(args: ConfirmArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Write).await?;
    let request = ConfirmRequest {
        loss: args.loss,
        clock: args.clock,
    };
    let reply = target.store().confirm(request).await?;
    target.close().await;
    if args.json {
        println!("{}", serde_json::to_string(&reply)?);
        return Ok(());
    }
    match reply.lost_documents {
        Some(documents) => println!("the store serves without {documents} documents that it had"),
        None if args.loss => println!("the store has lost no documents"),
        None => {}
    }
    match reply.clock_offset_ms {
        Some(offset_ms) => println!("the store's time went {offset_ms} ms ahead"),
        None if args.clock => println!("the store's time is that of the system's clock already"),
        None => {}
    }
    Ok(())
}
