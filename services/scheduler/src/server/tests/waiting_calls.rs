//! Calls that wait for a lease: dropped, hung up, long, and refused late.

use super::*;

#[tokio::test]
async fn a_dropped_call_leaves_the_queue() {
    let mesh = scheduler(false).await;
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
async fn a_grant_that_is_not_read_is_taken_back() {
    let mesh = scheduler(false).await;
    let handle = mesh.handle();
    handle.heartbeat(beat(Vec::new())).await.unwrap();
    let named = LeaseRequest {
        session: Some(SessionHash(1)),
        ..mesh.ask(1)
    };
    let first = handle.lease(named).await.unwrap();
    {
        // The only slot is taken, so one poll does no more than submit the call.
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
    assert!(mesh.metric("refrain_scheduler_sessions_tracked 1"));
}

#[tokio::test]
async fn a_caller_that_hangs_up_leaves_the_queue() {
    let mesh = scheduler(true).await;
    let http = mesh.http(&mesh.secret);
    let call = tokio::spawn({
        let ask = mesh.ask(1);
        async move { http.lease(ask).await }
    });
    mesh.until(|state| state.queue_length == 1).await;
    call.abort();
    mesh.until(|state| state.queue_length == 0).await;
    mesh.server.drain(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn a_call_that_waits_longer_than_the_silence_limit_stays_in_the_queue() {
    let mesh = scheduler(true).await;
    let scheduler = mesh.http(&mesh.secret);
    scheduler.heartbeat(beat(Vec::new())).await.unwrap();
    let held = scheduler.lease(mesh.ask(1)).await.unwrap();
    let began = std::time::Instant::now();
    let waiting = scheduler.lease(mesh.ask(2));
    tokio::pin!(waiting);
    // The client gives up a scheduler that sends nothing for four seconds.
    let early = tokio::time::timeout(Duration::from_secs(6), &mut waiting).await;
    assert!(early.is_err(), "{early:?} after {:?}", began.elapsed());
    mesh.until(|state| state.queue_length == 1).await;
    scheduler.finish(done(held.lease)).await.unwrap();
    let granted = waiting.await.unwrap();
    assert!(granted.epoch > held.epoch);
    scheduler.finish(done(granted.lease)).await.unwrap();
    mesh.until(|state| state.leases_running == 0).await;

    // A call that is dropped while line feeds arrive leaves the queue as well.
    let held = scheduler.lease(mesh.ask(3)).await.unwrap();
    let dropped = tokio::time::timeout(Duration::from_secs(2), scheduler.lease(mesh.ask(4))).await;
    assert!(dropped.is_err());
    mesh.until(|state| state.queue_length == 0).await;
    scheduler.finish(done(held.lease)).await.unwrap();
}

#[tokio::test]
async fn a_late_refusal_reaches_its_caller_after_the_status_was_sent() {
    let mesh = scheduler_with(SchedulerConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
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
async fn calls_to_a_stopped_scheduler_time_out() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stopped =
        HttpScheduler::new(MeshClient::new(&url, "secret", Duration::from_secs(3_600)).unwrap());
    let mesh = scheduler(false).await;
    // The system accepts the connections, and nobody reads them.
    let calls = async {
        let lease = stopped.lease(mesh.ask(1)).await.map(drop);
        [lease, stopped.finish(done(LeaseId(1))).await]
    };
    let outcomes = tokio::time::timeout(Duration::from_secs(60), calls).await;
    for outcome in outcomes.expect("a call has no deadline") {
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Timeout);
    }
}
