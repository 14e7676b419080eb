//! Engines that register with a worker process: servers with canned responses.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, ReleaseRequest};
use refrain_protocol::engine_order::{EngineOrder, PauseMode};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::testing::FakeStore;
use refrain_rpc::{EngineAdopter, Workers};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::testing::byte_level_files;
use refrain_worker::{
    Adopter, AdopterDeps, AdopterServer, AdoptionConfig, ExpectedModel, WorkerConfig,
};

use crate::bench::{PATIENCE, eventually};
use crate::external::{Canned, json, sglang, vllm};
use crate::fakes::FakeScheduler;

/// A process that adopts engines.
pub(crate) struct Lab {
    pub(crate) scheduler: Arc<FakeScheduler>,
    pub(crate) metrics: Metrics,
    pub(crate) server: AdopterServer,
}

impl Lab {
    /// Starts it with a file of engines.
    fn start(file: Option<&Path>) -> Self {
        Lab::start_with(|adoption| adoption.file = file.map(Path::to_owned))
    }

    /// Starts it with a configuration that differs from that of other tests.
    pub(crate) fn start_with(change: impl FnOnce(&mut AdoptionConfig)) -> Self {
        let mut config = WorkerConfig {
            id: "w".into(),
            evacuate_after_ms: 100,
            ..WorkerConfig::default()
        };
        config.adoption.engines_max = 2;
        change(&mut config.adoption);
        config.engine.model = "public".into();
        config.engine.files = "unused".into();
        config.engine.call_ms_max = 60_000;
        let keys = MeshConfig::generate().unwrap();
        let scheduler = Arc::new(FakeScheduler::default());
        let metrics = Metrics::new().unwrap();
        let with = AdopterDeps {
            scheduler: scheduler.clone(),
            store: Arc::new(FakeStore::default()),
            auth: MeshAuth::new(&keys).unwrap(),
            metrics: metrics.clone(),
            expected: ExpectedModel {
                model: "public".into(),
                served_model: "m".into(),
                tokenizer: Arc::new(byte_level_files().tokenizer().unwrap()),
                max_context: Some(512),
            },
            client: MeshClient::new("", &keys.secret, PATIENCE).unwrap(),
        };
        Lab {
            scheduler,
            metrics,
            server: AdopterServer::start(config, with).unwrap(),
        }
    }

    pub(crate) fn adopter(&self) -> Adopter {
        self.server.adopter()
    }

    pub(crate) async fn adopt(
        &self,
        url: &str,
        pause: Option<PauseMode>,
    ) -> Result<AdoptedEngine, ApiError> {
        let url = url.to_owned();
        self.adopter().adopt(AdoptRequest { url, pause }).await
    }

    pub(crate) async fn release(&self, engine: &str) -> Result<AdoptedEngine, ApiError> {
        let engine = engine.to_owned();
        self.adopter().release(ReleaseRequest { engine }).await
    }

    pub(crate) async fn engines(&self) -> Vec<AdoptedEngine> {
        self.adopter().report().await.unwrap().engines
    }

    pub(crate) fn figure(&self, series: &str) -> Option<f64> {
        let page = String::from_utf8(self.metrics.render()).unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(series));
        line.and_then(|rest| rest.trim().parse().ok())
    }
}

/// An SGLang with weights of version 7.
async fn sglang_with_facts() -> Canned {
    let facts = json("{\"model_path\":\"/m\",\"is_generation\":true,\"weight_version\":\"7\"}");
    Canned::start(&[&sglang()[..], &[("/get_model_info", facts)]].concat()).await
}

#[tokio::test]
async fn each_engine_gets_a_worker_of_its_kind_with_a_name_and_metrics_of_its_own() {
    let lab = Lab::start(None);
    let one = sglang_with_facts().await;
    let other = vllm(&[("/version", json("{\"version\":\"0.32.0\"}"))]).await;
    let first = lab.adopt(one.url(), Some(PauseMode::Keep)).await.unwrap();
    assert_eq!(first.worker.0, format!("w@{}", first.id));
    assert_eq!((first.weight_version, &first.fault), (7, &None));
    let heartbeat = lab.scheduler.last.lock().unwrap().clone().unwrap();
    assert_eq!(heartbeat.worker, first.worker);
    // It is paused from its first report on.
    let state = heartbeat.state.unwrap();
    assert_eq!(
        (state.weight_version, state.pause),
        (7, Some(PauseMode::Keep))
    );
    let second = lab.adopt(other.url(), None).await.unwrap();
    assert_eq!((second.weight_version, lab.engines().await.len()), (0, 2));
    // A repeat is the same engine, and the table is full for others.
    let again = lab.adopt(&format!("{}/", one.url()), None).await.unwrap();
    assert_eq!(again.worker, first.worker);
    let error = lab.adopt("http://127.0.0.1:1", None).await.unwrap_err();
    assert!(error.has_code("engines_limit"), "{error}");
    for (worker, version) in [(&first.worker, 7.0), (&second.worker, 0.0)] {
        let series = format!("refrain_worker_weight_version{{worker=\"{worker}\"}}");
        assert_eq!(lab.figure(&series), Some(version));
    }
    // Leases name each by a URL of its own.
    let adopter = lab.adopter();
    let at = |engine: &AdoptedEngine| adopter.at(&format!("local:{}", engine.worker));
    let state = at(&first).order(EngineOrder::Report).await.unwrap().state;
    assert_eq!(state.pause, Some(PauseMode::Keep));
    let state = at(&second).order(EngineOrder::Report).await.unwrap().state;
    assert_eq!(state.pause, None);
    // One leaves: it says so in its last report, and nothing of it stays.
    lab.release(&first.id).await.unwrap();
    assert!(lab.figure("refrain_worker_adopted_engines") == Some(1.0));
    let series = format!(
        "refrain_worker_weight_version{{worker=\"{}\"}}",
        first.worker
    );
    assert_eq!(lab.figure(&series), None);
    let gone = at(&first).order(EngineOrder::Report).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::NotFound);
    assert_eq!(
        lab.release(&first.id).await.unwrap_err().kind,
        ErrorKind::NotFound
    );
    let count = |outcome: &str| {
        let series = format!("refrain_worker_adoptions_total{{outcome=\"{outcome}\"}}");
        lab.figure(&series).unwrap()
    };
    let counts = ["adopted", "repeated", "engines_max", "released"].map(count);
    assert_eq!(counts, [2.0, 1.0, 1.0, 1.0]);
    lab.server.drain().await;
}

