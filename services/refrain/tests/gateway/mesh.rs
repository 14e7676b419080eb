//! A scheduler and workers that follow a script, and a gateway in front of them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::unfold;
use refrain::gateway::GuestDeps;
use refrain_accounts::tenants::key::KeyConfig;
use refrain_gateway::{GatewayConfig, GatewayDeps, GatewayServer, GatewayTuning, ModelConfig};
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::chunk::{ChunkCut, ChunkRequest};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::error::code;
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel, WorkerDrain,
    WorkerReport,
};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, TenantId, TokenId, WorkerId};
use refrain_rpc::testing::{FakeStore, FakeTenants, StoreCall};
use refrain_rpc::{ChunkStream, MeshAdmin, Scheduler, UsageReplica, Worker, Workers};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::{Metrics, install_crypto_provider};
use refrain_tokenization::testing::{IM_END, byte_level_files};
use refrain_tokenization::{ModelFiles, Tokenizer};
use serde_json::Value;

use crate::adopters::adopters;
use crate::chunks::{events, resumed};
use crate::fleet::FakeFleet;
use crate::series::sum_of_series;
use crate::usage_store::FakeUsage;

/// A planned failure of a chunk. The number is that of the steps before it.
#[derive(Clone, Debug)]
pub(crate) enum Mishap {
    /// The chunk is refused.
    Refuse(ErrorKind),
    /// The stream ends without an `End`.
    Lose(usize),
    /// The stream ends with an error.
    Fail(usize, ErrorKind),
    /// The engine cannot hold the output to its form.
    FailForm(usize),
    /// A step is left out.
    Skip(usize),
    /// The worker drains.
    Drain(usize),
    /// The chunk gives way to others.
    GiveWay(usize),
    /// The worker transfers the request to w1.
    Transfer(usize),
    /// The worker falls silent.
    Hang(usize),
    /// The worker aborts the request.
    Abort(usize),
    /// The worker refuses a cut.
    RefuseCut,
}

/// The behaviour of the scheduler, the workers and the draft store.
pub(crate) struct Script {
    /// The output of every choice.
    pub(crate) reply: Vec<TokenId>,
    /// Tokens per step.
    pub(crate) step_tokens: usize,
    /// Versions of the weights by step; the last one is that of all further steps.
    pub(crate) versions: Vec<u64>,
    /// Pause before each step.
    pub(crate) step_pause: Duration,
    /// Planned failures by the number of the lease, from 0.
    pub(crate) mishaps: HashMap<usize, Mishap>,
    /// Errors of calls for a lease, in order, before any is granted.
    pub(crate) lease_errors: VecDeque<ApiError>,
    /// Errors of calls for a lease by the number of the call, from 0.
    pub(crate) refused_calls: HashMap<usize, ApiError>,
    /// No call for a lease from this number on is answered.
    pub(crate) silent_from_call: usize,
    /// Most tokens of a chunk by the scheduler. `None`: what the request asks for.
    pub(crate) lease_chunk_tokens: Option<u32>,
    /// The workers forget what they parked between two chunks.
    pub(crate) forgets: bool,
    /// Number of workers in the answers of the scheduler.
    pub(crate) workers: u32,
    /// Whether the engines of the workers compile forms by the grammars of this project.
    pub(crate) compiles_forms: bool,
}

impl Script {
    /// The version of the weights in a step.
    pub(crate) fn version_at(&self, step: usize) -> u64 {
        let versions = &self.versions;
        let version = versions.get(step).or(versions.last());
        version.copied().unwrap_or(7)
    }
}

