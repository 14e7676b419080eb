//! The shell: actor, handle and listener around the core.

use refrain_protocol::scheduling::{Heartbeat, LeaseFinish, LeaseOutcome, LeaseRequest};
use refrain_protocol::{ErrorKind, LeaseId, Namespace, RequestId, WorkerId};
use refrain_rpc::{HttpScheduler, Scheduler};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};

use super::*;
use crate::dispatch::DispatchState;

struct Mesh {
    running: Running,
    metrics: Metrics,
    secret: String,
    signer: NamespaceSigner,
}

async fn mesh(listens: bool) -> Mesh {
    mesh_with(SchedulerConfig {
        listen: listens.then(|| "127.0.0.1:0".parse().unwrap()),
        tick_ms: 10,
        // Nobody reports again: on a busy machine a test may take longer than a worker may be silent.
        worker_ttl_ms: 3_600_000,
        lease_ttl_ms: 3_600_000,
        ..SchedulerConfig::default()
    })
    .await
}

async fn mesh_with(config: SchedulerConfig) -> Mesh {
    let keys = MeshConfig::generate().unwrap();
    let auth = MeshAuth::new(&keys).unwrap();
    let metrics = Metrics::new().unwrap();
    let running = start(config, auth, &metrics).await.unwrap();
    Mesh {
        running,
        metrics,
        secret: keys.secret.clone(),
        signer: NamespaceSigner::new(&keys).unwrap(),
    }
}

impl Mesh {
    fn handle(&self) -> SchedulerHandle {
        self.running.handle()
    }

