//! Measures the store over HTTP on loopback, and on the disk of `TMPDIR`.
//!
//! ```text
//! cargo bench -p refrain-draft-store --bench store              # all parts
//! cargo bench -p refrain-draft-store --bench store -- take      # the parts whose names hold "take"
//! cargo bench -p refrain-draft-store --bench store -- open 100  # with this many million tokens
//! ```
//!
//! * `append`: durable documents of 1,024 tokens (4 KiB), from eight callers with 64 documents per call.
//! * `insert`: the time from an append to its arrival at another follower.
//! * `take`: the time in which a worker takes over sealed segments, until they can be searched.
//! * `open`: a start on a directory of sealed documents.
//! * `size`: what these tokens take on disk, in memory after a restart, and in processor time until they are sealed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_draft_store::{DraftStoreConfig, DraftStoreServer, start};
use refrain_protocol::document::{
    AppendRequest, DocumentHead, DocumentUpdate, FeedCursor, FinishReason,
};
use refrain_protocol::segment::{SegmentPieceRequest, SegmentsRequest};
use refrain_protocol::{DocumentId, Namespace, SignedNamespace, TokenId};
use refrain_rpc::testing::ScopeReader;
use refrain_rpc::{DraftStore, HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::{Metrics, install_crypto_provider};
use refrain_suffix_index::{Index, IndexConfig, Segment};
use serde::{Deserialize, Serialize};

const DOCUMENT_TOKENS: usize = 1_024;
const CALL_DOCUMENTS: usize = 64;
const CALLERS: usize = 8;

/// The argument of a process that only prints the memory of a store.
const OPENED: &str = "--opened";

struct Store {
    server: DraftStoreServer,
    client: Arc<HttpDraftStore>,
    signed: SignedNamespace,
}

impl Store {
    async fn start(dir: &Path) -> anyhow::Result<Self> {
        let mesh = MeshConfig::generate()?;
        let config = DraftStoreConfig {
            data_dir: dir.to_owned(),
            listen: Some(([127, 0, 0, 1], 0).into()),
            seal_after_s: 0,
            tokens_max: u64::MAX,
            tenant_tokens_max: u64::MAX,
            bytes_max: u64::MAX,
            ..DraftStoreConfig::default()
        };
        let server = start(config, MeshAuth::new(&mesh)?, &Metrics::new()?).await?;
        let addr = server.addr().ok_or_else(|| anyhow::anyhow!("no address"))?;
        let patience = Duration::from_secs(60);
        let client = MeshClient::new(&format!("http://{addr}"), &mesh.secret, patience)?;
        let signed = NamespaceSigner::new(&mesh)?.sign(Namespace {
            tenant: "a".into(),
            model: "m".into(),
            tokenizer: "t".into(),
        });
        Ok(Store {
            server,
            client: Arc::new(HttpDraftStore::new(client)),
            signed,
        })
    }

    async fn stop(self) {
        self.server.drain(Duration::from_secs(60)).await;
    }

    /// Appends documents with these numbers. Returns the duration of each call.
    async fn append(&self, numbers: std::ops::Range<u64>) -> anyhow::Result<Vec<Duration>> {
        let calls = numbers.clone().step_by(CALL_DOCUMENTS);
        let calls: Vec<_> = calls
            .map(|from| from..numbers.end.min(from + CALL_DOCUMENTS as u64))
            .collect();
        let share = calls.len().div_ceil(CALLERS).max(1);
        let callers = calls.chunks(share).map(|calls| {
            let (calls, client, signed) =
                (calls.to_vec(), self.client.clone(), self.signed.clone());
            tokio::spawn(async move {
                let mut took = Vec::new();
                for call in calls {
                    let request = AppendRequest {
                        namespace: signed.clone(),
                        updates: call.map(document).collect(),
                        waited_ms: 0,
                        acknowledgement: None,
                    };
                    let started = Instant::now();
                    client.append(request).await?;
                    took.push(started.elapsed());
                }
                anyhow::Ok(took)
            })
        });
        let mut took = Vec::new();
        for caller in callers.collect::<Vec<_>>() {
            took.extend(caller.await??);
        }
        Ok(took)
    }
}

/// Templated text: phrases that recur in another order, with something new in between.
fn text(number: u64, len: usize) -> Vec<TokenId> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut tokens = Vec::with_capacity(len + 16);
    while tokens.len() < len {
        let phrase = next() % 20_000;
        let words = (0..12).map(|at| (phrase * 7_919 + at * at * 104_729) % 100_000);
        tokens.extend(words.map(|word| word as TokenId));
        tokens.push((next() % 100_000) as TokenId);
    }
    tokens.truncate(len);
    tokens
}