/// The calls to the scheduler, the workers and the draft store.
#[derive(Default)]
pub(crate) struct Log {
    /// Number of calls for a lease.
    pub(crate) lease_calls: usize,
    /// The calls that were granted.
    pub(crate) leases: Vec<LeaseRequest>,
    /// The ends of leases, by calls of their own and by calls for the next lease.
    pub(crate) finishes: Vec<LeaseFinish>,
    pub(crate) chunks: Vec<ChunkRequest>,
    pub(crate) cuts: Vec<ChunkCut>,
    /// Number of context tokens that were sent to workers.
    pub(crate) context_tokens: usize,
    /// Number of chunks whose context was no longer parked.
    pub(crate) gone: usize,
    /// Number of questions for the models.
    pub(crate) polls: usize,
    /// Orders of operators to workers.
    pub(crate) drains: Vec<bool>,
    /// Erasures in the draft store.
    pub(crate) erasures: Vec<EraseRequest>,
    /// Tenants that engines were told to forget, by the URL of the worker.
    pub(crate) forgotten: Vec<(String, TenantId)>,
    workers: Vec<WorkerId>,
}

/// The mesh behind the gateway under test.
pub(crate) struct FakeMesh {
    script: Mutex<Script>,
    log: Mutex<Log>,
    /// Streams that are open now.
    open: Arc<AtomicI64>,
    /// Streams that hang, and whose events before that have been read.
    hanging: AtomicI64,
    pub(crate) auth: MeshAuth,
    pub(crate) store: Arc<FakeStore>,
    tokenizer: Tokenizer,
    pub(crate) usage: Arc<FakeUsage>,
    pub(crate) fleet: FakeFleet,
}

impl FakeMesh {
    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap()
    }

    /// Makes `text` and its end token the output of every choice.
    pub(crate) fn reply(&self, text: &str) {
        let mut reply = self.tokenizer.encode(text).unwrap();
        reply.push(IM_END);
        self.script().reply = reply;
    }

    pub(crate) fn mishap(&self, lease: usize, mishap: Mishap) {
        self.script().mishaps.insert(lease, mishap);
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Waits until every lease is given back and no stream is open.
    pub(crate) async fn settled(&self) {
        let leases = || {
            let log = self.log();
            (log.workers.len(), log.finishes.len())
        };
        eventually("every lease is given back", async || {
            let (granted, finished) = leases();
            granted == finished && self.open.load(Ordering::SeqCst) == 0
        })
        .await;
        // If a lease were given back twice, the second call would come now.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (granted, finished) = leases();
        assert_eq!(finished, granted, "a lease was given back twice");
    }

    /// Waits until `count` streams are open.
    pub(crate) async fn wait_for_streams(&self, count: i64) {
        eventually("so many streams are open", async || {
            self.open.load(Ordering::SeqCst) == count
        })
        .await;
    }

    /// Waits until `count` streams have hung so far. The gateway has read what they brought.
    pub(crate) async fn wait_for_hanging(&self, count: i64) {
        eventually("so many streams hang", async || {
            self.hanging.load(Ordering::SeqCst) == count
        })
        .await;
    }
}

#[async_trait]
impl Scheduler for FakeMesh {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        self.auth.verify(&request.namespace)?;
        let call = {
            let mut log = self.log();
            log.lease_calls += 1;
            log.lease_calls - 1
        };
        let (never, error) = {
            let mut script = self.script();
            let error = script.refused_calls.remove(&call);
            let error = error.or_else(|| script.lease_errors.pop_front());
            (call >= script.silent_from_call, error)
        };
        if never {
            std::future::pending::<()>().await;
        }
        if let Some(error) = error {
            return Err(error);
        }
        let mut log = self.log();
        let names = ["w0", "w1", "w2"].map(|name| WorkerId(name.to_owned()));
        let free = names.iter().find(|name| !request.exclude.contains(name));
        let worker = request
            .prefer
            .clone()
            .or_else(|| free.cloned())
            .ok_or_else(|| ApiError::new(ErrorKind::Unavailable, "no worker serves this model"))?;
        let number = log.workers.len();
        let chunk_tokens = self.script().lease_chunk_tokens.or(request.chunk_tokens);
        log.finishes.extend(request.ended.clone());
        log.leases.push(request);
        log.workers.push(worker.clone());
        let url = format!("http://{worker}");
        Ok(Lease {
            lease: LeaseId(number as u128),
            epoch: 10 + number as u64,
            worker,
            url,
            ttl_ms: 1000,
            chunk_tokens,
        })
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        self.log().finishes.push(finish);
        Ok(())
    }

    async fn heartbeat(&self, _: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        Err(ApiError::internal("not in this test"))
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        let tokenizer = self.tokenizer.identity().to_owned();
        self.log().polls += 1;
        let script = self.script();
        Ok(vec![ServedModel {
            model: "tiny".into(),
            tokenizer,
            max_context: 256,
            workers: script.workers,
            open: None,
            trouble: None,
            compiles_forms: script.compiles_forms,
        }])
    }

    async fn workers(&self) -> Result<Vec<WorkerReport>, ApiError> {
        Ok(self.fleet.reports(self.log().drains.last() == Some(&true)))
    }
}