    fn http(&self, secret: &str) -> HttpScheduler {
        let base_url = format!("http://{}", self.running.addr().unwrap());
        HttpScheduler::new(MeshClient::new(&base_url, secret, Duration::from_secs(5)).unwrap())
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
            context_tokens: 10,
            generated_tokens: 0,
            max_new_tokens: 100,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        }
    }

    /// Waits until the dispatcher's state is as wanted.
    async fn until(&self, wanted: impl Fn(&DispatchState) -> bool) {
        for _ in 0..500 {
            if wanted(&self.handle().observe().await.unwrap()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never so: {:#?}", self.handle().observe().await);
    }

    /// Waits until a figure is so, and sends the dispatcher nothing meanwhile: each call would set its timer.
    async fn until_metric(&self, line: &str) {
        for _ in 0..3_000 {
            if self.metric(line) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never: {line}");
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
        worker: WorkerId("w".into()),
        incarnation: 1,
        url: "http://w:1".into(),
        model: "m".into(),
        tokenizer: "t".into(),
        max_context: 4096,
        max_running: 1,
        running,
        draining: false,
    }
}

fn done(lease: LeaseId) -> LeaseFinish {
    LeaseFinish {
        lease,
        outcome: LeaseOutcome::Done,
        emitted_tokens: 5,
        worker_ended_ms_ago: Some(0),
    }
}

/// The life of a lease, the same through either way in.
async fn a_lease_is_had_and_given_back(mesh: &Mesh, scheduler: &dyn Scheduler) {
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
    assert!(mesh.metric("refrain_scheduler_leases_total{outcome=\"done\"} 1"));
    assert!(mesh.metric("refrain_scheduler_leases_running 1"));
    assert!(mesh.metric("refrain_scheduler_workers 1"));
    assert!(mesh.metric("refrain_scheduler_lease_wait_seconds_count 2"));

    let mut forged = mesh.ask(3);
    forged.namespace.namespace.tenant = "other".into();
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
    let mesh = mesh(false).await;
    assert_eq!(mesh.running.addr(), None);
    a_lease_is_had_and_given_back(&mesh, &mesh.handle()).await;
}

#[tokio::test]
async fn over_http() {
    let mesh = mesh(true).await;
    a_lease_is_had_and_given_back(&mesh, &mesh.http(&mesh.secret)).await;
    let stranger = mesh.http("not the secret");
    assert_eq!(
        stranger.models().await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );
    assert_eq!(
        stranger.lease(mesh.ask(9)).await.unwrap_err().kind,
        ErrorKind::Unauthorized
    );

    let base_url = format!("http://{}", mesh.running.addr().unwrap());
    let client = MeshClient::new(&base_url, &mesh.secret, Duration::from_secs(5)).unwrap();
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

#[tokio::test]
async fn a_dropped_call_leaves_the_queue() {
    let mesh = mesh(false).await;
    let handle = mesh.handle();
    let call = tokio::spawn({
        let (handle, ask) = (handle.clone(), mesh.ask(1));
        async move { handle.lease(ask).await }
    });
    mesh.until(|state| state.queue_length == 1).await;
    call.abort();
    mesh.until(|state| state.queue_length == 0).await;
}

#[tokio::test]
async fn a_grant_that_nobody_reads_is_taken_back() {
    let mesh = mesh(false).await;
    let handle = mesh.handle();
    handle.heartbeat(beat(Vec::new())).await.unwrap();
    let first = handle.lease(mesh.ask(1)).await.unwrap();
    {
        // The slot is taken, so one poll submits the call and no more.
        let call = handle.lease(mesh.ask(2));
        tokio::pin!(call);
        assert!(futures_util::poll!(call.as_mut()).is_pending());
        mesh.until(|state| state.queue_length == 1).await;
        handle.finish(done(first.lease)).await.unwrap();
        mesh.until(|state| state.queue_length == 0).await;
        assert_eq!(handle.observe().await.unwrap().leases_running, 1);
    }
    mesh.until(|state| state.leases_running == 0).await;
    assert!(mesh.metric("refrain_scheduler_leases_total{outcome=\"undelivered\"} 1"));
}

#[tokio::test]
async fn a_caller_that_hangs_up_leaves_the_queue() {
    let mesh = mesh(true).await;
    let http = mesh.http(&mesh.secret);
    let call = tokio::spawn({
        let ask = mesh.ask(1);
        async move { http.lease(ask).await }
    });
    mesh.until(|state| state.queue_length == 1).await;
    call.abort();
    mesh.until(|state| state.queue_length == 0).await;
    mesh.running.drain(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_panic_fails_those_who_wait_and_heartbeats_refill_the_table() {
    let mesh = mesh(false).await;
    let handle = mesh.handle();
    handle.heartbeat(beat(Vec::new())).await.unwrap();
    let before = handle.lease(mesh.ask(1)).await.unwrap();
    let (waited, ()) = tokio::join!(handle.lease(mesh.ask(2)), async {
        mesh.until(|state| state.queue_length == 1).await;
        handle.panic();
    });
    let error = waited.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.retry_after_ms.is_some());
    assert!(mesh.metric("refrain_scheduler_actor_restarts_total 1"));
    assert!(mesh.metric("refrain_scheduler_rejections_total{limit=\"restarted\"} 1"));

    // The worker still runs the chunk granted before, so the next one waits for its slot.
    handle.heartbeat(beat(vec![before.lease])).await.unwrap();
    let (after, ()) = tokio::join!(handle.lease(mesh.ask(2)), async {
        mesh.until(|state| state.queue_length == 1 && state.workers[0].foreign == 1)
            .await;
        handle.finish(done(before.lease)).await.unwrap();
    });
    assert!(after.unwrap().epoch > before.epoch);
}

#[tokio::test]
async fn a_worker_that_falls_silent_is_forgotten_though_nobody_asks() {
    let worker_ttl_ms = 200;
    let mesh = mesh_with(SchedulerConfig {
        heartbeat_interval_ms: 10,
        lease_grace_ms: 20,
        worker_ttl_ms,
        lease_ttl_ms: worker_ttl_ms,
        ..SchedulerConfig::default()
    })
    .await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    // The tick that this one has set comes too early for the next.
    tokio::time::sleep(Duration::from_millis(worker_ttl_ms / 2)).await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until_metric("refrain_scheduler_workers 0").await;
    // And so is one that comes back.
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until_metric("refrain_scheduler_workers 0").await;
}

#[tokio::test]
async fn a_workers_silence_grows_though_nothing_happens() {
    let mesh = mesh(false).await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until(|state| state.workers[0].silent_ms >= 20).await;
}

#[tokio::test]
async fn a_lease_that_no_heartbeat_names_ends_before_its_worker_is_given_up() {
    let mesh = mesh_with(SchedulerConfig {
        heartbeat_interval_ms: 10,
        lease_grace_ms: 20,
        lease_ttl_ms: 50,
        worker_ttl_ms: 3_600_000,
        ..SchedulerConfig::default()
    })
    .await;
    let handle = mesh.handle();
    handle.heartbeat(beat(Vec::new())).await.unwrap();
    handle.lease(mesh.ask(1)).await.unwrap();
    mesh.until_metric("refrain_scheduler_leases_total{outcome=\"expired\"} 1")
        .await;
    assert!(mesh.metric("refrain_scheduler_workers 1"));
}

#[tokio::test]
async fn a_drain_sends_everybody_elsewhere() {
    let mesh = mesh(true).await;
    let handle = mesh.handle();
    let http = mesh.http(&mesh.secret);
    let call = tokio::spawn({
        let ask = mesh.ask(1);
        async move { http.lease(ask).await }
    });
    mesh.until(|state| state.queue_length == 1).await;
    let ask = mesh.ask(2);
    mesh.running.drain(Duration::from_secs(5)).await;
    assert_eq!(
        call.await.unwrap().unwrap_err().kind,
        ErrorKind::Unavailable
    );
    assert_eq!(
        handle.lease(ask).await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
    assert!(handle.readiness().is_err());
}

#[tokio::test]
async fn a_faulty_configuration_does_not_start() {
    let auth = MeshAuth::new(&MeshConfig::generate().unwrap()).unwrap();
    let config = SchedulerConfig {
        queue_max: 0,
        ..SchedulerConfig::default()
    };
    let error = start(config, auth, &Metrics::new().unwrap())
        .await
        .err()
        .unwrap();
    assert!(error.to_string().contains("queue_max"), "{error}");
}

#[tokio::test]
async fn a_call_that_waits_longer_than_silence_is_borne_keeps_its_place() {
    let mesh = mesh(true).await;
    let scheduler = mesh.http(&mesh.secret);
    scheduler.heartbeat(beat(Vec::new())).await.unwrap();
    let held = scheduler.lease(mesh.ask(1)).await.unwrap();
    let began = std::time::Instant::now();
    let waiting = scheduler.lease(mesh.ask(2));
    tokio::pin!(waiting);
    // A scheduler that says nothing for four seconds is given up.
    let early = tokio::time::timeout(Duration::from_secs(6), &mut waiting).await;
    assert!(early.is_err(), "{early:?} after {:?}", began.elapsed());
    mesh.until(|state| state.queue_length == 1).await;
    scheduler.finish(done(held.lease)).await.unwrap();
    let granted = waiting.await.unwrap();
    assert!(granted.epoch > held.epoch);
    scheduler.finish(done(granted.lease)).await.unwrap();
    mesh.until(|state| state.leases_running == 0).await;

    // One that is dropped while it is told so leaves the queue as well.
    let held = scheduler.lease(mesh.ask(3)).await.unwrap();
    let dropped = tokio::time::timeout(Duration::from_secs(2), scheduler.lease(mesh.ask(4))).await;
    assert!(dropped.is_err());
    mesh.until(|state| state.queue_length == 0).await;
    scheduler.finish(done(held.lease)).await.unwrap();
}

#[tokio::test]
async fn who_has_waited_in_vain_is_told_why_though_the_status_was_sent() {
    let mesh = mesh_with(SchedulerConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        tick_ms: 10,
        worker_wait_ms: 1_500,
        ..SchedulerConfig::default()
    })
    .await;
    let scheduler = mesh.http(&mesh.secret);
    let error = scheduler.lease(mesh.ask(1)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert_eq!(error.code.as_deref(), Some("no_worker"));
    assert_eq!(error.retry_after_ms, Some(1_500));
}

#[tokio::test]
async fn a_scheduler_that_has_stopped_is_not_waited_for() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let scheduler =
        HttpScheduler::new(MeshClient::new(&url, "secret", Duration::from_secs(3_600)).unwrap());
    let mesh = mesh(false).await;
    // Connections are taken by the system, and nobody reads them.
    let calls = async {
        let lease = scheduler.lease(mesh.ask(1)).await.map(drop);
        [lease, scheduler.finish(done(LeaseId(1))).await]
    };
    let outcomes = tokio::time::timeout(Duration::from_secs(60), calls).await;
    for outcome in outcomes.expect("a call has no deadline") {
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Timeout);
    }
}
