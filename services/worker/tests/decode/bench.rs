//! A worker over the fakes, its requests and their output.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::chunk::*;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, Namespace, RequestId, TokenId};
use refrain_rpc::testing::FakeStore;
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_worker::{Dependencies, WorkerConfig, WorkerEngine, start};

use crate::fakes::{FakeEngine, FakeScheduler, STOP, Target};

/// A worker over the fakes.
pub(crate) struct Bench<E = FakeEngine> {
    pub(crate) engine: Arc<E>,
    pub(crate) store: Arc<FakeStore>,
    pub(crate) scheduler: Arc<FakeScheduler>,
    pub(crate) worker: refrain_worker::WorkerServer,
    pub(crate) metrics: Metrics,
    pub(crate) signer: NamespaceSigner,
}

impl<E> Bench<E> {
    /// The value of a metric; 0 if the worker does not show it (yet).
    pub(crate) fn figure(&self, series: &str) -> f64 {
        let page = String::from_utf8(self.metrics.render()).unwrap();
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Number of such decisions of the router, with this reason.
    pub(crate) fn decisions(&self, decision: &str, reason: &str) -> f64 {
        self.figure(&format!(
            "refrain_spec_decisions_total{{decision=\"{decision}\",model=\"fake\",reason=\"{reason}\"}}"
        ))
    }
}

/// A target that repeats itself with a period of 12, with an occasional slip.
pub(crate) fn repetitive(text: &[TokenId]) -> TokenId {
    let at = text.len() as u32;
    if at.is_multiple_of(41) {
        500 + at % 7
    } else {
        1 + at % 12
    }
}

/// A target without long repetitions.
pub(crate) fn erratic(text: &[TokenId]) -> TokenId {
    let mut hash = 0xcbf2_9ce4u32;
    for token in &text[text.len().saturating_sub(3)..] {
        hash = (hash ^ token).wrapping_mul(0x0100_0193).rotate_left(9);
    }
    1 + hash % 9
}

/// A target without any repetition.
pub(crate) fn counting(text: &[TokenId]) -> TokenId {
    1 + text.len() as u32 % 990
}

/// A target that counts up and stops at a length of 40.
pub(crate) fn stopping(text: &[TokenId]) -> TokenId {
    if text.len() >= 40 {
        STOP
    } else {
        100 + text.len() as u32
    }
}

pub(crate) async fn bench(engine: FakeEngine, change: impl FnOnce(&mut WorkerConfig)) -> Bench {
    let engine = Arc::new(engine);
    let joined = WorkerEngine::Verifying(engine.clone());
    bench_with(engine, joined, change).await
}

/// A bench over a store that other workers use too.
pub(crate) async fn bench_on(
    store: Arc<FakeStore>,
    engine: FakeEngine,
    change: impl FnOnce(&mut WorkerConfig),
) -> Bench {
    let engine = Arc::new(engine);
    let joined = WorkerEngine::Verifying(engine.clone());
    start_bench(store, engine, joined, change).await
}

pub(crate) async fn bench_with<E>(
    engine: Arc<E>,
    joined: WorkerEngine,
    change: impl FnOnce(&mut WorkerConfig),
) -> Bench<E> {
    start_bench(Arc::new(FakeStore::default()), engine, joined, change).await
}

async fn start_bench<E>(
    store: Arc<FakeStore>,
    engine: Arc<E>,
    joined: WorkerEngine,
    change: impl FnOnce(&mut WorkerConfig),
) -> Bench<E> {
    let keys = MeshConfig::generate().unwrap();
    let mut config = WorkerConfig {
        step_tokens_max: 64,
        prefill_chunk_tokens: 8,
        running_max: 8,
        // The steps of a measurement would count as steps of requests.
        profile_ms_max: 0,
        // A stopping worker must not give up on a busy machine.
        store_grace_ms: 3_600_000,
        ..WorkerConfig::default()
    };
    config.uploader.interval_ms = 5;
    change(&mut config);
    let scheduler = Arc::new(FakeScheduler::default());
    let metrics = Metrics::new().unwrap();
    let with = Dependencies {
        engine: joined,
        scheduler: scheduler.clone(),
        store: store.clone(),
        auth: MeshAuth::new(&keys).unwrap(),
        metrics: metrics.clone(),
    };
    let worker = start(config, with).await.unwrap();
    Bench {
        engine,
        store,
        scheduler,
        worker,
        signer: NamespaceSigner::new(&keys).unwrap(),
        metrics,
    }
}

pub(crate) fn chunk<E>(bench: &Bench<E>, prompt: &[TokenId], max_new_tokens: u32) -> ChunkRequest {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = u128::from(NEXT.fetch_add(1, Ordering::Relaxed));
    let namespace = Namespace {
        tenant: "acme".into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    };
    ChunkRequest {
        alive_within_ms: None,
        resumes: None,
        expected_tokens: None,
        prediction: Vec::new(),
        transferred: false,
        drafts: DraftRules::default(),
        lease: LeaseId(number),
        epoch: 1,
        request: RequestId(number),
        namespace: bench.signer.sign(namespace),
        session: Some("s".into()),
        group: None,
        tokens: prompt.to_vec(),
        prompt_len: prompt.len() as u32,
        sampling: Sampling {
            stop_token_ids: vec![STOP],
            ..Sampling::default()
        },
        max_new_tokens,
        chunk_tokens: None,
        speculation: Speculation::Auto,
        urgency: Urgency::default(),
        budget: ChunkBudget {
            attempts: 3,
            time_left_ms: None,
        },
    }
}

/// Everything that a reader received of a chunk.
#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) steps: u64,
    pub(crate) retries: u32,
    pub(crate) held_ms: u64,
    /// The version of the weights that sampled each token.
    pub(crate) versions: Vec<u64>,
    pub(crate) accepted: u32,
    pub(crate) scopes: Vec<DraftScope>,
    pub(crate) sources: Vec<DraftSource>,
    pub(crate) end: Option<ChunkEnd>,
    pub(crate) error: Option<ApiError>,
}