/// A worker with its URL.
struct FakeWorker(Arc<FakeMesh>, String);

/// Finds the workers of a mesh.
pub(crate) struct FakeWorkers(pub(crate) Arc<FakeMesh>);

impl Workers for FakeWorkers {
    fn at(&self, url: &str) -> Arc<dyn Worker> {
        Arc::new(FakeWorker(self.0.clone(), url.to_owned()))
    }
}

/// Counts an open stream until it is dropped.
struct Open(Arc<AtomicI64>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Worker for FakeWorker {
    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let told = (self.1.clone(), order.tenant);
        self.0.log().forgotten.push(told);
        Ok(TenantForgotten {
            sessions: 1,
            memory_blocks: 5,
            file_blocks: 4,
            running: 0,
        })
    }

    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError> {
        let mesh = &self.0;
        mesh.auth.verify(&request.namespace)?;
        let request = {
            let mut log = mesh.log();
            log.context_tokens += request.tokens.len();
            let request = match request.resumes {
                None => request,
                Some(_) if mesh.script().forgets => {
                    log.gone += 1;
                    let error = ApiError::new(ErrorKind::NotFound, "forgotten by script");
                    return Err(error.with_code(code::CONTEXT_GONE));
                }
                Some(parked) => {
                    let mut chunks = log.chunks.iter().rev();
                    let last = chunks.find(|last| last.request == request.request);
                    resumed(
                        &mesh.script(),
                        request,
                        parked,
                        last.expect("a chunk before"),
                    )
                }
            };
            log.chunks.push(request.clone());
            request
        };
        let (mishap, pause, events) = {
            let script = mesh.script();
            let mishap = script.mishaps.get(&(request.lease.0 as usize)).cloned();
            if let Some(Mishap::Refuse(kind)) = mishap {
                return Err(ApiError::new(kind, "refused by script"));
            }
            (
                mishap.clone(),
                script.step_pause,
                events(&script, &request, mishap.as_ref()),
            )
        };
        mesh.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(mesh.open.clone());
        let hang = matches!(mishap, Some(Mishap::Hang(_)));
        let state = (events, open, self.0.clone());
        Ok(unfold(state, move |(mut events, open, mesh)| async move {
            tokio::time::sleep(pause).await;
            mesh.fleet.until_it_works().await;
            match events.pop_front() {
                Some(event) => Some((event, (events, open, mesh))),
                None if hang => {
                    mesh.hanging.fetch_add(1, Ordering::SeqCst);
                    std::future::pending().await
                }
                None => None,
            }
        })
        .boxed())
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        self.0.fleet.order(&self.1, order)
    }

    async fn drain(&self, order: WorkerDrain) -> Result<(), ApiError> {
        self.0.log().drains.push(order.drains);
        Ok(())
    }

    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError> {
        assert!(
            self.0.open.load(Ordering::SeqCst) > 0,
            "the stream was let go before the cut"
        );
        let mishap = self
            .0
            .script()
            .mishaps
            .get(&(cut.lease.0 as usize))
            .cloned();
        self.0.log().cuts.push(cut);
        match mishap {
            Some(Mishap::RefuseCut) => Err(ApiError::new(ErrorKind::NotFound, "refused by script")),
            _ => Ok(()),
        }
    }
}

