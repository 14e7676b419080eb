//! Tests of histories, with a store that is a list of outputs.

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FinishReason, FollowReply,
    FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::segment::DocumentsReply;
use refrain_protocol::{ErrorKind, Namespace};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::Notify;

use super::*;
use crate::replica::DraftReplica;

const PROMPT: PromptHash = PromptHash(7);

/// A store that has outputs to one prompt, and nothing else.
#[derive(Default)]
struct OutputStore {
    outputs: Mutex<Vec<DocumentUpdate>>,
    calls: AtomicUsize,
    /// Answers wait for this, if there is one.
    gate: Option<Notify>,
    fails: bool,
}

#[async_trait]
impl DraftStore for OutputStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("not here"))
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        std::future::pending().await
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }

    async fn prompt_outputs(
        &self,
        request: PromptOutputsRequest,
    ) -> Result<DocumentsReply, ApiError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut outputs = self.outputs.lock().clone();
        if let Some(gate) = &self.gate {
            gate.notified().await;
        }
        if self.fails {
            return Err(ApiError::new(ErrorKind::Unavailable, "away"));
        }
        let is_known = request.prompt == PROMPT;
        outputs.retain(|_| is_known);
        outputs.truncate(request.max_outputs as usize);
        Ok(DocumentsReply {
            covered: outputs.len() as u32,
            updates: outputs,
        })
    }
}

fn output(document: u128, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len: 0,
        tokens: tokens.to_vec(),
        head: DocumentHead {
            left_context: vec![1, 2],
            prompt_hash: Some(PROMPT),
            ..DocumentHead::default()
        },
        finish: None,
    }
}

struct Bench {
    replica: DraftReplica,
    store: Arc<OutputStore>,
    signed: SignedNamespace,
    metrics: ReplicaMetrics,
}

fn bench(store: OutputStore, config: ReplicaConfig) -> Bench {
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let store = Arc::new(store);
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    Bench {
        replica: DraftReplica::new(config, 64, store.clone(), metrics.clone()),
        signed: signer.sign(Namespace {
            tenant: "t".into(),
            model: "m".into(),
            tokenizer: "k".into(),
        }),
        store,
        metrics,
    }
}

impl Bench {
    fn history(&self, prompt: PromptHash) -> Option<Arc<PromptHistory>> {
        let id = self.signed.namespace.id();
        self.replica.history(id, &self.signed, prompt)
    }

    /// Waits until so many calls had an outcome.
    async fn fetched(&self, outcome: &str, count: u64) {
        let fetches = &self.metrics.history_fetches;
        for _ in 0..120_000 {
            if fetches.with_label_values(&[outcome]).get() == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("no {count} calls were {outcome}");
    }
}

/// Tokens of the outputs, which have the numbers 1 to 3.
fn tokens(history: &PromptHistory) -> u64 {
    let index = history.read();
    let lengths = (1..4).filter_map(|document| index.len_of(DocumentId(document)));
    lengths.map(u64::from).sum()
}

#[tokio::test]
async fn requests_of_a_prompt_share_its_earlier_outputs_while_one_of_them_runs() {
    let store = OutputStore::default();
    // An output that was aborted is as good a draft as any other.
    let aborted = DocumentUpdate {
        finish: Some(FinishReason::Cancelled),
        ..output(1, &[5, 6, 8, 9])
    };
    *store.outputs.lock() = vec![output(2, &[5, 6, 7]), aborted];
    let bench = bench(store, ReplicaConfig::default());
    let (one, other) = (
        bench.history(PROMPT).unwrap(),
        bench.history(PROMPT).unwrap(),
    );
    assert!(Arc::ptr_eq(&one, &other));
    bench.fetched(FOUND, 1).await;
    assert_eq!((tokens(&one), one.read().index().documents()), (7, 2));
    drop(one);
    assert_eq!(bench.store.calls.load(Ordering::Relaxed), 1);
    drop(other);
    bench.replica.observe();
    assert_eq!(
        (
            bench.metrics.histories.get(),
            bench.metrics.history_tokens.get()
        ),
        (0, 0)
    );
    // The next epoch asks again, and finds what came since.
    bench.store.outputs.lock().insert(0, output(3, &[5]));
    let next = bench.history(PROMPT).unwrap();
    bench.fetched(FOUND, 2).await;
    assert_eq!(tokens(&next), 8);
    let unknown = bench.history(PromptHash(8)).unwrap();
    bench.fetched(NOTHING, 1).await;
    assert_eq!(tokens(&unknown), 0);
}

#[tokio::test]
async fn all_histories_together_have_a_limit_and_none_may_be_kept() {
    let store = OutputStore::default();
    *store.outputs.lock() = vec![output(1, &[5; 60])];
    let config = ReplicaConfig {
        histories_tokens_max: 100,
        ..ReplicaConfig::default()
    };
    let bench_of_some = bench(store, config.clone());
    let first = bench_of_some.history(PROMPT).unwrap();
    bench_of_some.fetched(FOUND, 1).await;
    let shared = &bench_of_some.replica.registry.shared;
    let other = NamespaceId(99);
    let (second, is_new) = shared.histories.of(other, PROMPT);
    assert!(is_new);
    let fetch = shared.histories.fetch(
        bench_of_some.signed.clone(),
        PROMPT,
        Arc::downgrade(&second),
    );
    fetch.await;
    bench_of_some.fetched(REFUSED, 1).await;
    assert_eq!((tokens(&first), tokens(&second)), (60, 0));
    drop(first);
    let (third, _) = shared.histories.of(NamespaceId(98), PROMPT);
    let fetch =
        shared
            .histories
            .fetch(bench_of_some.signed.clone(), PROMPT, Arc::downgrade(&third));
    fetch.await;
    assert_eq!(tokens(&third), 60);

    let off = ReplicaConfig {
        history_outputs_max: 0,
        ..config
    };
    let off = bench(OutputStore::default(), off);
    assert!(off.history(PROMPT).is_none());
    let failing = OutputStore {
        fails: true,
        ..OutputStore::default()
    };
    let failing = bench(failing, ReplicaConfig::default());
    let empty = failing.history(PROMPT).unwrap();
    failing.fetched(FAILED, 1).await;
    assert_eq!(tokens(&empty), 0);
}

#[tokio::test]
async fn a_removed_output_is_in_no_history_also_if_it_was_being_read() {
    let store = OutputStore {
        gate: Some(Notify::new()),
        ..OutputStore::default()
    };
    *store.outputs.lock() = vec![output(2, &[5, 6]), output(1, &[7])];
    let bench = bench(store, ReplicaConfig::default());
    let history = bench.history(PROMPT).unwrap();
    let calls = &bench.store.calls;
    while calls.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    // The answer was made before the removal, and comes after it.
    bench.store.outputs.lock().remove(0);
    let shared = &bench.replica.registry.shared;
    let id = bench.signed.namespace.id();
    shared.histories.remove(id, &[DocumentId(2)]);
    bench.store.gate.as_ref().unwrap().notify_one();
    while calls.load(Ordering::Relaxed) < 2 {
        tokio::task::yield_now().await;
    }
    bench.store.gate.as_ref().unwrap().notify_one();
    bench.fetched(FOUND, 1).await;
    assert_eq!(history.read().len_of(DocumentId(2)), None);
    assert_eq!(history.read().len_of(DocumentId(1)), Some(1));
    shared.histories.remove(NamespaceId(1), &[DocumentId(1)]);
    assert_eq!(tokens(&history), 1);
    shared.histories.remove(id, &[DocumentId(1)]);
    assert_eq!(tokens(&history), 0);
}
