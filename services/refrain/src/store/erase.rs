//! Erases documents for good, or everything that is kept of a tenant, and proves it by reading again.

use std::time::Duration;

use anyhow::{bail, ensure};
use clap::Args;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{EraseReply, EraseRequest};
use refrain_rpc::{EngineForgotten, Engines, Erasure, OtherPlaces, UsageErased};
use refrain_service_kit::http::MeshClient;

use crate::command::print;

use super::target::{Access, Target, TargetArgs};

/// How long an erasure may take that rewrites logs and segments.
const EVERYTHING_TIMEOUT: Duration = Duration::from_secs(3_600);

#[derive(Args)]
pub(super) struct EraseArgs {
    #[command(flatten)]
    pub(super) target: TargetArgs,
    /// Erase documents of this tenant only.
    #[arg(long)]
    pub(super) tenant: Option<String>,
    /// Erase documents of this model only.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Erase this session of the tenant only.
    #[arg(long, requires = "tenant")]
    pub(super) session: Option<String>,
    /// Erase documents that began at this time or later, Unix milliseconds.
    #[arg(long)]
    pub(super) from_ms: Option<u64>,
    /// Erase documents that began before this time, Unix milliseconds.
    #[arg(long)]
    pub(super) until_ms: Option<u64>,
    /// Also delete all quarantined logs and segments. They may be the only copy of documents that could not be read.
    #[arg(long)]
    pub(super) quarantines: bool,
    /// Also erase everything else that is kept of the tenant: its usage, the responses that gateways stored, and what
    /// engines computed.
    #[arg(long, requires = "tenant", conflicts_with_all = ["model", "session", "from_ms", "until_ms"])]
    pub(super) everything: bool,
    /// URL of the scheduler, which knows the workers and so the engines [default: urls.scheduler in --config].
    #[arg(long, requires = "everything")]
    pub(super) scheduler: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

/// Runs `refrain store erase`.
///
/// # Errors
/// A refusal by the store, or something is left.
pub(super) async fn run(args: EraseArgs) -> anyhow::Result<()> {
    let target = Target::open(&args.target, Access::Write).await?;
    let erasure = erase(&args, &target).await;
    target.close().await;
    let erasure = erasure?;
    print(&erasure, args.json, &lines(&erasure))?;
    for replica in &erasure.documents.replicas {
        let trouble = replica.trouble.as_deref().unwrap_or("erased");
        eprintln!("{}: {trouble}", replica.url);
    }
    if args.everything && erasure.engines.is_none() {
        eprintln!("engines: not reached; name the scheduler with --scheduler or --config");
    }
    ensure_done(&erasure)
}

async fn erase(args: &EraseArgs, target: &Target) -> Result<Erasure, ApiError> {
    if let (Target::Up(_, client), true) = (target, args.everything) {
        return erase_everything(args, client).await;
    }
    let request = EraseRequest {
        tenant: args.tenant.clone(),
        model: args.model.clone(),
        session: args.session.clone(),
        from_ms: args.from_ms,
        until_ms: args.until_ms,
        quarantines: args.quarantines,
    };
    let usage = target.usage_replicas();
    let known = match args.everything {
        true => args.target.scheduler(args.scheduler.as_deref()),
        false => Ok(None),
    };
    let known = known.map_err(ApiError::internal)?;
    let engines = known
        .as_ref()
        .map(|(scheduler, workers)| Engines { scheduler, workers });
    let others = OtherPlaces {
        usage: &usage,
        engines,
    };
    let others = args.everything.then_some(others);
    Erasure::carry_out(target.store(), request, others).await
}

/// Has a running `refrain up` erase everything of a tenant, since it alone reaches its engines.
async fn erase_everything(args: &EraseArgs, client: &MeshClient) -> Result<Erasure, ApiError> {
    if args.quarantines {
        let message =
            "erase --quarantines and --everything one after the other while `refrain up` runs";
        return Err(ApiError::invalid("quarantines", message));
    }
    let body = serde_json::json!({"tenant": args.tenant, "everything": true});
    let timeout = Some(EVERYTHING_TIMEOUT);
    client.post_json("/admin/erasures", &body, timeout).await
}

fn lines(erasure: &Erasure) -> String {
    let EraseReply {
        documents,
        quarantines,
        files,
        ..
    } = &erasure.documents;
    let mut lines = format!(
        "{documents} documents erased, {} files rewritten, {quarantines} quarantined logs deleted\n",
        files.len()
    );
    if let Some(left) = erasure.documents_left {
        lines += &format!("read again: {left} documents of before are left\n");
    }
    for UsageErased {
        store,
        erased,
        trouble,
    } in erasure.usage.iter().flatten()
    {
        lines += &match trouble {
            Some(trouble) => format!("{store}: usage: {trouble}\n"),
            None => format!(
                "{store}: {} rows of usage erased; {} gateways have erased theirs and the stored responses\n",
                erased.rows, erased.gateways
            ),
        };
    }
    let engines = erasure.engines.as_ref();
    for told in engines.iter().flat_map(|engines| &engines.workers) {
        let worker = &told.worker;
        lines += &match &told.trouble {
            Some(trouble) => format!("{worker}: KV caches: {trouble}\n"),
            None => format!("{worker}: {}\n", forgotten(told)),
        };
    }
    lines
}

fn forgotten(told: &EngineForgotten) -> String {
    let of = told.forgotten;
    format!(
        "{} kept sessions and {} blocks in memory forgotten, {} blocks in its file overwritten; {} requests run",
        of.sessions, of.memory_blocks, of.file_blocks, of.running
    )
}

/// # Errors
/// Something is left, and what to do about it.
fn ensure_done(erasure: &Erasure) -> anyhow::Result<()> {
    let replicas = erasure.documents.replicas.iter();
    let away = replicas.filter(|replica| !replica.is_done).count();
    ensure!(
        away == 0,
        "{away} replicas have not erased everything. One that is away does so when the erasure reaches it; repeat \
         the command to see it"
    );
    ensure!(
        erasure.documents.quarantines_kept == 0,
        "{} quarantine-* folders in data_dir could not be fully read and may hold documents that should be erased; \
         inspect them, then erase again with --quarantines to delete them",
        erasure.documents.quarantines_kept
    );
    ensure!(
        erasure.documents_left.unwrap_or(0) == 0,
        "documents of the tenant came back during the erasure; repeat the command"
    );
    let usage = || erasure.usage.iter().flatten();
    let failed = usage().filter(|of| of.trouble.is_some()).count();
    ensure!(
        failed == 0,
        "{failed} stores have not erased the usage; repeat the command when they run"
    );
    let pending: u64 = usage().map(|of| of.erased.gateways_pending).sum();
    ensure!(
        pending == 0,
        "a gateway has not answered yet, and erases its usage and stored responses when it calls the store again; \
         repeat the command to see it"
    );
    if let Some(engines) = &erasure.engines {
        if let Some(trouble) = &engines.trouble {
            bail!(
                "the scheduler did not say which workers there are, so no engine was reached: {trouble}"
            );
        }
        let told = engines.workers.iter();
        let failed = told.filter(|told| told.trouble.is_some() && !told.is_unable);
        let failed = failed.count();
        ensure!(
            failed == 0,
            "{failed} engines have not forgotten what they computed; repeat the command when they run"
        );
    }
    Ok(())
}