/// A gateway, the mesh behind it and a client in front of it.
pub(crate) struct Bench {
    pub(crate) mesh: Arc<FakeMesh>,
    pub(crate) gateway: GatewayServer,
    pub(crate) client: reqwest::Client,
    pub(crate) url: String,
    pub(crate) metrics: Metrics,
}

/// How long anything may take. Only a hang takes that long, also on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Waits until a condition holds. Gateways have threads of their own, so a paused clock cannot help.
pub(crate) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waits = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, waits).await;
    assert!(waited.is_ok(), "never: {what}");
}

/// The usual configuration of these tests.
pub(crate) fn config() -> GatewayConfig {
    GatewayConfig {
        listen: "127.0.0.1:0".into(),
        threads: 1,
        keys: vec![
            KeyConfig {
                key: Some("sk-acme".into()),
                key_sha256: None,
                tenant: "acme".parse().unwrap(),
            },
            KeyConfig {
                key: Some("sk-bolt".into()),
                key_sha256: None,
                tenant: "bolt".parse().unwrap(),
            },
        ],
        models: vec![ModelConfig {
            id: "tiny".into(),
            files: "test".into(),
            ..ModelConfig::default()
        }],
        tuning: GatewayTuning {
            retry_backoff: Duration::from_millis(1),
            ..GatewayTuning::default()
        },
        ..GatewayConfig::default()
    }
}

/// The model files of which the template shows tools.
pub(crate) const WITH_TOOLS: &str = "with tools";

fn files(name: &str) -> ModelFiles {
    let mut files = byte_level_files();
    if name == WITH_TOOLS {
        let template = files.chat_template.unwrap_or_default();
        let tools = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}";
        files.chat_template = Some([tools.as_bytes(), &template].concat());
    }
    files
}

/// The usual configuration with other fixed values.
pub(crate) fn tuned(tune: impl FnOnce(&mut GatewayTuning)) -> GatewayConfig {
    let mut config = config();
    tune(&mut config.tuning);
    config
}

impl Bench {
    pub(crate) async fn new() -> Self {
        Bench::with(config()).await
    }

    pub(crate) async fn with(config: GatewayConfig) -> Self {
        Bench::start(config, FakeTenants::default()).await.unwrap()
    }

    /// Starts with these tenants in the draft store.
    pub(crate) async fn start(config: GatewayConfig, tenants: FakeTenants) -> anyhow::Result<Self> {
        Bench::beside(config, tenants, FakeUsage::default()).await
    }

