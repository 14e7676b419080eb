//! Measures what an output costs in calls and bytes until the draft store and the replicas of all workers have it.
//!
//! Each worker is an uploader and a replica without an engine. They write outputs to a draft store in this process,
//! four at once per worker and 50 tokens a second each, and follow it. The bytes are those of the bodies.
//!
//! With `all`, the feed sends a worker also what it has written itself.
//!
//! Usage: `cargo run -p e2e --example replication_cost -- [workers] [tokens] [rounds] [all]`

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use refrain_draft_replica::{
    DocumentUpdateRef, DraftReplica, NamespaceReplica, ReplicaConfig, ReplicaMetrics, Uploader,
    UploaderConfig, UploaderMetrics,
};
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, FinishReason, LEFT_CONTEXT_TOKENS, StoreStats,
    TouchRequest, UnknownDocumentsReply, UnknownDocumentsRequest,
};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::pull::{PullReply, PullRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::tenants::{TenantChange, TenantChangeReply, TenantsReply, TenantsRequest};
use refrain_protocol::{ApiError, DocumentId, Namespace, SignedNamespace};
use refrain_rpc::{DraftStore, HttpDraftStore, UsageReplica, encode_bincode};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::NamespaceSigner;
use refrain_service_kit::telemetry::Metrics;

/// Outputs of a worker that grow at once.
const AT_ONCE: u128 = 4;
/// The time between two tokens of an output.
const STEP: Duration = Duration::from_millis(20);

/// Calls of a kind, and the bytes that went there and back.
#[derive(Clone, Copy, Default)]
struct Count {
    calls: u64,
    sent: u64,
    received: u64,
}

/// A draft store whose calls are counted by name.
struct CountedStore {
    store: HttpDraftStore,
    counts: Mutex<BTreeMap<&'static str, Count>>,
}

macro_rules! counted {
    ($($call:ident: $request:ty => $reply:ty;)+) => {
        #[async_trait::async_trait]
        impl DraftStore for CountedStore {
            $(async fn $call(&self, request: $request) -> Result<$reply, ApiError> {
                let sent = encode_bincode(&request)?.len() as u64;
                let reply = self.store.$call(request).await?;
                let received = encode_bincode(&reply)?.len() as u64;
                let mut counts = self.counts.lock();
                let count = counts.entry(stringify!($call)).or_default();
                count.calls += 1;
                count.sent += sent;
                count.received += received;
                Ok(reply)
            })+

            async fn stats(&self) -> Result<StoreStats, ApiError> {
                self.store.stats().await
            }

            fn usage_replicas(&self) -> Vec<UsageReplica> {
                Vec::new()
            }
        }
    };
}

counted! {
    append: AppendRequest => AppendReply;
    pull: PullRequest => PullReply;
    touch: TouchRequest => ();
    register_group: RegisterGroupRequest => ();
    output_lengths: OutputLengthsRequest => OutputLengths;
    segments: SegmentsRequest => SegmentsReply;
    segment_piece: SegmentPieceRequest => SegmentPiece;
    documents: DocumentsRequest => DocumentsReply;
    unknown_documents: UnknownDocumentsRequest => UnknownDocumentsReply;
    acceptance_stats: AcceptanceStatsRequest => AcceptanceStatsReply;
    tenants: TenantsRequest => TenantsReply;
    change_tenant: TenantChange => TenantChangeReply;
}

/// The parts of a worker that store and follow outputs.
struct Worker {
    number: u128,
    signed: SignedNamespace,
    uploader: Uploader,
    replica: DraftReplica,
    namespace: Arc<NamespaceReplica>,
}

impl Worker {
    fn start(
        number: u128,
        signed: &SignedNamespace,
        store: &Arc<CountedStore>,
    ) -> anyhow::Result<Self> {
        let metrics = UploaderMetrics::register(Metrics::new()?.registry())?;
        let uploader = Uploader::start(UploaderConfig::default(), store.clone(), metrics);
        let metrics = ReplicaMetrics::register(Metrics::new()?.registry())?;
        let replica = DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), metrics);
        Ok(Worker {
            number,
            namespace: replica.namespace(signed.namespace.id(), signed),
            signed: signed.clone(),
            uploader,
            replica,
        })
    }

    /// Writes some outputs at once.
    async fn write(&self, round: u128, tokens: u32, pins: bool) {
        let documents = (0..AT_ONCE).map(|at| DocumentId(self.number << 64 | round << 32 | at));
        let documents: Vec<DocumentId> = documents.collect();
        let head = DocumentHead {
            created_ms: 1,
            left_context: vec![7; LEFT_CONTEXT_TOKENS],
            ..DocumentHead::default()
        };
        let mut step = tokio::time::interval(STEP);
        for position in 0..tokens {
            step.tick().await;
            for document in &documents {
                if position == 0 && pins {
                    self.namespace.pin(*document);
                }
                let token = [(document.0 as u32).wrapping_mul(31) ^ position];
                let update = DocumentUpdateRef {
                    document: *document,
                    epoch: 1,
                    prev_len: position,
                    tokens: &token,
                    head: &head,
                    finish: (position + 1 == tokens).then_some(FinishReason::Length),
                    trace: None,
                };
                self.namespace.merge(update);
                self.uploader.push(self.namespace.id, &self.signed, update);
            }
        }
        for document in documents {
            if pins {
                self.namespace.unpin(document);
            }
            self.uploader.release(self.namespace.id, document);
        }
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let count: u128 = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let tokens: u32 = arguments.next().map_or(Ok(400), |text| text.parse())?;
    let rounds: u128 = arguments.next().map_or(Ok(3), |text| text.parse())?;
    let pins = arguments.next().is_none_or(|text| text != "all");
    let mesh = e2e::HttpMesh::start_here(1, "").await?;
    let url = mesh.url(e2e::Service::DraftStore);
    let client = MeshClient::new(&url, &mesh.keys().secret, Duration::from_secs(15))?;
    let store = Arc::new(CountedStore {
        store: HttpDraftStore::new(client),
        counts: Mutex::default(),
    });
    let signed = NamespaceSigner::new(mesh.keys())?.sign(Namespace {
        tenant: "replication".into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    });
    let workers = (0..count).map(|number| Worker::start(number, &signed, &store));
    let workers: Vec<Worker> = workers.collect::<anyhow::Result<_>>()?;
    for round in 0..rounds {
        let written = workers.iter().map(|of| of.write(round, tokens, pins));
        futures_util::future::join_all(written).await;
    }
    let outputs = (count * AT_ONCE * rounds) as f64;
    let all = (u64::from(tokens) + LEFT_CONTEXT_TOKENS as u64) * outputs as u64;
    loop {
        let is_here = |of: &Worker| of.namespace.read().index().tokens() >= all;
        if workers.iter().all(is_here) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{count} workers, {outputs} outputs of {tokens} tokens; per output:");
    println!("call          calls  bytes sent  received");
    let mut sum = Count::default();
    for (name, of) in &*store.counts.lock() {
        let per = |value: u64| value as f64 / outputs;
        let (calls, sent, received) = (per(of.calls), per(of.sent), per(of.received));
        println!("{name:<12} {calls:>6.2}  {sent:>10.0}  {received:>8.0}");
        sum.calls += of.calls;
        sum.sent += of.sent;
        sum.received += of.received;
    }
    let per = |value: u64| value as f64 / outputs;
    let (calls, sent, received) = (per(sum.calls), per(sum.sent), per(sum.received));
    println!("all          {calls:>6.2}  {sent:>10.0}  {received:>8.0}");
    for worker in &workers {
        worker.replica.stop();
    }
    mesh.stop().await
}
