//! Measures what documents at rest cost on disk, in the log and sealed, and how long a store of them takes to open.
//!
//! `cargo run --release -p refrain-draft-store --example at_rest -- [tokens] [tokens of a document]`

use std::time::{Duration, Instant};

use refrain_draft_store::DraftStoreConfig;
use refrain_protocol::admin::ImportRequest;
use refrain_protocol::document::{
    DocumentHead, DocumentUpdate, FeedCursor, FinishReason, StoreStats,
};
use refrain_protocol::{DocumentId, Namespace, TokenId};
use refrain_rpc::testing::ScopeReader;
use refrain_rpc::{DraftStore as _, StoreAdmin as _};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

const CALL_DOCUMENTS: u128 = 64;

/// Templated text: half of each document is one of sixteen stock passages.
fn tokens(document: u128, len: u32) -> Vec<TokenId> {
    let mut state = (document as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len)
        .map(|at| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let stock = (document as u32 % 16) * 1_000 + at;
            if at / 64 % 2 == 0 {
                stock % 32_000
            } else {
                (state >> 40) as u32 % 32_000
            }
        })
        .collect()
}

fn document(document: u128, len: u32) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len: 0,
        tokens: tokens(document, len),
        head: DocumentHead {
            session: Some(format!("session-{}", document / 8)),
            left_context: vec![1; 16],
            ..DocumentHead::default()
        },
        finish: Some(FinishReason::Stop),
    }
}

fn print(what: &str, stats: &StoreStats) {
    let per_token = |bytes: u64| bytes as f64 / stats.tokens.max(1) as f64;
    println!(
        "{what}: {} tokens, {:.2} bytes/token on disk (log {:.2}, segments {:.2})",
        stats.tokens,
        per_token(stats.disk_bytes),
        per_token(stats.log_bytes),
        per_token(stats.segment_bytes),
    );
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1).map(|text| text.parse::<u32>());
    let tokens = args.next().transpose()?.unwrap_or(10_000_000);
    let document_tokens = args.next().transpose()?.unwrap_or(640).max(1);
    let dir = std::env::temp_dir().join(format!("refrain-at-rest-{}", std::process::id()));
    let mesh = MeshConfig::generate()?;
    let auth = MeshAuth::new(&mesh)?;
    let names = Namespace {
        tenant: "bench".into(),
        model: "m".into(),
        tokenizer: "t".into(),
    };
    let namespace = NamespaceSigner::new(&mesh)?.sign(names.clone());
    let unsealed = DraftStoreConfig {
        data_dir: dir.clone(),
        seal_after_s: 366 * 24 * 3_600,
        ..DraftStoreConfig::default()
    };
    let start = async |config: &DraftStoreConfig| {
        let began = Instant::now();
        let store =
            refrain_draft_store::start(config.clone(), auth.clone(), &Metrics::new()?).await?;
        anyhow::Ok((store, began.elapsed()))
    };
    let follow = async |store: &refrain_draft_store::DraftStoreServer| {
        let began = Instant::now();
        let (mut after, mut caught_up, mut read) = (FeedCursor::default(), false, 0);
        while !caught_up {
            let reader = ScopeReader {
                after,
                max_tokens: 1 << 18,
                ..ScopeReader::new(namespace.clone())
            };
            let reply = reader.read(&store.handle()).await?;
            read += u64::from(reply.tokens());
            (after, caught_up) = (reply.cursor, reply.caught_up);
        }
        let rate = read as f64 / began.elapsed().as_secs_f64();
        anyhow::Ok((read, rate))
    };

    let (store, _) = start(&unsealed).await?;
    let documents = u128::from(tokens / document_tokens);
    for first in (0..documents).step_by(CALL_DOCUMENTS as usize) {
        let last = (first + CALL_DOCUMENTS).min(documents);
        let request = ImportRequest {
            is_static: false,
            namespace: names.clone(),
            updates: (first..last)
                .map(|number| document(number, document_tokens))
                .collect(),
        };
        store.handle().import(request).await?;
    }
    tokio::time::sleep(Duration::from_millis(2 * unsealed.tuning.tick_ms)).await;
    print("in the log, as it grew", &store.handle().stats().await?);
    store.handle().compact().await?;
    print("in the log, rewritten", &store.handle().stats().await?);
    store.drain(Duration::from_secs(60)).await;
    let (store, took) = start(&unsealed).await?;
    let (read, rate) = follow(&store).await?;
    println!(
        "opened in {:.0} ms, {read} tokens followed at {rate:.0} tokens/s",
        took.as_secs_f64() * 1e3
    );
    store.drain(Duration::from_secs(60)).await;

    let sealing = DraftStoreConfig {
        seal_after_s: 0,
        ..unsealed
    };
    let began = Instant::now();
    let (store, _) = start(&sealing).await?;
    // Less than one segment's worth stays in the log.
    let mut last = (0, Instant::now());
    while last.1.elapsed() < Duration::from_secs(5) {
        let bytes = store.handle().stats().await?.segment_bytes;
        if bytes != last.0 {
            last = (bytes, Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took_s = (last.1 - began).as_secs_f64();
    println!("sealed and merged in {took_s:.1} s");
    print("sealed", &store.handle().stats().await?);
    store.handle().compact().await?;
    tokio::time::sleep(Duration::from_millis(2 * sealing.tuning.tick_ms)).await;
    print("sealed, log rewritten", &store.handle().stats().await?);
    store.drain(Duration::from_secs(60)).await;
    let (store, took) = start(&sealing).await?;
    let (read, rate) = follow(&store).await?;
    println!(
        "opened in {:.0} ms, {read} tokens followed at {rate:.0} tokens/s",
        took.as_secs_f64() * 1e3
    );
    store.drain(Duration::from_secs(60)).await;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
