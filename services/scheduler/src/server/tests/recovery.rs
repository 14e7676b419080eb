//! Panics, silent workers, expired leases, drains and invalid configurations.

use super::*;

#[tokio::test]
async fn a_panic_fails_waiting_calls_and_heartbeats_refill_the_table() {
    let mesh = scheduler(false).await;
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

    // The worker still runs the chunk that was granted before, so the next call waits for its slot.
    handle.heartbeat(beat(vec![before.lease])).await.unwrap();
    let (after, ()) = tokio::join!(handle.lease(mesh.ask(2)), async {
        mesh.until(|state| state.queue_length == 1 && state.workers[0].foreign == 1)
            .await;
        handle.finish(done(before.lease)).await.unwrap();
    });
    assert!(after.unwrap().epoch > before.epoch);
}

#[tokio::test]
async fn a_silent_worker_is_forgotten_although_no_request_comes() {
    let worker_ttl_ms = 200;
    let mesh = scheduler_with(SchedulerConfig {
        worker_ttl_ms,
        lease_ttl_ms: worker_ttl_ms,
        heartbeat_repeat_ms: 0,
        ..SchedulerConfig::default()
    })
    .await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    // The tick that this heartbeat has set comes too early for the next one.
    tokio::time::sleep(Duration::from_millis(worker_ttl_ms / 2)).await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until_metric("refrain_scheduler_workers 0").await;
    // A worker that comes back is forgotten as well.
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until_metric("refrain_scheduler_workers 0").await;
}

#[tokio::test]
async fn a_workers_silence_grows_while_nothing_happens() {
    let mesh = scheduler(false).await;
    mesh.handle().heartbeat(beat(Vec::new())).await.unwrap();
    mesh.until(|state| state.workers[0].silent_ms >= 20).await;
}

#[tokio::test]
async fn a_lease_that_no_heartbeat_names_ends_before_its_worker_is_lost() {
    let mesh = scheduler_with(SchedulerConfig {
        heartbeat_interval_ms_max: 10,
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
async fn a_drain_refuses_waiting_and_new_calls() {
    let mesh = scheduler(true).await;
    let handle = mesh.handle();
    let http = mesh.http(&mesh.secret);
    let call = tokio::spawn({
        let ask = mesh.ask(1);
        async move { http.lease(ask).await }
    });
    mesh.until(|state| state.queue_length == 1).await;
    let ask = mesh.ask(2);
    mesh.server.drain(Duration::from_secs(5)).await;
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
async fn an_invalid_configuration_does_not_start() {
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