fn document(number: u64) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(u128::from(number) << 64 | 1),
        epoch: 0,
        prev_len: 0,
        tokens: text(number, DOCUMENT_TOKENS),
        head: DocumentHead::default(),
        finish: Some(FinishReason::Stop),
    }
}

fn at(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn print_times(what: &str, mut took: Vec<Duration>) {
    took.sort_unstable();
    println!(
        "{what}: p50 {:.2} ms, p99 {:.2} ms, most {:.2} ms ({} times)",
        at(&took, 0.5).as_secs_f64() * 1e3,
        at(&took, 0.99).as_secs_f64() * 1e3,
        at(&took, 1.0).as_secs_f64() * 1e3,
        took.len()
    );
}

async fn append() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let store = Store::start(dir.path()).await?;
    let (mut rates, mut took) = (Vec::new(), Vec::new());
    for round in 0..7u64 {
        let count = 8_192;
        let started = Instant::now();
        took.extend(store.append(round * count..(round + 1) * count).await?);
        rates.push(count as f64 / started.elapsed().as_secs_f64());
    }
    rates.sort_unstable_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    println!("append: {median:.0} documents of 4 KiB a second, median of {rates:.0?}");
    print_times("append: a call of 64", took);
    let stats = store.client.stats().await?;
    println!(
        "append: {:.2} bytes of disk per token",
        stats.disk_bytes as f64 / stats.tokens as f64
    );
    store.stop().await;
    Ok(())
}

async fn insert() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let store = Store::start(dir.path()).await?;
    let (client, signed) = (store.client.clone(), store.signed.clone());
    let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
    let follower = tokio::spawn(async move {
        let mut after = FeedCursor::default();
        loop {
            let reader = ScopeReader {
                after,
                max_tokens: 65_536,
                wait_ms: 10_000,
                ..ScopeReader::new(signed.clone())
            };
            let Ok(reply) = reader.read(&*client).await else {
                return;
            };
            after = reply.cursor;
            if sent.send((reply.events.len(), Instant::now())).is_err() {
                return;
            }
        }
    });
    let mut took = Vec::new();
    for number in 0..1_000u64 {
        let started = Instant::now();
        store.append(number..number + 1).await?;
        // A reply without events only sets the cursor.
        while let Some((events, received_at)) = received.recv().await {
            if events > 0 {
                took.push(received_at - started);
                break;
            }
        }
    }
    follower.abort();
    print_times("insert: from one worker to another", took);
    store.stop().await;
    Ok(())
}

/// A store with this many tokens in segments.
async fn filled(dir: &Path, tokens: u64) -> anyhow::Result<Store> {
    let store = Store::start(dir).await?;
    let documents = tokens / DOCUMENT_TOKENS as u64;
    let started = Instant::now();
    for from in (0..documents).step_by(16_384) {
        store.append(from..documents.min(from + 16_384)).await?;
    }
    store.server.handle().compact().await?;
    let stats = store.client.stats().await?;
    println!(
        "filled in {:.1} s: {} tokens, {:.2} bytes of disk per token",
        started.elapsed().as_secs_f64(),
        stats.tokens,
        stats.disk_bytes as f64 / stats.tokens as f64
    );
    Ok(store)
}

async fn take(tokens: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let store = filled(dir.path(), tokens).await?;
    let mut took = Vec::new();
    let (mut calls, mut segments) = (0, 0);
    let namespace = store.signed.clone();
    let request = SegmentsRequest { namespace };
    // Wait until merging has ended; otherwise a worker would have to start again.
    while store.client.segments(request.clone()).await?.segments.len() > 8 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    for _ in 0..5 {
        let started = Instant::now();
        let mut index = Index::new(IndexConfig::default());
        let listed = store.client.segments(request.clone()).await?;
        (calls, segments) = (1, listed.segments.len());
        for info in listed.segments {
            let mut bytes = Vec::with_capacity(info.words as usize * 4);
            while (bytes.len() as u64) < info.words * 4 {
                let request = SegmentPieceRequest {
                    namespace: store.signed.clone(),
                    segment: info.segment,
                    offset: bytes.len() as u64 / 4,
                    max_words: 1 << 20,
                };
                let piece = store.client.segment_piece(request).await?;
                bytes.extend(piece.words.iter().flat_map(|word| word.to_le_bytes()));
                calls += 1;
            }
            index.mount(Arc::new(Segment::open(bytes)?), []);
        }
        took.push(started.elapsed());
    }
    println!("take: {segments} segments in {calls} calls");
    print_times("take: until they can be searched", took);
    store.stop().await;
    Ok(())
}

