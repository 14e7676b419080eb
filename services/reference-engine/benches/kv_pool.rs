//! How long does it take until a session with a long text has its first token: by reading the text, and with blocks
//! of the pool that are in memory, in the file, or at another engine?
//!
//! The text comes in pieces, as workers send it, and the step of a session that waits for blocks is sent again.
//! Each round has engines of its own. The file was written a moment before, so the system has it in memory.
//!
//! `cargo bench -p refrain-reference-engine --bench kv_pool -- [tokens] [rounds]`

use std::path::Path;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{CloseRequest, SessionSpec, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, NamespaceId, TokenId};
use refrain_reference_engine::{EngineConfig, EngineServer, KvPoolConfig, start};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_service_kit::telemetry::Metrics;

/// Tokens of a piece, as in the worker's default configuration.
const PIECE_TOKENS: usize = 128;

/// The pause before a step is sent again, as the engine asks for it.
const PAUSE: Duration = Duration::from_millis(3);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // `cargo bench` passes the argument `--bench`.
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"));
    let tokens: u32 = arguments.next().map_or(Ok(1_000), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(11), |text| text.parse())?;
    let keys = MeshConfig::generate()?;
    let folder = std::env::temp_dir().join(format!("refrain-kv-pool-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let measured = measure(&keys, &folder, tokens, rounds).await;
    std::fs::remove_dir_all(&folder)?;
    let rows = measured?;
    println!("First token of a session with {tokens} tokens, {rounds} rounds");
    println!("             |  median ms |  fastest ms | cached tokens");
    for (name, mut seconds, cached) in rows {
        seconds.sort_by(f64::total_cmp);
        println!(
            "{name:>12} | {:>10.2} | {:>11.2} | {cached:>6}",
            seconds[seconds.len() / 2] * 1e3,
            seconds[0] * 1e3
        );
    }
    Ok(())
}

type Row = (&'static str, Vec<f64>, u32);

async fn measure(
    keys: &MeshConfig,
    folder: &Path,
    tokens: u32,
    rounds: usize,
) -> anyhow::Result<[Row; 5]> {
    let mut rows: [Row; 5] = [
        ("no pool", Vec::new(), 0),
        ("pool, empty", Vec::new(), 0),
        ("memory", Vec::new(), 0),
        ("file", Vec::new(), 0),
        ("peer", Vec::new(), 0),
    ];
    let text: Vec<TokenId> = (0..tokens).map(|at| 5 + at * 7 % 4_000).collect();
    for round in 0..rounds {
        let mut note = |row: usize, (seconds, cached): (f64, u32)| {
            rows[row].1.push(seconds);
            rows[row].2 = cached;
        };
        let in_memory = KvPoolConfig {
            memory_bytes_max: 256 << 20,
            wait_ms: 10_000,
            ..KvPoolConfig::default()
        };
        let with_file = KvPoolConfig {
            file: Some(folder.join(format!("{round}.kvpool"))),
            ..in_memory.clone()
        };
        let none = started(keys, KvPoolConfig::default()).await?;
        note(0, first_token(&none, &text).await?);
        let engine = started(keys, with_file.clone()).await?;
        note(1, first_token(&engine, &text).await?);
        note(2, first_token(&engine, &text).await?);
        let peers = KvPoolConfig {
            peers: engine
                .addr()
                .map(|addr| format!("http://{addr}"))
                .into_iter()
                .collect(),
            ..in_memory
        };
        let other = started(keys, peers).await?;
        note(4, first_token(&other, &text).await?);
        for engine in [none, engine, other] {
            engine.stop().await;
        }
        let restarted = started(keys, with_file).await?;
        note(3, first_token(&restarted, &text).await?);
        restarted.stop().await;
    }
    Ok(rows)
}

async fn started(keys: &MeshConfig, kv_pool: KvPoolConfig) -> anyhow::Result<EngineServer> {
    let config = EngineConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        kv_pool,
        ..EngineConfig::default()
    };
    let server = start(config, MeshAuth::new(keys)?, Metrics::new()?).await?;
    // The first pass of an engine makes its buffers.
    first_token(&server, &[1, 2, 3]).await?;
    Ok(server)
}

/// Opens a session, reads the text, and closes the session without keeping its KV. Returns the seconds until the
/// token, and the number of cached tokens.
async fn first_token(server: &EngineServer, text: &[TokenId]) -> anyhow::Result<(f64, u32)> {
    let (session, started) = (EngineSessionId(1), Instant::now());
    let (mut from, mut cached) = (0, 0);
    while from < text.len() {
        let to = text.len().min(from + PIECE_TOKENS);
        let item = StepItem {
            session,
            open: (from == 0).then(|| SessionSpec {
                namespace: NamespaceId(1),
                prompt_len: text.len() as u32,
                ahead: text[to..].to_vec(),
                ..SessionSpec::default()
            }),
            keep_len: from as u32,
            tokens: text[from..to].to_vec(),
            sample: to == text.len(),
            draft: None,
            self_draft: None,
            max_emit: 1,
        };
        let items = vec![item];
        let mut response = server.handle().step(StepRequest { items }).await?;
        match response.results.remove(0) {
            Ok(output) => {
                cached += output.cached_tokens;
                from = to;
            }
            Err(error) if error.retry_after_ms.is_some() => tokio::time::sleep(PAUSE).await,
            Err(error) => anyhow::bail!("{error}"),
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let close = CloseRequest {
        sessions: vec![session],
        keep_kv: false,
        parks: false,
    };
    server.handle().close(close).await?;
    Ok((seconds, cached))
}
