//! The draft store through its public interface, on a real disk.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod acceptance_statistics;
mod crash;
mod damage;
mod erase;
mod export;
#[path = "../support/files.rs"]
mod files;
mod full_disk;
mod groups;
mod history;
mod isolation;
#[path = "../support/logs.rs"]
mod logs;
mod random_damage;
mod rewrite;
mod segments;
mod service;
mod snapshot;
mod takeover;
mod tenants;
mod trust;
mod usage;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use refrain_draft_store::{
    DraftStoreConfig, DraftStoreHandle, DraftStoreServer, StoreTuning, start,
};
use refrain_protocol::document::{
    AppendRequest, DocumentHead, DocumentUpdate, FeedCursor, FeedEvent, FinishReason, TouchRequest,
};
use refrain_protocol::{ApiError, DocumentId, Namespace, SignedNamespace, TokenId};
use refrain_rpc::DraftStore;
use refrain_rpc::testing::ScopeReader;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

/// A running store, and a gateway's key to sign namespaces with.
struct Store {
    server: DraftStoreServer,
    metrics: Metrics,
    mesh: MeshConfig,
}

/// Short intervals, so that tests wait for little.
fn tuning() -> StoreTuning {
    StoreTuning {
        commit_interval_ms: 1,
        tick_ms: 20,
        ..StoreTuning::default()
    }
}

fn config(dir: &Path) -> DraftStoreConfig {
    DraftStoreConfig {
        data_dir: dir.join("data"),
        tuning: tuning(),
        ..DraftStoreConfig::default()
    }
}

/// How long anything may take. Only a hang takes that long, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Waits until a condition holds. The store has clocks and threads of its own, so a paused clock cannot help.
async fn eventually(is_so: impl AsyncFn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < until, "the condition never holds");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A store that seals documents as soon as they end, a few to a segment.
fn sealing(dir: &Path) -> DraftStoreConfig {
    DraftStoreConfig {
        seal_after_s: 0,
        seal_tokens: 4_000,
        tuning: StoreTuning {
            segments_max: 2,
            ..tuning()
        },
        ..config(dir)
    }
}

/// Destroys the catalogue of a closed store's log, and flips a bit of its journal. The first record there is the
/// journal's name, which costs no document.
fn spoil_log(dir: &Path, at: usize) {
    let log = dir.join("data/log");
    let catalog = logs::catalog(&log);
    for file in ["db", "conf"] {
        std::fs::write(catalog.join(file), vec![0xa5; 5_000]).unwrap();
    }
    let mut bytes = std::fs::read(log.join("journal")).unwrap();
    bytes[at] ^= 1;
    std::fs::write(log.join("journal"), bytes).unwrap();
}

impl Store {
    async fn start(config: DraftStoreConfig) -> Store {
        Store::try_start(config).await.unwrap()
    }

    async fn try_start(config: DraftStoreConfig) -> anyhow::Result<Store> {
        let mesh = MeshConfig::generate()?;
        let metrics = Metrics::new()?;
        let server = start(config, MeshAuth::new(&mesh)?, &metrics).await?;
        Ok(Store {
            server,
            metrics,
            mesh,
        })
    }

    /// Whether the store is ready, or why not.
    fn ready(&self) -> Result<(), String> {
        self.handle().readiness()
    }

    async fn stop(self) {
        self.server.drain(Duration::from_secs(60)).await;
    }

    fn handle(&self) -> DraftStoreHandle {
        self.server.handle()
    }

    fn sign(&self, tenant: &str) -> SignedNamespace {
        NamespaceSigner::new(&self.mesh).unwrap().sign(Namespace {
            tenant: tenant.into(),
            model: "m".into(),
            tokenizer: "t".into(),
        })
    }

    async fn append(
        &self,
        tenant: &str,
        updates: Vec<DocumentUpdate>,
    ) -> Result<Vec<u32>, ApiError> {
        let request = AppendRequest {
            namespace: self.sign(tenant),
            updates,
            waited_ms: 0,
            acknowledgement: None,
        };
        Ok(self.handle().append(request).await?.lengths)
    }

    /// The value of a metric. The name includes the labels.
    fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in:\n{text}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    }
}

fn update(document: u128, prev_len: u32, tokens: &[TokenId]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead {
            left_context: vec![1; 20],
            ..DocumentHead::default()
        },
        finish: None,
    }
}

fn finished(update: DocumentUpdate) -> DocumentUpdate {
    DocumentUpdate {
        finish: Some(FinishReason::Stop),
        ..update
    }
}

/// A follower's copy of one tenant's namespace.
#[derive(Default)]
struct Follower {
    cursor: FeedCursor,
    texts: BTreeMap<u128, Vec<TokenId>>,
    resets: usize,
    events: usize,
}

impl Follower {
    async fn catch_up(&mut self, store: &Store, tenant: &str) {
        self.try_catch_up(store, tenant).await.unwrap();
    }

    /// Catches up with a store that may be closed meanwhile.
    async fn try_catch_up(&mut self, store: &Store, tenant: &str) -> Result<(), ApiError> {
        loop {
            let reader = ScopeReader {
                after: self.cursor,
                max_tokens: 500,
                ..ScopeReader::new(store.sign(tenant))
            };
            let reply = reader.read(&store.handle()).await?;
            if reply.reset {
                self.resets += 1;
                self.texts.clear();
            }
            for event in reply.events {
                self.events += 1;
                match event {
                    FeedEvent::Remove(document) => {
                        self.texts.remove(&document.0);
                    }
                    FeedEvent::Update(update) => {
                        let text = self.texts.entry(update.document.0).or_default();
                        let start = update.prev_len as usize;
                        assert!(start <= text.len(), "gap in the feed");
                        let known = (text.len() - start).min(update.tokens.len());
                        text.extend_from_slice(&update.tokens[known..]);
                    }
                }
            }
            self.cursor = reply.cursor;
            if reply.caught_up {
                return Ok(());
            }
        }
    }
}