async fn open(tokens: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    filled(dir.path(), tokens).await?.stop().await;
    let mut took = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let store = Store::start(dir.path()).await?;
        anyhow::ensure!(
            store.client.stats().await?.documents > 0,
            "nothing is there"
        );
        took.push(started.elapsed());
        store.stop().await;
    }
    print_times("open", took);
    Ok(())
}

/// A line of this process's status, in bytes.
fn status_bytes(line: &str) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib = status
        .lines()
        .find_map(|text| text.strip_prefix(line)?.split_whitespace().next());
    Ok(kib.unwrap_or("0").parse::<f64>()? * 1_024.0)
}

/// Processor seconds of this process, in ticks of a hundredth.
fn processor_s() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name in parentheses may have spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks = ticks.map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    Ok(ticks / 100.0)
}

/// A store that has just started.
#[derive(Serialize, Deserialize)]
struct StartedStore {
    memory_bytes: f64,
    disk_bytes: u64,
    documents: u64,
    tokens: u64,
}

/// Starts a store on `dir` in a process of its own, because this one keeps what earlier work has freed.
fn started_store(dir: &Path) -> anyhow::Result<StartedStore> {
    let mut child = std::process::Command::new(std::env::current_exe()?);
    let child = child
        .arg(OPENED)
        .arg(dir)
        .stderr(std::process::Stdio::inherit());
    let output = child.output()?;
    anyhow::ensure!(output.status.success(), "the store did not start");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Carried out by the process of [`started_store`].
async fn print_started_store(dir: &Path) -> anyhow::Result<()> {
    let store = Store::start(dir).await?;
    let stats = store.client.stats().await?;
    let started = StartedStore {
        memory_bytes: status_bytes("RssAnon:")?,
        disk_bytes: stats.disk_bytes,
        documents: stats.documents,
        tokens: stats.tokens,
    };
    println!("{}", serde_json::to_string(&started)?);
    store.stop().await;
    Ok(())
}

async fn size(tokens: u64) -> anyhow::Result<()> {
    let empty = started_store(tempfile::tempdir()?.path())?.memory_bytes;
    for tokens in [tokens / 10, tokens] {
        let dir = tempfile::tempdir()?;
        let before_s = processor_s()?;
        filled(dir.path(), tokens).await?.stop().await;
        let processor_s = processor_s()? - before_s;
        let peak = status_bytes("VmHWM:")?;
        let store = started_store(dir.path())?;
        let millions = store.tokens as f64 / 1e6;
        println!(
            "size: {} documents of {DOCUMENT_TOKENS} tokens: {:.2} MB of disk, {:.3} MB of memory (beside {:.0} MB when empty) \
             and {:.2} s of processor time with the client's, for a million tokens; {:.0} MB at the peak, with the client",
            store.documents,
            store.disk_bytes as f64 / 1e6 / millions,
            (store.memory_bytes - empty) / 1e6 / millions,
            empty / 1e6,
            processor_s / millions,
            peak / 1e6,
        );
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    install_crypto_provider();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new()?;
    if let [first, dir] = arguments.as_slice()
        && first == OPENED
    {
        return runtime.block_on(print_started_store(Path::new(dir)));
    }
    let named = |part: &str| {
        let mut names = arguments
            .iter()
            .filter(|name| !name.starts_with('-') && name.parse::<u64>().is_err());
        let any = names.clone().next().is_none();
        any || names.any(|name| part.contains(name.as_str()))
    };
    let millions = arguments.iter().find_map(|name| name.parse::<u64>().ok());
    let tokens = millions.unwrap_or(10) * 1_000_000;
    runtime.block_on(async {
        if named("append") {
            append().await?;
        }
        if named("insert") {
            insert().await?;
        }
        if named("take") {
            take(tokens).await?;
        }
        if named("open") {
            open(tokens).await?;
        }
        if named("size") {
            size(tokens).await?;
        }
        Ok(())
    })
}