    /// Starts with this usage in the draft store as well.
    pub(crate) async fn beside(
        config: GatewayConfig,
        tenants: FakeTenants,
        usage: FakeUsage,
    ) -> anyhow::Result<Self> {
        install_crypto_provider();
        let keys = MeshConfig::generate().unwrap();
        let usage = Arc::new(usage);
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let script = Script {
            reply: Vec::new(),
            step_tokens: 3,
            versions: vec![7],
            step_pause: Duration::ZERO,
            mishaps: HashMap::new(),
            lease_errors: VecDeque::new(),
            refused_calls: HashMap::new(),
            silent_from_call: usize::MAX,
            lease_chunk_tokens: None,
            forgets: false,
            workers: 3,
            compiles_forms: false,
        };
        let mesh = Arc::new(FakeMesh {
            script: Mutex::new(script),
            log: Mutex::default(),
            open: Arc::default(),
            hanging: AtomicI64::new(0),
            auth: MeshAuth::new(&keys).unwrap(),
            store: store(tenants, usage.clone(), MeshAuth::new(&keys).unwrap()),
            tokenizer,
            usage,
            fleet: FakeFleet::default(),
        });
        mesh.reply("hello world, this is the answer");
        let metrics = Metrics::new().unwrap();
        let deps = GatewayDeps {
            scheduler: mesh.clone(),
            workers: Arc::new(FakeWorkers(mesh.clone())),
            store: mesh.store.clone(),
            signer: NamespaceSigner::new(&keys).unwrap(),
            model_files: Arc::new(|name| Ok(files(name))),
            metrics: metrics.clone(),
            clocks: Clocks::default(),
            adopts_engines: !config.trainer.adopters.is_empty(),
        };
        let guests = GuestDeps {
            mesh: MeshAdmin {
                store: mesh.clone(),
                usage: mesh.store.clone(),
                workers: Arc::new(FakeWorkers(mesh.clone())),
                metrics: None,
            },
            adopters: adopters(&config.trainer.adopters, &mesh),
        };
        let gateway = refrain::gateway::start(config, deps, guests).await?;
        let url = format!("http://{}", gateway.addr());
        Ok(Bench {
            mesh,
            gateway,
            client: reqwest::Client::new(),
            url,
            metrics,
        })
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client
            .post(format!("{}{path}", self.url))
            .bearer_auth("sk-acme")
            .json(body)
    }

    /// Posts and reads JSON.
    pub(crate) async fn json(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.post(path, body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Sends a chat with one user message and some more fields.
    pub(crate) async fn chat(&self, fields: Value) -> (u16, Value) {
        self.json("/v1/chat/completions", &chat(fields)).await
    }

    /// The events of a stream: the JSON of each, and whether `[DONE]` came last.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> (Vec<Value>, bool) {
        let response = self.post(path, body).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(
            response.headers()["content-type"]
                .to_str()
                .unwrap()
                .starts_with("text/event-stream")
        );
        let text = response.text().await.unwrap();
        let mut events = Vec::new();
        let mut done = false;
        for frame in text
            .split("\n\n")
            .filter(|frame| !frame.is_empty() && !frame.starts_with(':'))
        {
            let data = frame.strip_prefix("data: ").unwrap();
            assert!(!done, "something after [DONE]");
            if data == "[DONE]" {
                done = true;
            } else {
                events.push(serde_json::from_str(data).unwrap());
            }
        }
        (events, done)
    }

    /// The sum of the series of a metric that have these labels: `name{label="value"}`.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        sum_of_series(&String::from_utf8(self.metrics.render()).unwrap(), series)
    }
}

/// A draft store that checks signatures of namespaces.
fn store(tenants: FakeTenants, usage: Arc<FakeUsage>, auth: MeshAuth) -> Arc<FakeStore> {
    let store = FakeStore::default();
    store.set_hook(move |call| {
        let namespace = match call {
            StoreCall::RegisterGroup(request) => Some(&request.namespace),
            StoreCall::OutputLengths(request) => Some(&request.namespace),
            _ => None,
        };
        let verified = namespace.map_or(Ok(()), |namespace| auth.verify(namespace).map(|_| ()));
        std::future::ready(verified)
    });
    let mut content = store.content();
    content.tenants = tenants;
    content.usage = vec![UsageReplica {
        name: "fake".to_owned(),
        store: usage,
    }];
    drop(content);
    Arc::new(store)
}

/// The error of a gateway that does not start.
pub(crate) async fn start_error(config: GatewayConfig) -> String {
    let started = Bench::start(config, FakeTenants::default()).await;
    format!("{:#}", started.err().unwrap())
}

/// A chat request with one user message and some more fields.
pub(crate) fn chat(fields: Value) -> Value {
    let messages = serde_json::json!([{"role": "user", "content": "hi"}]);
    let mut body = serde_json::json!({"model": "tiny", "messages": messages});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}
