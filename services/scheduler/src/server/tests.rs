//! Tests of the shell: actor, handle and listener around the core.

use std::sync::Arc;

use refrain_protocol::scheduling::{
    Heartbeat, LeaseFinish, LeaseOutcome, LeaseRequest, SessionHash, TenantWeight,
};
use refrain_protocol::{ErrorKind, LeaseId, Namespace, RequestId, WorkerId};
use refrain_rpc::{HttpScheduler, Scheduler};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};

use super::*;
use crate::dispatch::DispatchState;

mod recovery;
mod waiting_calls;

/// A running scheduler with the keys of its mesh.
struct TestScheduler {
    server: SchedulerServer,
    metrics: Metrics,
    secret: String,
    signer: NamespaceSigner,
}

async fn scheduler(listens: bool) -> TestScheduler {
    scheduler_with(SchedulerConfig {
        listen: listens.then(|| "127.0.0.1:0".parse().unwrap()),
        // No test worker reports twice, and on a busy machine a test may take longer than the default limits.
        worker_ttl_ms: 3_600_000,
        lease_ttl_ms: 3_600_000,
        ..SchedulerConfig::default()
    })
    .await
}

async fn scheduler_with(config: SchedulerConfig) -> TestScheduler {
    let keys = MeshConfig::generate().unwrap();
    let auth = MeshAuth::new(&keys).unwrap();
    let metrics = Metrics::new().unwrap();
    let server = start(config, auth, &metrics).await.unwrap();
    TestScheduler {
        server,
        metrics,
        secret: keys.secret.clone(),
        signer: NamespaceSigner::new(&keys).unwrap(),
    }
}

impl TestScheduler {
    fn handle(&self) -> SchedulerHandle {
        self.server.handle()
    }

    fn http(&self, secret: &str) -> HttpScheduler {
        let base_url = format!("http://{}", self.server.addr().unwrap());
        HttpScheduler::new(MeshClient::new(&base_url, secret, Duration::from_secs(120)).unwrap())
    }

    fn ask(&self, request: u128) -> LeaseRequest {
        LeaseRequest {
            request: RequestId(request),
            namespace: self.signer.sign(Namespace {
                tenant: "acme".into(),
                model: "m".into(),
                tokenizer: "t".into(),
            }),
            group: None,
            session: None,
            class: Default::default(),
            weight: TenantWeight::default(),
            age_ms: 0,
            epoch_seen: 0,
            ended: None,
            expected_tokens: None,
            prefixes: Vec::new(),
            chunk_tokens: None,
            context_tokens: 10,
            generated_tokens: 0,
            max_new_tokens: 100,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        }
    }

    /// Waits until the dispatcher's state satisfies a condition.
    async fn until(&self, wanted: impl Fn(&DispatchState) -> bool) {
        for _ in 0..30_000 {
            if wanted(&self.handle().observe().await.unwrap()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the state never came: {:#?}", self.handle().observe().await);
    }

    /// Waits until the metrics contain a line. It sends the dispatcher no message, because each one sets its timer.
    async fn until_metric(&self, line: &str) {
        for _ in 0..30_000 {
            if self.metric(line) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the metrics never contained {line}");
    }

    fn metric(&self, line: &str) -> bool {
        String::from_utf8(self.metrics.render())
            .unwrap()
            .lines()
            .any(|have| have == line)
    }
}

fn beat(running: Vec<LeaseId>) -> Heartbeat {
    Heartbeat {
        eagle3: None,
        fallback: None,
        state: None,
        kv: None,
        worker: WorkerId("w".into()),
        incarnation: 1,
        url: "http://w:1".into(),
        model: "m".into(),
        tokenizer: "t".into(),
        max_context: 4096,
        max_running: 1,
        running,
        epoch_seen: 0,
        draining: false,
        trouble: None,
        leaves: false,
        compiles_forms: false,
    }
}

fn done(lease: LeaseId) -> LeaseFinish {
    LeaseFinish {
        lease,
        outcome: LeaseOutcome::Finished,
        emitted_tokens: 5,
        worker_ended_ms_ago: Some(0),
        cached_tokens: None,
        rejected_tokens: 0,
        accepted_tokens: 0,
    }
}

/// The life of a lease, which is the same through the handle and over HTTP.
async fn a_lease_is_granted_and_given_back(mesh: &TestScheduler, scheduler: &dyn Scheduler) {
    assert_eq!(
        scheduler
            .heartbeat(beat(Vec::new()))
            .await
            .unwrap()
            .next_in_ms,
        1_000
    );
    let models = scheduler.models().await.unwrap();
    assert_eq!(
        (
            models[0].model.as_str(),
            models[0].max_context,
            models[0].workers
        ),
        ("m", 4096, 1)
    );
    let lease = scheduler.lease(mesh.ask(1)).await.unwrap();
    let workers = scheduler.workers().await.unwrap();
    let [worker] = &workers[..] else {
        panic!("{workers:?}");
    };
    assert_eq!(
        (worker.worker.0.as_str(), &*worker.url),
        ("w", "http://w:1")
    );
    assert_eq!((worker.running, worker.max_running), (1, 1));
    assert!(!worker.draining && !worker.suspect);
    assert_eq!(
        (lease.worker.0.as_str(), lease.url.as_str()),
        ("w", "http://w:1")
    );

    let (second, ()) = tokio::join!(scheduler.lease(mesh.ask(2)), async {
        mesh.until(|state| state.queue_length == 1).await;
        scheduler.finish(done(lease.lease)).await.unwrap();
        scheduler.finish(done(lease.lease)).await.unwrap();
    });
    assert!(second.unwrap().epoch > lease.epoch);
    assert!(mesh.metric("refrain_scheduler_leases_total{outcome=\"finished\"} 1"));
    assert!(mesh.metric("refrain_scheduler_leases_running 1"));
    assert!(mesh.metric("refrain_scheduler_workers 1"));
    assert!(mesh.metric("refrain_scheduler_lease_wait_seconds_count 2"));

    let mut forged = mesh.ask(3);
    Arc::make_mut(&mut forged.namespace.namespace).tenant = "other".into();
    assert_eq!(
        scheduler.lease(forged).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    let mut broken = beat(Vec::new());
    broken.max_running = 0;
    assert_eq!(
        scheduler.heartbeat(broken).await.unwrap_err().kind,
        ErrorKind::InvalidRequest
    );
}

#[tokio::test]
async fn in_one_process() {
    let mesh = scheduler(false).await;
    assert_eq!(mesh.server.addr(), None);
    a_lease_is_granted_and_given_back(&mesh, &mesh.handle()).await;
}

#[tokio::test]
async fn over_http() {
    let mesh = scheduler(true).await;
    a_lease_is_granted_and_given_back(&mesh, &mesh.http(&mesh.secret)).await;
    let stranger = mesh.http("not the secret");
    assert_eq!(
        stranger.models().await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    assert_eq!(
        stranger.lease(mesh.ask(9)).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );

    let base_url = format!("http://{}", mesh.server.addr().unwrap());
    let client = MeshClient::new(&base_url, &mesh.secret, Duration::from_secs(120)).unwrap();
    let state: serde_json::Value = client.get_json("/debug/state").await.unwrap();
    assert_eq!(
        (&state["queue_length"], &state["leases_running"]),
        (&0.into(), &1.into())
    );
    let nonsense: Result<(), _> = client
        .post_json("/internal/v1/lease", &"nonsense", None)
        .await;
    assert_eq!(nonsense.unwrap_err().kind, ErrorKind::InvalidRequest);
}
