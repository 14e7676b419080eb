//! A tenant's documents as a trace file.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};

use anyhow::Context;
use refrain_protocol::admin::{ExportCursor, ExportRequest, ExportedDocument};
use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, TokenId};
use serde::Serialize;

use super::ExportArgs;
use super::import::finish_name;
use super::progress::Bar;
use super::target::{Access, Target};

/// Tokens of a page.
const PAGE_TOKENS: u32 = 512 << 10;
const ZSTD_LEVEL: i32 = 6;

/// One line. Of a prompt the store keeps its last tokens only.
#[derive(Serialize)]
struct Line<'a> {
    workload: &'a str,
    tenant: &'a str,
    session: Option<&'a str>,
    /// Which document of its session, in the order of this file.
    turn: u32,
    group: Option<&'a str>,
    model: &'a str,
    tokenizer: &'a str,
    prompt_token_ids: &'a [TokenId],
    output_token_ids: &'a [TokenId],
    document: DocumentId,
    choice: u32,
    weight_version: u64,
    created_ms: u64,
    finish: &'static str,
}

/// Exports to where the arguments say. Answers how many documents there were.
pub(super) async fn run(args: &ExportArgs) -> anyhow::Result<u64> {
    let target = Target::open(&args.target, Access::Read).await?;
    let outcome = match &args.output {
        None => write(args, &target, &mut BufWriter::new(std::io::stdout())).await,
        Some(path) => {
            let name = path.display();
            let file = File::create(path).with_context(|| format!("{name}: cannot be written"))?;
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
    let mut bar = Bar::new();
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
        // Of one tenant there may be fewer than of all.
        bar.show(Some(documents as f64 / expected as f64), documents);
        next = page.next;
    }
    out.flush()?;
    Ok(documents)
}

fn line(document: &ExportedDocument, turn: u32) -> Line<'_> {
    let ExportedDocument { namespace, update } = document;
    let DocumentHead {
        session,
        group,
        choice,
        weight_version,
        created_ms,
        left_context,
    } = &update.head;
    Line {
        workload: &namespace.tenant,
        tenant: &namespace.tenant,
        session: session.as_deref(),
        turn,
        group: group.as_deref(),
        model: &namespace.model,
        tokenizer: &namespace.tokenizer,
        prompt_token_ids: left_context,
        output_token_ids: &update.tokens,
        document: update.document,
        choice: *choice,
        weight_version: *weight_version,
        created_ms: *created_ms,
        finish: finish_name(update.finish),
    }
}
