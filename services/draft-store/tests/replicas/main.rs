//! Replicas of the draft store on a real NATS server.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod broker;
mod callers;
mod crash;
mod equal;
mod erase;
#[path = "../support/files.rs"]
mod files;
mod join;
mod nats;

use std::path::Path;
use std::time::{Duration, Instant};

use refrain_draft_store::{
    DraftStoreConfig, DraftStoreHandle, DraftStoreServer, FeedConfig, StoreTuning, start,
};
use refrain_protocol::admin::NamespaceSum;
use refrain_protocol::document::{
    Acknowledgement, AppendRequest, DocumentHead, DocumentUpdate, FinishReason,
};
use refrain_protocol::segment::DocumentsRequest;
use refrain_protocol::{ApiError, DocumentId, Namespace, SignedNamespace, TokenId};
use refrain_rpc::{DraftStore as _, StoreAdmin as _};
use refrain_service_kit::clock::unix_ms;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

/// A running replica, and a gateway's key to sign namespaces with.
struct Replica {
    server: DraftStoreServer,
    metrics: Metrics,
    mesh: MeshConfig,
}

fn config(dir: &Path, name: &str, url: &str) -> DraftStoreConfig {
    DraftStoreConfig {
        data_dir: dir.join(name),
        tuning: StoreTuning {
            commit_interval_ms: 1,
            tick_ms: 20,
            ..StoreTuning::default()
        },
        feed: Some(FeedConfig {
            servers: vec![url.to_owned()],
            max_bytes: 64 << 20,
            silent_s: 1,
            ..FeedConfig::default()
        }),
        ..DraftStoreConfig::default()
    }
}

/// How long anything may take. Only a hang takes that long, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Waits until a condition holds. Stores and brokers have clocks of their own, so a paused clock cannot help.
async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < until, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn names(tenant: &str) -> Namespace {
    Namespace {
        tenant: tenant.into(),
        model: "m".into(),
        tokenizer: "t".into(),
    }
}

impl Replica {
    async fn start(config: DraftStoreConfig) -> Replica {
        Replica::start_in(config, MeshConfig::generate().unwrap()).await
    }

    /// Starts a replica with the keys of a mesh.
    async fn start_in(config: DraftStoreConfig, mesh: MeshConfig) -> Replica {
        let metrics = Metrics::new().unwrap();
        let auth = MeshAuth::new(&mesh).unwrap();
        let server = start(config, auth, &metrics).await.unwrap();
        Replica {
            server,
            metrics,
            mesh,
        }
    }

    /// Starts a replica, and waits until it has caught up.
    async fn ready(config: DraftStoreConfig) -> Replica {
        Replica::start(config).await.caught_up().await
    }

    async fn caught_up(self) -> Replica {
        let until = Instant::now() + PATIENCE;
        while let Err(trouble) = self.handle().readiness() {
            assert!(Instant::now() < until, "never ready: {trouble}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self
    }

    async fn stop(self) {
        self.server.drain(Duration::from_secs(5)).await;
    }

    fn handle(&self) -> DraftStoreHandle {
        self.server.handle()
    }

    fn sign(&self, tenant: &str) -> SignedNamespace {
        NamespaceSigner::new(&self.mesh)
            .unwrap()
            .sign(names(tenant))
    }

    async fn append_at(
        &self,
        level: Acknowledgement,
        tenant: &str,
        updates: Vec<DocumentUpdate>,
    ) -> Result<Vec<u32>, ApiError> {
        let request = AppendRequest {
            namespace: self.sign(tenant),
            updates,
            waited_ms: 0,
            acknowledgement: Some(level),
        };
        Ok(self.handle().append(request).await?.lengths)
    }

    /// Stores updates here.
    async fn append(&self, tenant: &str, updates: Vec<DocumentUpdate>) -> Vec<u32> {
        let level = Acknowledgement::Local;
        self.append_at(level, tenant, updates).await.unwrap()
    }

    /// The text of a document, if there is one.
    async fn text(&self, tenant: &str, document: u128) -> Option<Vec<TokenId>> {
        let request = DocumentsRequest {
            namespace: self.sign(tenant),
            documents: vec![DocumentId(document)],
            max_tokens: 1 << 20,
        };
        let reply = self.handle().documents(request).await.unwrap();
        reply.updates.into_iter().next().map(|update| update.tokens)
    }

    /// The documents of the replica in numbers and checksums.
    async fn sums(&self) -> Vec<NamespaceSum> {
        let reply = self.handle().verify().await.unwrap();
        assert_eq!(reply.damaged, 0, "{:?}", reply.damage);
        reply.namespaces
    }

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
            session: Some("s".into()),
            created_ms: unix_ms(),
            left_context: vec![1; 16],
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

fn text(document: u128, len: u32) -> Vec<TokenId> {
    (0..len)
        .map(|at| at * 31 % 5_000 + document as u32)
        .collect()
}

/// A whole document.
fn whole(document: u128, len: u32) -> DocumentUpdate {
    finished(update(document, 0, &text(document, len)))
}

/// Waits until all replicas have sent everything, and have the same documents.
async fn end_equal(replicas: &[&Replica]) -> Vec<NamespaceSum> {
    eventually("all outboxes are empty", async || {
        replicas
            .iter()
            .all(|replica| replica.metric("refrain_draft_store_outbox_entries") == 0.0)
    })
    .await;
    eventually("the replicas are equal", async || {
        let first = replicas[0].sums().await;
        for replica in &replicas[1..] {
            if replica.sums().await != first {
                return false;
            }
        }
        true
    })
    .await;
    replicas[0].sums().await
}
