//! A replica in this process, and the documents that it gets.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_draft_store::{
    DraftStoreConfig, DraftStoreHandle, DraftStoreServer, FeedConfig, start,
};
use refrain_protocol::document::{
    Acknowledgement, AppendRequest, DocumentHead, DocumentUpdate, FinishReason,
};
use refrain_protocol::{DocumentId, Namespace, SignedNamespace, TokenId};
use refrain_rpc::{DraftStore as _, StoreAdmin as _};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use crate::brokers::Brokers;

pub(crate) const DOCUMENT_TOKENS: u32 = 1_024;

/// Documents of one call, and calls at once.
const CALL_DOCUMENTS: u64 = 64;
const CALLERS: u64 = 32;

pub(crate) fn feed(brokers: &Brokers, peers: Vec<String>) -> FeedConfig {
    FeedConfig {
        servers: brokers.urls.clone(),
        peers,
        stream_replicas: brokers.copies,
        max_bytes: 1 << 30,
        ..FeedConfig::default()
    }
}

pub(crate) fn config(dir: &Path, name: &str, feed: Option<FeedConfig>) -> DraftStoreConfig {
    DraftStoreConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        data_dir: dir.join(name),
        tokens_max: u64::MAX,
        tenant_tokens_max: u64::MAX,
        bytes_max: u64::MAX,
        tenant_bytes_max: u64::MAX,
        feed,
        ..DraftStoreConfig::default()
    }
}

fn document(number: u64) -> DocumentUpdate {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let tokens = (0..DOCUMENT_TOKENS).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 47) as TokenId
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

pub(crate) struct Replica {
    pub(crate) server: DraftStoreServer,
    pub(crate) signed: SignedNamespace,
    pub(crate) metrics: Metrics,
}

impl Replica {
    /// Starts a replica, and waits until it is ready.
    pub(crate) async fn start(
        config: DraftStoreConfig,
        mesh: &MeshConfig,
    ) -> anyhow::Result<Arc<Replica>> {
        let metrics = Metrics::new()?;
        let server = start(config, MeshAuth::new(mesh)?, &metrics).await?;
        let signed = NamespaceSigner::new(mesh)?.sign(Namespace {
            tenant: "a".into(),
            model: "m".into(),
            tokenizer: "t".into(),
        });
        let replica = Replica {
            server,
            signed,
            metrics,
        };
        while replica.handle().readiness().is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(Arc::new(replica))
    }

    pub(crate) async fn stop(self: Arc<Self>) {
        if let Some(replica) = Arc::into_inner(self) {
            replica.server.drain(Duration::from_secs(5)).await;
        }
    }

    pub(crate) fn handle(&self) -> DraftStoreHandle {
        self.server.handle()
    }

    pub(crate) async fn append(
        &self,
        numbers: Range<u64>,
        level: Acknowledgement,
    ) -> anyhow::Result<()> {
        let request = AppendRequest {
            namespace: self.signed.clone(),
            updates: numbers.map(document).collect(),
            waited_ms: 0,
            acknowledgement: Some(level),
        };
        // A store that is asked for too much says when to ask again.
        loop {
            match self.handle().append(request.clone()).await {
                Ok(_) => return Ok(()),
                Err(error) => match error.retry_after_ms {
                    Some(wait_ms) => tokio::time::sleep(Duration::from_millis(wait_ms)).await,
                    None => return Err(error.into()),
                },
            }
        }
    }

    /// Appends documents by several callers. Returns the time until all are acknowledged.
    pub(crate) async fn fill(
        self: &Arc<Self>,
        numbers: Range<u64>,
        level: Acknowledgement,
    ) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let calls = (numbers.end - numbers.start).div_ceil(CALL_DOCUMENTS);
        let callers = (0..CALLERS).map(|caller| {
            let (replica, numbers) = (self.clone(), numbers.clone());
            tokio::spawn(async move {
                for call in (caller..calls).step_by(CALLERS as usize) {
                    let from = numbers.start + call * CALL_DOCUMENTS;
                    let until = numbers.end.min(from + CALL_DOCUMENTS);
                    replica.append(from..until, level).await?;
                }
                anyhow::Ok(())
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await??;
        }
        Ok(started.elapsed())
    }

    pub(crate) async fn documents(&self) -> anyhow::Result<u64> {
        Ok(self.handle().store_stats().await?.documents)
    }

    /// Waits until there are this many documents.
    pub(crate) async fn until(&self, documents: u64) -> anyhow::Result<()> {
        while self.documents().await? < documents {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// The value of a metric.
    pub(crate) fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let text = String::from_utf8(self.metrics.render())?;
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.unwrap_or("0").parse()?)
    }
}
