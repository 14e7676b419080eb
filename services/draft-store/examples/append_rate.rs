//! Measures how fast appends become durable, and what a token costs on disk.
//!
//! `cargo run --release -p refrain-draft-store --example append_rate [writers] [seconds] [rewrites] [seal_tokens]`
//!
//! With a fourth argument documents are sealed as soon as they end, this many tokens at a time. Without it none are
//! sealed. With a third argument other than 0 the log is rewritten all the time. The effect on the time of a call is
//! the cost of a rewrite for those who append.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use refrain_draft_store::DraftStoreConfig;
use refrain_protocol::document::{
    AppendRequest, DocumentHead, DocumentUpdate, FeedCursor, FinishReason,
};
use refrain_protocol::{DocumentId, Namespace, TokenId};
use refrain_rpc::testing::ScopeReader;
use refrain_rpc::{DraftStore as _, StoreAdmin as _};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

/// Tokens of one update, updates of one call, and updates of one document.
const UPDATE_TOKENS: u32 = 32;
const CALL_UPDATES: u128 = 16;
const DOCUMENT_UPDATES: u32 = 20;

/// Templated text: half of each document is one of sixteen stock passages.
fn tokens(document: u128, from: u32) -> Vec<TokenId> {
    let mut state = (document as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(from);
    (from..from + UPDATE_TOKENS)
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

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let writers = arguments.next().transpose()?.unwrap_or(16);
    let seconds = arguments.next().transpose()?.unwrap_or(10);
    let rewrites = arguments.next().transpose()?.unwrap_or(0) > 0;
    let seal_tokens = arguments.next().transpose()?;
    let dir = std::env::temp_dir().join(format!("refrain-append-rate-{}", std::process::id()));
    let config = DraftStoreConfig {
        data_dir: dir.clone(),
        seal_after_s: seal_tokens.map_or(366 * 24 * 3_600, |_| 0),
        seal_tokens: seal_tokens.unwrap_or(1 << 20),
        ..DraftStoreConfig::default()
    };
    let mesh = MeshConfig::generate()?;
    let auth = MeshAuth::new(&mesh)?;
    let store = refrain_draft_store::start(config.clone(), auth.clone(), &Metrics::new()?).await?;
    let namespace = NamespaceSigner::new(&mesh)?.sign(Namespace {
        tenant: "bench".into(),
        model: "m".into(),
        tokenizer: "t".into(),
    });

    let calls = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let tasks: Vec<_> = (0..u128::from(writers))
        .map(|writer| {
            let (handle, namespace, calls) = (store.handle(), namespace.clone(), calls.clone());
            tokio::spawn(async move {
                let mut latencies_ms = Vec::new();
                for round in 0u128.. {
                    for step in 0..DOCUMENT_UPDATES {
                        if Instant::now() >= until {
                            return latencies_ms;
                        }
                        let updates = (0..CALL_UPDATES)
                            .map(|lane| {
                                let document = writer << 64 | round << 16 | lane;
                                DocumentUpdate {
                                    document: DocumentId(document),
                                    epoch: 1,
                                    prev_len: step * UPDATE_TOKENS,
                                    tokens: tokens(document, step * UPDATE_TOKENS),
                                    head: DocumentHead::default(),
                                    finish: (step + 1 == DOCUMENT_UPDATES)
                                        .then_some(FinishReason::Stop),
                                }
                            })
                            .collect();
                        let sent = Instant::now();
                        let request = AppendRequest {
                            namespace: namespace.clone(),
                            updates,
                            waited_ms: 0,
                            acknowledgement: None,
                        };
                        match handle.append(request).await {
                            Ok(_) => {
                                calls.fetch_add(1, Ordering::Relaxed);
                                latencies_ms.push(sent.elapsed().as_secs_f64() * 1e3);
                            }
                            Err(error) => eprintln!("refused: {error}"),
                        }
                    }
                }
                latencies_ms
            })
        })
        .collect();
    let rewriting = rewrites.then(|| {
        let handle = store.handle();
        tokio::spawn(async move {
            let mut done = 0;
            while Instant::now() < until {
                match handle.compact().await {
                    Ok(_) => done += 1,
                    Err(error) => eprintln!("not rewritten: {error}"),
                }
            }
            done
        })
    });
    let mut latencies_ms = Vec::new();
    for task in tasks {
        latencies_ms.extend(task.await?);
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    latencies_ms.sort_by(f64::total_cmp);
    let updates = calls.load(Ordering::Relaxed) as f64 * CALL_UPDATES as f64;
    let at = |share: f64| {
        let last = latencies_ms.len().saturating_sub(1) as f64;
        latencies_ms
            .get((last * share) as usize)
            .copied()
            .unwrap_or(0.0)
    };
    println!(
        "{writers} writers, {elapsed_s:.1} s: {:.0} updates/s, {:.0} tokens/s, \
         call p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
        updates / elapsed_s,
        updates * f64::from(UPDATE_TOKENS) / elapsed_s,
        at(0.5),
        at(0.99),
        at(1.0),
    );
    if let Some(rewriting) = rewriting {
        println!("{} rewrites meanwhile", rewriting.await?);
    }

    let started = Instant::now();
    let (mut cursor, mut read, mut caught_up) = (FeedCursor::default(), 0, false);
    while !caught_up {
        let reader = ScopeReader {
            after: cursor,
            max_tokens: 1 << 18,
            ..ScopeReader::new(namespace.clone())
        };
        let reply = reader.read(&store.handle()).await?;
        (cursor, caught_up) = (reply.cursor, reply.caught_up);
        read += reply
            .events
            .iter()
            .map(|event| match event {
                refrain_protocol::document::FeedEvent::Update(update) => update.tokens.len(),
                refrain_protocol::document::FeedEvent::Remove(_) => 0,
            })
            .sum::<usize>();
    }
    let rate = read as f64 / started.elapsed().as_secs_f64();
    println!("a fresh follower: {read} tokens at {rate:.0} tokens/s");

    // The disk is measured once per tick.
    tokio::time::sleep(Duration::from_millis(2 * config.tuning.tick_ms)).await;
    let stats = store.handle().stats().await?;
    store.drain(Duration::from_secs(30)).await;
    let per_token = |bytes: u64| bytes as f64 / stats.tokens.max(1) as f64;
    println!(
        "{} documents, {} tokens: {:.2} bytes/token stored, {:.2} on disk",
        stats.documents,
        stats.tokens,
        per_token(stats.logical_bytes),
        per_token(stats.disk_bytes),
    );
    let started = Instant::now();
    let store = refrain_draft_store::start(config, auth, &Metrics::new()?).await?;
    println!(
        "reopened in {:.0} ms",
        started.elapsed().as_secs_f64() * 1e3
    );
    store.drain(Duration::from_secs(30)).await;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
