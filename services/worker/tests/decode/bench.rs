//! A worker over the fakes, what it is asked and what it says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::chunk::*;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, Namespace, RequestId, TokenId};
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_worker::{Dependencies, WorkerConfig, WorkerEngine, start};

use crate::fakes::{FakeEngine, FakeScheduler, FakeStore, STOP, Target};

/// A worker over the fakes.
pub(crate) struct Bench<E = FakeEngine> {
    pub(crate) engine: Arc<E>,
    pub(crate) store: Arc<FakeStore>,
    pub(crate) scheduler: Arc<FakeScheduler>,
    pub(crate) worker: refrain_worker::RunningWorker,
    pub(crate) metrics: Metrics,
    pub(crate) signer: NamespaceSigner,
}

impl<E> Bench<E> {
    /// A figure that the worker shows; 0 if it does not show it (yet).
    pub(crate) fn figure(&self, series: &str) -> f64 {
        let shown = String::from_utf8(self.metrics.render()).unwrap();
        let value = shown
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// How often the router decided so, for this reason.
    pub(crate) fn decisions(&self, decision: &str, reason: &str) -> f64 {
        self.figure(&format!(
            "refrain_spec_decisions_total{{decision=\"{decision}\",model=\"fake\",reason=\"{reason}\"}}"
        ))
    }
}

/// Repeats itself with a period of 12, with a slip now and then.
pub(crate) fn repetitive(text: &[TokenId]) -> TokenId {
    let at = text.len() as u32;
    if at.is_multiple_of(41) {
        500 + at % 7
    } else {
        1 + at % 12
    }
}

/// Never says the same thing twice in the same way.
pub(crate) fn erratic(text: &[TokenId]) -> TokenId {
    let mut hash = 0xcbf2_9ce4u32;
    for token in &text[text.len().saturating_sub(3)..] {
        hash = (hash ^ token).wrapping_mul(0x0100_0193).rotate_left(9);
    }
    1 + hash % 9
}

/// Says nothing twice.
pub(crate) fn counting(text: &[TokenId]) -> TokenId {
    1 + text.len() as u32 % 990
}

/// Counts up to 30 and stops.
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

/// The same over a store that others use, too.
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
        // Tests count steps.
        profile_ms_max: 0,
        // What a stopping worker waits for is certain to come, on a busy machine too.
        store_grace_ms: 3_600_000,
        ..WorkerConfig::default()
    };
    config.harvest.interval_ms = 5;
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
        prediction: Vec::new(),
        transferred: false,
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

/// Everything that a chunk streams.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) steps: u64,
    pub(crate) retries: u32,
    pub(crate) accepted: u32,
    pub(crate) scopes: Vec<DraftScope>,
    pub(crate) sources: Vec<DraftSource>,
    pub(crate) end: Option<ChunkEnd>,
    pub(crate) error: Option<ApiError>,
}

pub(crate) async fn read(mut stream: ChunkStream) -> Said {
    let mut said = Said::default();
    while let Some(event) = stream.next().await {
        match event {
            Ok(ChunkEvent::Step(step)) => {
                assert_eq!(step.sequence, said.steps, "a gap in the sequence");
                // 0: an engine that does not say.
                assert!([0, 3].contains(&step.weight_version));
                said.steps += 1;
                said.accepted += step.accepted;
                said.scopes.push(step.scope);
                said.sources.push(step.source);
                said.tokens.extend(step.tokens);
            }
            Ok(ChunkEvent::Retry) => said.retries += 1,
            Ok(ChunkEvent::End(end)) => said.end = Some(end),
            Err(error) => said.error = Some(error),
        }
    }
    said
}

pub(crate) async fn run<E>(bench: &Bench<E>, request: ChunkRequest) -> Said {
    read(bench.worker.handle().chunk(request).await.unwrap()).await
}

/// What the target alone would say.
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

pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

/// The worker refuses what it has no slot for; a scheduler would have waited.
pub(crate) async fn run_when_free(bench: &Bench, request: ChunkRequest) -> Said {
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
