//! `refrain store`: the operator's commands for a draft store. It is a running one over HTTP, several replicas and
//! shards as one, or a closed one's directory.
//!
//! `import` and `export` use the format of trace files, one JSON object per line. Every other command is a single
//! call.

mod comparison;
mod erase;
mod export;
mod finish_names;
mod import;
mod replicas;
mod sign;
pub(crate) mod target;
#[cfg(test)]
mod tests;

use anyhow::ensure;
use clap::{Args, Subcommand};
use refrain_lab::text_table::text_table;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{ConfirmRequest, VerifyReply};
use refrain_protocol::document::StoreStats;
use refrain_rpc::StoreAdmin;
use serde::Serialize;

use crate::command::print;

pub(crate) use replicas::Replicas;

use erase::EraseArgs;
use export::ExportArgs;
use import::ImportArgs;
use sign::SignArgs;
use target::{Access, Target, TargetArgs};

/// Arguments of `refrain store`.
#[derive(Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Subcommand)]
enum StoreCommand {
    /// Print the size of the store.
    Stats(PlainArgs),
    /// Store the outputs of a trace file (JSON lines, plain or zstd). This also brings erased documents back.
    Import(ImportArgs),
    /// Write a tenant's documents as a trace file.
    Export(ExportArgs),
    /// Read and check every record; fails if any is damaged, or if replicas differ.
    Verify(PlainArgs),
    /// Seal documents at rest, and give unused disk space back.
    Compact(PlainArgs),
    /// Erase documents for good, from every file.
    Erase(EraseArgs),
    /// Serve after a loss of documents, or accept a clock that jumped.
    Confirm(ConfirmArgs),
    /// Print a token for an engine with the plugin inside: it allows one namespace for a day.
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

#[derive(Args)]
struct ConfirmArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Serve although the store came up with far fewer documents than it had.
    #[arg(long, required_unless_present = "clock")]
    loss: bool,
    /// Accept the system's clock although it jumped; documents age by it from now on.
    #[arg(long)]
    clock: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// A refusal by the store, an unreadable file, or damage that was found.
pub fn run(args: StoreArgs) -> anyhow::Result<()> {
    crate::command::run(async {
        match args.command {
            StoreCommand::Stats(args) => stats(args).await,
            StoreCommand::Import(args) => {
                let mut stdout = std::io::stdout();
                import::run(&args, &mut stdout).await.map(drop)
            }
            StoreCommand::Export(args) => export::run(&args).await.map(drop),
            StoreCommand::Verify(args) => verify(args).await,
            StoreCommand::Compact(args) => compact(args).await,
            StoreCommand::Erase(args) => erase::run(args).await,
            StoreCommand::Confirm(args) => confirm(args).await,
            StoreCommand::Sign(args) => {
                println!("{}", sign::token(&args)?);
                Ok(())
            }
        }
    })
}

/// Opens the store, has it do `work`, and closes it.
async fn on_store<T>(
    args: &TargetArgs,
    access: Access,
    work: impl AsyncFnOnce(&dyn StoreAdmin) -> Result<T, ApiError>,
) -> anyhow::Result<T> {
    let target = Target::open(args, access).await?;
    let reply = work(target.store()).await;
    target.close().await;
    Ok(reply?)
}

async fn stats(args: PlainArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Read).await?;
    let stats = target.store().store_stats().await;
    let replicas = match &target {
        Target::Replicas(replicas) => Some(comparison::sizes(replicas).await),
        _ => None,
    };
    target.close().await;
    let stats = stats?;
    match replicas {
        None => print(&stats, args.json, &table(&stats))?,
        Some(replicas) => {
            let lines = format!("{}\n{}", table(&stats), replicas.table());
            print(
                &ClusterStats {
                    all: stats,
                    replicas,
                },
                args.json,
                &lines,
            )?;
        }
    }
    Ok(())
}

/// The size of a store of several replicas. Each document counts once in `all`.
#[derive(Serialize)]
struct ClusterStats {
    all: StoreStats,
    #[serde(flatten)]
    replicas: comparison::Comparison,
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
    let rows = rows.map(|(name, value)| vec![name.to_owned(), value.to_string()]);
    text_table(1, &[], rows)
}

async fn verify(args: PlainArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Read).await?;
    if let Target::Replicas(replicas) = &target {
        let comparison = comparison::verify(replicas).await;
        print(&comparison, args.json, &comparison.table())?;
        return comparison.ensure_equal();
    }
    let reply = target.store().verify().await;
    target.close().await;
    let reply = reply?;
    let VerifyReply {
        records,
        documents,
        tokens,
        damaged,
        quarantines,
        ..
    } = reply;
    let line = format!("{records} records read, {documents} documents with {tokens} tokens\n");
    print(&reply, args.json, &line)?;
    for damage in &reply.damage {
        eprintln!("{}: {}", damage.what, damage.why);
    }
    ensure!(damaged == 0, "{damaged} records or documents are damaged");
    ensure!(
        quarantines == 0,
        "the store is sound, but {quarantines} quarantine-* folders in data_dir could not be fully read and may hold \
         documents that the store lacks"
    );
    Ok(())
}

async fn compact(args: PlainArgs) -> anyhow::Result<()> {
    let compact = async |store: &dyn StoreAdmin| store.compact().await;
    let reply = on_store(&args.target, Access::Write, compact).await?;
    let (before, after) = (reply.before_bytes, reply.after_bytes);
    let line = format!("{before} bytes before, {after} after\n");
    Ok(print(&reply, args.json, &line)?)
}

async fn confirm(args: ConfirmArgs) -> anyhow::Result<()> {
    let ConfirmArgs { loss, clock, .. } = args;
    let confirm =
        async |store: &dyn StoreAdmin| store.confirm(ConfirmRequest { loss, clock }).await;
    let reply = on_store(&args.target, Access::Write, confirm).await?;
    let of_loss = match reply.lost_documents {
        Some(documents) => {
            format!("the store now serves without {documents} documents that it had\n")
        }
        None if loss => "the store has lost no documents\n".into(),
        None => String::new(),
    };
    let of_clock = match reply.clock_offset_ms {
        Some(offset_ms) => format!("the store's clock moved {offset_ms} ms ahead\n"),
        None if clock => "the store's clock already agrees with the system's\n".into(),
        None => String::new(),
    };
    Ok(print(&reply, args.json, &(of_loss + &of_clock))?)
}
