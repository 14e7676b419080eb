//! Measures two replicas on a NATS server that runs already, and a third one that joins:
//!
//! ```text
//! nats-server -js -sd /tmp/nats &
//! cargo run --release -p refrain-draft-store --example replicas -- nats://127.0.0.1:4222 50000
//! ```
//!
//! It prints how many documents a second reach the other replica, the lag at 2,000 documents a second, and how long a
//! new replica takes. It deletes the stream `refrain-9` when it begins.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use refrain_draft_store::{DraftStoreConfig, DraftStoreServer, FeedConfig, start};
use refrain_protocol::document::{
    AppendRequest, DocumentHead, DocumentUpdate, FeedCursor, FeedEvent, FinishReason, FollowRequest,
};
use refrain_protocol::{DocumentId, Namespace, SignedNamespace, TokenId};
use refrain_rpc::{DraftStore as _, StoreAdmin as _};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::{Metrics, install_crypto_provider};

const DOCUMENT_TOKENS: u32 = 1_024;
const CALL_DOCUMENTS: u64 = 64;
const CALLERS: u64 = 8;
const RATE_PER_S: u64 = 2_000;
const RATE_SECONDS: u64 = 5;

fn config(dir: &Path, name: &str, url: &str, peers: Vec<String>) -> DraftStoreConfig {
    DraftStoreConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        data_dir: dir.join(name),
        tokens_max: u64::MAX,
        tenant_tokens_max: u64::MAX,
        bytes_max: u64::MAX,
        tenant_bytes_max: u64::MAX,
        feed: Some(FeedConfig {
            servers: vec![url.to_owned()],
            peers,
            shard: 9,
            max_bytes: 4 << 30,
            ..FeedConfig::default()
        }),
        ..DraftStoreConfig::default()
    }
}

fn document(number: u64) -> DocumentUpdate {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let tokens = (0..DOCUMENT_TOKENS).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 48) as TokenId
    });
    DocumentUpdate {
        document: DocumentId(u128::from(number)),
        epoch: 1,
        prev_len: 0,
        tokens: tokens.collect(),
        head: DocumentHead::default(),
        finish: Some(FinishReason::Stop),
    }
}

struct Replica {
    server: DraftStoreServer,
    signed: SignedNamespace,
}

impl Replica {
    async fn start(config: DraftStoreConfig, mesh: &MeshConfig) -> anyhow::Result<Replica> {
        let server = start(config, MeshAuth::new(mesh)?, &Metrics::new()?).await?;
        let signed = NamespaceSigner::new(mesh)?.sign(Namespace {
            tenant: "a".into(),
            model: "m".into(),
            tokenizer: "t".into(),
        });
        let replica = Replica { server, signed };
        while replica.server.handle().readiness().is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(replica)
    }

    async fn append(&self, numbers: std::ops::Range<u64>) -> anyhow::Result<()> {
        let request = AppendRequest {
            namespace: self.signed.clone(),
            updates: numbers.map(document).collect(),
            waited_ms: 0,
            acknowledgement: None,
        };
        self.server.handle().append(request).await?;
        Ok(())
    }

    async fn documents(&self) -> anyhow::Result<u64> {
        Ok(self.server.handle().store_stats().await?.documents)
    }