#[tokio::test]
async fn a_worker_outlives_the_runtime_of_the_call_that_registered_its_engine() {
    let lab = Lab::start(None);
    let engine = sglang_with_facts().await;
    let (adopter, url) = (lab.adopter(), engine.url().to_owned());
    // As a thread of a listener, which ends before the workers do.
    let adopted = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(adopter.adopt(AdoptRequest { url, pause: None }))
    });
    let adopted = adopted.await.unwrap().unwrap();
    lab.scheduler.last.lock().unwrap().take();
    eventually("a heartbeat", || {
        lab.scheduler.last.lock().unwrap().is_some()
    })
    .await;
    let heartbeat = lab.scheduler.last.lock().unwrap().clone().unwrap();
    assert_eq!(heartbeat.worker, adopted.worker);
    lab.server.drain().await;
}

#[tokio::test]
async fn an_engine_that_leaves_says_so_in_its_last_report() {
    let lab = Lab::start(None);
    let engine = sglang_with_facts().await;
    lab.adopt(engine.url(), None).await.unwrap();
    let leaves = || {
        let last = lab.scheduler.last.lock().unwrap();
        last.as_ref().is_some_and(|heartbeat| heartbeat.leaves)
    };
    assert!(!leaves());
    lab.release(engine.url()).await.unwrap();
    assert!(leaves());
    lab.server.drain().await;
}

#[tokio::test]
async fn what_cannot_serve_is_refused_with_its_reason() {
    let lab = Lab::start(None);
    let nothing = Canned::start(&[("/health", json("{}"))]).await;
    let foreign = Canned::start(&[
        ("/health", json("{}")),
        ("/version", json("{\"version\":\"1\"}")),
        ("/v1/models", json("{\"data\":[{\"id\":\"other\"}]}")),
    ])
    .await;
    let spelling = vllm(&[("/version", json("{\"version\":\"1\"}"))]).await;
    spelling.set("/detokenize", json("{\"prompt\":\"something else\"}"));
    for (url, part) in [
        (nothing.url(), "neither SGLang nor vLLM"),
        (foreign.url(), "serves other, not m"),
        (spelling.url(), "another tokenizer"),
    ] {
        let error = lab.adopt(url, None).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{error}");
        assert!(error.message.contains(part), "{error}");
    }
    for url in ["http://10.0.0.1:1", "http://example.com"] {
        let error = lab.adopt(url, None).await.unwrap_err();
        assert!(error.has_code("host_not_allowed"), "{error}");
    }
    let error = lab.adopt("http://127.0.0.1:1", None).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    assert!(lab.engines().await.is_empty());
    let refused = lab.figure("refrain_worker_adoptions_total{outcome=\"refused\"}");
    assert_eq!(refused, Some(5.0));
    lab.server.drain().await;
}

#[tokio::test]
async fn a_process_that_starts_anew_knows_its_engines_and_forgets_those_that_changed() {
    let folder = std::env::temp_dir().join(format!("refrain-adoption-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("engines.json");
    let (stays, changes) = (sglang_with_facts().await, sglang_with_facts().await);
    let lab = Lab::start(Some(&file));
    lab.adopt(stays.url(), None).await.unwrap();
    lab.adopt(changes.url(), None).await.unwrap();
    lab.server.drain().await;
    let other = "{\"data\":[{\"id\":\"other\",\"max_model_len\":400}]}";
    changes.set("/v1/models", json(other));
    let lab = Lab::start(Some(&file));
    assert_eq!(lab.engines().await.len(), 2);
    let known = tokio::time::timeout(PATIENCE, async {
        loop {
            let engines = lab.engines().await;
            if engines.len() == 1 && engines[0].fault.is_none() {
                return engines;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let engines = known.await.expect("the changed engine is let go");
    assert_eq!((engines.len(), &*engines[0].url), (1, stays.url()));
    eventually("the file has the one that is left", || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.contains(stays.url()) && !text.contains(changes.url())
    })
    .await;
    lab.release(stays.url()).await.unwrap();
    lab.server.drain().await;
    assert!(Lab::start(Some(&file)).engines().await.is_empty());
    std::fs::remove_dir_all(&folder).unwrap();
}
