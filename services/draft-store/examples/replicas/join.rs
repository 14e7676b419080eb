//! How long a new replica takes.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use refrain_draft_store::{DraftStoreConfig, FeedConfig};
use refrain_protocol::document::Acknowledgement;
use refrain_rpc::StoreAdmin as _;
use refrain_service_kit::mesh::MeshConfig;

use crate::brokers::Brokers;
use crate::replica::{DOCUMENT_TOKENS, Replica, config, feed};

/// Fills a replica, and has others take everything over.
pub(crate) async fn measure(brokers: &Brokers, documents: u64) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mesh = MeshConfig::generate()?;
    let a = config(dir.path(), "a", Some(feed(brokers, Vec::new())));
    let a = Replica::start(a, &mesh).await?;
    a.fill(0..documents, Acknowledgement::Replicated).await?;
    let peers = vec![format!("http://{}", a.server.addr().context("no address")?)];
    // The stream does not have them any more, as after a month.
    let stream = brokers.context().await?.get_stream("refrain-0").await?;
    stream.purge().keep(1).await?;
    let feed = |bytes_s_max| FeedConfig {
        join_bytes_s_max: bytes_s_max,
        ..feed(brokers, peers.clone())
    };

    let texts = config(dir.path(), "texts", Some(feed(u64::MAX)));
    // One document of the namespace is enough for texts.
    let alone = DraftStoreConfig {
        feed: None,
        ..texts.clone()
    };
    let alone = Replica::start(alone, &mesh).await?;
    alone.append(0..1, Acknowledgement::Local).await?;
    alone.stop().await;
    joined("texts", texts, &mesh, documents).await?;

    let sealed = sealed_share(&a)?;
    let part = config(dir.path(), "part", Some(feed(u64::MAX)));
    let what = format!("files, as far as it is sealed ({:.0} %)", sealed * 100.0);
    joined(&what, part, &mesh, documents).await?;
    a.handle().compact().await?;
    let files = config(dir.path(), "files", Some(feed(u64::MAX)));
    joined("files", files, &mesh, documents).await?;
    let slow = config(dir.path(), "slow", Some(feed(128 << 20)));
    joined("files, at 128 MiB/s", slow, &mesh, documents).await?;
    a.stop().await;
    Ok(())
}

/// The share of the tokens that is in segments.
fn sealed_share(replica: &Replica) -> anyhow::Result<f64> {
    let unsealed = replica.metric("refrain_draft_store_unsealed_tokens")?;
    let all = replica.metric("refrain_draft_store_tokens")?;
    Ok(1.0 - unsealed / all.max(1.0))
}

async fn joined(
    what: &str,
    config: DraftStoreConfig,
    mesh: &MeshConfig,
    documents: u64,
) -> anyhow::Result<()> {
    let dir = config.data_dir.clone();
    let started = Instant::now();
    let replica: Arc<Replica> = Replica::start(config, mesh).await?;
    replica.until(documents).await?;
    let took = started.elapsed();
    let tokens = documents * u64::from(DOCUMENT_TOKENS);
    let bytes = replica.metric("refrain_draft_store_feed_joined_bytes_total")?;
    println!(
        "{what:<48} {:>6.1} M tokens, {:>6.0} MB in {:>6.1} s: {:>5.2} M tokens/s",
        tokens as f64 / 1e6,
        bytes / 1e6,
        took.as_secs_f64(),
        tokens as f64 / 1e6 / took.as_secs_f64()
    );
    replica.stop().await;
    clear(&dir).await;
    Ok(())
}

/// Gives the space back.
async fn clear(dir: &Path) {
    tokio::time::sleep(Duration::from_millis(200)).await;
    let _ = std::fs::remove_dir_all(dir);
}