    async fn until(&self, documents: u64) -> anyhow::Result<()> {
        while self.documents().await? < documents {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    install_crypto_provider();
    let mut args = std::env::args().skip(1);
    let url = args.next().context("name the URL of a NATS server")?;
    let count: u64 = args.next().unwrap_or_else(|| "20000".into()).parse()?;
    let context = async_nats::jetstream::new(async_nats::connect(&url).await?);
    let _ = context.delete_stream("refrain-9").await;
    let dir = tempfile::tempdir()?;
    let mesh = MeshConfig::generate()?;
    let a = Replica::start(config(dir.path(), "a", &url, Vec::new()), &mesh).await?;
    let b = Replica::start(config(dir.path(), "b", &url, Vec::new()), &mesh).await?;
    let a = Arc::new(a);

    let started = Instant::now();
    let callers = (0..CALLERS).map(|caller| {
        let a = a.clone();
        let share = count / CALLERS;
        tokio::spawn(async move {
            let (mut from, end) = (caller * share, (caller + 1) * share);
            while from < end {
                let until = end.min(from + CALL_DOCUMENTS);
                a.append(from..until).await?;
                from = until;
            }
            anyhow::Ok(())
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await??;
    }
    let stored = started.elapsed();
    let count = count / CALLERS * CALLERS;
    b.until(count).await?;
    let arrived = started.elapsed();
    let rate = |took: Duration| count as f64 / took.as_secs_f64();
    println!(
        "{count} documents of {DOCUMENT_TOKENS} tokens: {:.0}/s stored here, {:.0}/s at the other replica",
        rate(stored),
        rate(arrived)
    );

    let mut lags = lags(&a, &b, count).await?;
    lags.sort_unstable();
    let at = |share: f64| lags[((lags.len() - 1) as f64 * share) as usize];
    println!(
        "at {RATE_PER_S} documents/s: lag p50 {:?}, p99 {:?}, most {:?}",
        at(0.5),
        at(0.99),
        at(1.0)
    );

    let documents = a.documents().await?;
    b.until(documents).await?;
    context
        .get_stream("refrain-9")
        .await?
        .purge()
        .keep(1)
        .await?;
    let addr = a.server.addr().context("no address")?;
    let started = Instant::now();
    let peers = vec![format!("http://{addr}")];
    let c = Replica::start(config(dir.path(), "c", &url, peers), &mesh).await?;
    c.until(documents).await?;
    let took = started.elapsed();
    let tokens = documents * u64::from(DOCUMENT_TOKENS);
    println!(
        "a new replica took {:.1} M tokens over in {took:?}: {:.2} M tokens/s",
        tokens as f64 / 1e6,
        tokens as f64 / 1e6 / took.as_secs_f64()
    );
    Ok(())
}

/// Appends documents at a steady rate, one per call. Returns the time from each call to its arrival at the other
/// replica, as a follower there sees it.
async fn lags(a: &Arc<Replica>, b: &Replica, first: u64) -> anyhow::Result<Vec<Duration>> {
    let total = RATE_PER_S * RATE_SECONDS;
    let mut after = FeedCursor::default();
    let follow = async |after: FeedCursor, wait_ms| {
        let request = FollowRequest {
            namespace: b.signed.clone(),
            after,
            max_tokens: 1 << 20,
            wait_ms,
        };
        b.server.handle().follow(request).await
    };
    loop {
        let reply = follow(after, 0).await?;
        after = reply.cursor;
        if reply.caught_up {
            break;
        }
    }
    let begun = tokio::time::Instant::now();
    let due = move |number: u64| begun + Duration::from_secs_f64(number as f64 / RATE_PER_S as f64);
    let writer = {
        let a = a.clone();
        tokio::spawn(async move {
            let mut calls = tokio::task::JoinSet::new();
            for number in 0..total {
                tokio::time::sleep_until(due(number)).await;
                let a = a.clone();
                calls.spawn(async move { a.append(first + number..first + number + 1).await });
            }
            while let Some(call) = calls.join_next().await {
                call??;
            }
            anyhow::Ok(())
        })
    };
    let mut lags = Vec::new();
    while (lags.len() as u64) < total {
        let reply = follow(after, 1_000).await?;
        after = reply.cursor;
        let now = tokio::time::Instant::now();
        for event in reply.events {
            if let FeedEvent::Update(update) = event {
                let number = update.document.0 as u64;
                lags.push(now.saturating_duration_since(due(number - first)));
            }
        }
    }
    writer.await??;
    Ok(lags)
}