pub(crate) async fn read(stream: ChunkStream) -> Received {
    let mut received = Received::default();
    read_on(stream, Some(0), &mut received).await;
    received
}

/// Reads the rest of a stream. `sequence` is the number of its next step, if it is known.
pub(crate) async fn read_on(
    mut stream: ChunkStream,
    mut sequence: Option<u64>,
    received: &mut Received,
) {
    while let Some(event) = stream.next().await {
        match event {
            Ok(ChunkEvent::Step(step)) => {
                let expected = sequence.unwrap_or(step.sequence);
                assert_eq!(step.sequence, expected, "a gap in the sequence");
                sequence = Some(expected + 1);
                received.steps += 1;
                let versions = step.tokens.iter().map(|_| step.weight_version);
                received.versions.extend(versions);
                received.accepted += step.accepted;
                received.scopes.push(step.scope);
                received.sources.push(step.source);
                received.tokens.extend(step.tokens);
            }
            Ok(ChunkEvent::Retry) => received.retries += 1,
            Ok(ChunkEvent::Held { ms }) => received.held_ms += ms,
            Ok(ChunkEvent::End(end)) => received.end = Some(end),
            Err(error) => received.error = Some(error),
        }
    }
}

pub(crate) async fn run<E>(bench: &Bench<E>, request: ChunkRequest) -> Received {
    read(bench.worker.handle().chunk(request).await.unwrap()).await
}

/// The output of the target alone, without drafts.
pub(crate) fn plainly(target: Target, prompt: &[TokenId], len: usize) -> Vec<TokenId> {
    let mut text = prompt.to_vec();
    while text.len() < prompt.len() + len {
        text.push(target(&text));
        if text.last() == Some(&STOP) {
            break;
        }
    }
    text[prompt.len()..].to_vec()
}

/// How long anything may take. Only a hang takes that long, also on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

/// Repeats a request until the worker has a free slot; a scheduler would wait for one.
pub(crate) async fn run_when_free(bench: &Bench, request: ChunkRequest) -> Received {
    loop {
        match bench.worker.handle().chunk(request.clone()).await {
            Ok(stream) => return read(stream).await,
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Overloaded);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}
