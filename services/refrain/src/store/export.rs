//! Exports a tenant's documents as a trace file.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use refrain_lab::progress::ProgressLine;
use refrain_protocol::admin::{ExportCursor, ExportRequest, ExportedDocument};
use refrain_protocol::document::DocumentHead;
use refrain_protocol::history::PromptHash;
use refrain_protocol::{DocumentId, TokenId};
use serde::Serialize;

use super::finish_names::finish_name;
use super::target::{Access, Target, TargetArgs};

/// Tokens of one page of the export.
const PAGE_TOKENS: u32 = 512 << 10;
const ZSTD_LEVEL: i32 = 6;

/// Arguments of `refrain store export`.
#[derive(Args, Clone, Default)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    pub(super) target: TargetArgs,
    /// Tenant of the documents.
    #[arg(long)]
    pub(super) tenant: String,
    /// Export the documents of this model only.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Trace file; compressed if its name ends in .zst. A new one may be read by its owner only [default: standard
    /// output].
    #[arg(long, short)]
    pub(super) output: Option<PathBuf>,
}

/// One line of the trace file. The store keeps only the last tokens of a prompt.
#[derive(Serialize)]
struct ExportedLine<'a> {
    workload: &'a str,
    tenant: &'a str,
    session: Option<&'a str>,
    /// Number of the document within its session, in the order of this file.
    turn: u32,
    group: Option<&'a str>,
    model: &'a str,
    tokenizer: &'a str,
    prompt_token_ids: &'a [TokenId],
    /// The hash of the whole prompt, of which the line has only the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_hash: Option<String>,
    output_token_ids: &'a [TokenId],
    document: DocumentId,
    choice: u32,
    weight_version: u64,
    created_ms: u64,
    finish: &'static str,
}

/// Runs `refrain store export`, and returns the number of documents.
pub(super) async fn run(args: &ExportArgs) -> anyhow::Result<u64> {
    let target = Target::open(&args.target, Access::Read).await?;
    let outcome = match &args.output {
        None => write(args, &target, &mut BufWriter::new(std::io::stdout())).await,
        Some(path) => {
            let name = path.display();
            // It has texts of the tenant.
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let file = options.open(path);
            let file = file.with_context(|| format!("{name}: cannot be written"))?;
            let file = BufWriter::new(file);
            if path.extension().is_some_and(|extension| extension == "zst") {
                let mut encoder = zstd::stream::write::Encoder::new(file, ZSTD_LEVEL)?;
                let documents = write(args, &target, &mut encoder).await?;
                encoder.finish()?.flush()?;
                Ok(documents)
            } else {
                let mut file = file;
                write(args, &target, &mut file).await
            }
        }
    };
    target.close().await;
    let documents = outcome?;
    eprintln!("{documents} documents exported");
    Ok(documents)
}

async fn write(args: &ExportArgs, target: &Target, out: &mut dyn Write) -> anyhow::Result<u64> {
    let expected = target.store().store_stats().await?.documents.max(1);
    let bar = ProgressLine::default();
    let mut turns: HashMap<String, u32> = HashMap::new();
    let mut documents = 0;
    let mut next = Some(ExportCursor::default());
    while let Some(after) = next {
        let request = ExportRequest {
            tenant: args.tenant.clone(),
            model: args.model.clone(),
            after,
            max_tokens: PAGE_TOKENS,
        };
        let page = target.store().export(request).await?;
        for document in &page.documents {
            let turn = match &document.update.head.session {
                None => 0,
                Some(session) => {
                    let count = turns.entry(session.clone()).or_default();
                    *count += 1;
                    *count - 1
                }
            };
            serde_json::to_writer(&mut *out, &line(document, turn))?;
            out.write_all(b"\n")?;
        }
        documents += page.documents.len() as u64;
        // The share is a lower bound: `expected` counts all tenants.
        let share = documents as f64 / expected as f64;
        bar.show(Some(share), format!("{documents} documents"));
        next = page.next;
    }
    out.flush()?;
    Ok(documents)
}

fn line(document: &ExportedDocument, turn: u32) -> ExportedLine<'_> {
    let ExportedDocument { namespace, update } = document;
    let DocumentHead {
        session,
        group,
        choice,
        weight_version,
        created_ms,
        left_context,
        prompt_hash,
    } = &update.head;
    ExportedLine {
        workload: &namespace.tenant,
        tenant: &namespace.tenant,
        session: session.as_deref(),
        turn,
        group: group.as_deref(),
        model: &namespace.model,
        tokenizer: &namespace.tokenizer,
        prompt_token_ids: left_context,
        prompt_hash: prompt_hash.map(|PromptHash(hash)| format!("{hash:032x}")),
        output_token_ids: &update.tokens,
        document: update.document,
        choice: *choice,
        weight_version: *weight_version,
        created_ms: *created_ms,
        finish: finish_name(update.finish),
    }
}
