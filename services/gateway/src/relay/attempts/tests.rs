//! Scripts of failures and the decisions after them.

use refrain_protocol::error::code;

use super::*;

fn error(kind: ErrorKind) -> ApiError {
    ApiError::new(kind, "x")
}

fn attempts() -> Attempts {
    Attempts::new(4, Duration::from_millis(50), Duration::from_secs(10))
}

fn pause_ms(decision: &Result<Duration, ApiError>) -> u128 {
    decision.as_ref().unwrap().as_millis()
}

fn granted() -> bool {
    true
}

fn worker(name: &str) -> WorkerId {
    WorkerId(name.into())
}

#[test]
fn a_full_queue_ends_a_request_only_before_its_first_token() {
    assert!(
        attempts()
            .lease_refused(error(ErrorKind::Overloaded), false, Instant::now())
            .is_err()
    );
    assert!(
        attempts()
            .lease_refused(error(ErrorKind::Overloaded), true, Instant::now())
            .is_ok()
    );
}

#[test]
fn a_mesh_without_workers_is_asked_once_more() {
    let mut attempts = attempts();
    let decision = attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now());
    assert!((50..=100).contains(&pause_ms(&decision)), "{decision:?}");
    assert!(
        attempts
            .lease_refused(error(ErrorKind::Unavailable), false, Instant::now())
            .is_err()
    );
}

#[test]
fn the_wait_for_an_absent_scheduler_costs_no_attempt() {
    let mut attempts = attempts();
    let start = Instant::now();
    let unavailable = || error(ErrorKind::Unavailable).with_code(code::SCHEDULER_UNAVAILABLE);
    let absent = [
        error(ErrorKind::Upstream),
        error(ErrorKind::Timeout),
        unavailable(),
        // An earlier call of the request has overtaken this one.
        error(ErrorKind::Conflict),
    ];
    for (second, error) in (0..9).zip(absent.iter().cycle()) {
        let now = start + Duration::from_secs(second);
        for has_output in [false, true] {
            let decision = attempts.lease_refused(error.clone(), has_output, now);
            assert!(decision.is_ok(), "after {second} s");
        }
    }
    assert_eq!(attempts.left(), 4);
    let late = start + Duration::from_secs(10);
    for kind in [ErrorKind::Upstream, ErrorKind::Conflict] {
        let decision = attempts.lease_refused(error(kind), true, late);
        let error = decision.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(error.code.as_deref(), Some(code::SCHEDULER_UNAVAILABLE));
        assert!(error.retry_after_ms.is_some());
    }
    // It came back and is absent again.
    attempts.leased(&worker("a"), 1);
    let decision = attempts.lease_refused(unavailable(), false, late);
    assert!(decision.is_ok());
}

#[test]
fn a_refused_signature_is_not_the_clients_fault() {
    for code in [code::CLOCK_SKEW, code::NAMESPACE_EXPIRED] {
        let refused = || {
            let why = "namespace refused: signed 7320 s ahead of this service's clock";
            ApiError::new(ErrorKind::Unauthorized, why).with_code(code)
        };
        let check = |decision: Result<Duration, ApiError>, service: &str| {
            let error = decision.unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable);
            assert_eq!(error.code.as_deref(), Some(code::CLOCK_SKEW));
            assert!(error.retry_after_ms.is_some());
            let detail = error.detail.unwrap();
            assert!(
                detail.starts_with(service) && detail.contains("7320 s"),
                "{detail}"
            );
        };
        check(
            attempts().lease_refused(refused(), false, Instant::now()),
            "the scheduler: ",
        );
        // Another worker's clock may be right, and no engine was asked.
        let mut attempts = attempts();
        let no_retry = || unreachable!("no engine was asked");
        for number in 0..3 {
            let worker = worker(&format!("w{number}"));
            let (outcome, decision) =
                attempts.chunk_failed(&worker, refused(), OutputSoFar::Nothing, no_retry);
            assert_eq!(outcome, LeaseOutcome::Continues);
            assert!(decision.is_ok());
            assert!(attempts.exclude().contains(&worker));
        }
        let last = attempts.chunk_failed(&worker("w3"), refused(), OutputSoFar::Nothing, no_retry);
        check(last.1, "worker w3: ");
    }
    // A wrong mesh secret is a fault of the mesh as well.
    let wrong_secret = || error(ErrorKind::Unauthorized);
    for decision in [
        attempts().lease_refused(wrong_secret(), false, Instant::now()),
        Attempts::new(1, Duration::ZERO, Duration::ZERO)
            .chunk_failed(&worker("a"), wrong_secret(), OutputSoFar::Nothing, granted)
            .1,
    ] {
        assert_eq!(decision.unwrap_err().kind, ErrorKind::Internal);
    }
}

#[test]
fn a_request_does_not_wait_for_a_second_slow_engine() {
    let slow = || error(ErrorKind::Timeout).with_code(code::ENGINE_TIMEOUT);
    let decision = |output| {
        attempts()
            .chunk_failed(&worker("a"), slow(), output, granted)
            .1
    };
    assert!(decision(OutputSoFar::Nothing).is_err());
    assert!(decision(OutputSoFar::EarlierChunks).is_err());
    assert!(decision(OutputSoFar::ThisChunk).is_ok());
}

#[test]
fn no_worker_is_to_blame_for_a_request_whose_time_is_up() {
    let timed_out = || error(ErrorKind::Timeout).with_code(code::REQUEST_TIMEOUT);
    for output in [
        OutputSoFar::Nothing,
        OutputSoFar::EarlierChunks,
        OutputSoFar::ThisChunk,
    ] {
        let mut attempts = attempts();
        let ended = attempts.chunk_failed(&worker("a"), timed_out(), output, granted);
        assert_eq!(ended, (LeaseOutcome::GivenUp, Err(timed_out())));
        assert!(attempts.exclude().is_empty(), "{output:?}");
    }
}

#[test]
fn failed_workers_are_excluded_until_nobody_else_is_there() {
    let mut attempts = attempts();
    let (outcome, decision) = attempts.chunk_failed(
        &worker("a"),
        error(ErrorKind::Upstream),
        OutputSoFar::Nothing,
        granted,
    );
    assert_eq!(outcome, LeaseOutcome::WorkerFailed);
    assert!((50..=100).contains(&pause_ms(&decision)), "{decision:?}");
    assert_eq!(attempts.exclude(), [worker("a")]);
    let decision = attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now());
    assert!((100..=200).contains(&pause_ms(&decision)), "{decision:?}");
    assert!(attempts.exclude().is_empty());
}

#[test]
fn failures_are_counted_in_a_row() {
    let mut attempts = attempts();
    for _ in 0..20 {
        let (_, decision) = attempts.chunk_failed(
            &worker("a"),
            error(ErrorKind::Timeout),
            OutputSoFar::ThisChunk,
            granted,
        );
        assert!(decision.is_ok());
    }
    let mut last = None;
    for _ in 0..3 {
        last = Some(
            attempts
                .chunk_failed(
                    &worker("b"),
                    error(ErrorKind::Timeout),
                    OutputSoFar::Nothing,
                    granted,
                )
                .1,
        );
    }
    assert!(last.unwrap().is_err());
}

#[test]
fn retries_need_the_budget_and_continuations_do_not() {
    let refused = || false;
    let no_retry = || unreachable!("an output is continued");
    let lost = || error(ErrorKind::Upstream);
    let mut attempts = attempts();
    for (failures, output) in [
        (1, OutputSoFar::ThisChunk),
        (2, OutputSoFar::EarlierChunks),
        (3, OutputSoFar::EarlierChunks),
        (4, OutputSoFar::EarlierChunks),
    ] {
        let decision = attempts
            .chunk_failed(&worker("a"), lost(), output, no_retry)
            .1;
        assert_eq!(decision.is_ok(), failures < 4);
    }
    let decision = self::attempts()
        .chunk_failed(&worker("b"), lost(), OutputSoFar::Nothing, refused)
        .1;
    assert_eq!(decision, Err(lost()));
}

#[test]
fn a_refusal_without_an_engine_does_not_draw_on_the_budget() {
    let no_retry = || unreachable!("no engine was asked");
    for refusal in [
        error(ErrorKind::Overloaded).with_code(code::WORKER_FULL),
        error(ErrorKind::Unavailable).with_code(code::DRAINING),
        error(ErrorKind::Unavailable).with_code(code::ENGINE_BREAKER_OPEN),
    ] {
        let mut attempts = attempts();
        let (outcome, decision) =
            attempts.chunk_failed(&worker("a"), refusal, OutputSoFar::Nothing, no_retry);
        assert_eq!(outcome, LeaseOutcome::Continues);
        assert!(decision.is_ok());
    }
    // An overloaded engine was asked.
    let full = || error(ErrorKind::Overloaded);
    let decision = attempts()
        .chunk_failed(&worker("a"), full(), OutputSoFar::Nothing, || false)
        .1;
    assert_eq!(decision, Err(full()));
}

#[test]
fn a_chunk_after_a_failed_one_is_known_as_such() {
    let mut attempts = attempts();
    let decision = attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now());
    assert!(decision.is_ok() && !attempts.is_after_failure());
    let lost = error(ErrorKind::Upstream);
    let decision = attempts
        .chunk_failed(&worker("a"), lost, OutputSoFar::Nothing, granted)
        .1;
    assert!(decision.is_ok() && attempts.is_after_failure());
    attempts.chunk_ended(&worker("b"), NextChunk::SameWorker);
    assert!(!attempts.is_after_failure());
}

#[test]
fn retries_of_a_worker_count_as_failures() {
    let mut attempts = attempts();
    assert_eq!(attempts.left(), 4);
    attempts.engine_retried();
    attempts.engine_retried();
    let lost = error(ErrorKind::Upstream);
    let decision = attempts
        .chunk_failed(&worker("a"), lost.clone(), OutputSoFar::Nothing, granted)
        .1;
    assert!(decision.is_ok());
    assert_eq!(attempts.left(), 1);
    // The budget is not asked for a retry that will not happen.
    let no_retry = || unreachable!("the last attempt has failed");
    let decision = attempts
        .chunk_failed(&worker("b"), lost.clone(), OutputSoFar::Nothing, no_retry)
        .1;
    assert_eq!(decision, Err(lost));
}

#[test]
fn an_invalid_request_is_not_tried_on_another_worker() {
    let (outcome, decision) = attempts().chunk_failed(
        &worker("a"),
        error(ErrorKind::InvalidRequest),
        OutputSoFar::Nothing,
        granted,
    );
    assert_eq!(outcome, LeaseOutcome::GivenUp);
    assert_eq!(decision.unwrap_err().kind, ErrorKind::InvalidRequest);
}

#[test]
fn the_last_worker_is_preferred_unless_it_drains() {
    let mut attempts = attempts();
    attempts.chunk_ended(&worker("a"), NextChunk::SameWorker);
    assert_eq!(attempts.prefer(), Some(&worker("a")));
    attempts.chunk_ended(&worker("a"), NextChunk::OtherWorker);
    assert_eq!(
        (attempts.prefer(), attempts.exclude()),
        (None, &[worker("a")][..])
    );
}

#[test]
fn the_client_never_hears_of_an_old_lease() {
    let stale = || error(ErrorKind::Conflict).with_code(code::STALE_EPOCH);
    let no_retry = || unreachable!("no engine was asked");
    let mut attempts = attempts();
    attempts.leased(&worker("a"), 7);
    for _ in 0..3 {
        let (outcome, decision) =
            attempts.chunk_failed(&worker("a"), stale(), OutputSoFar::Nothing, no_retry);
        assert_eq!(outcome, LeaseOutcome::Continues);
        assert!(decision.is_ok() && attempts.exclude().is_empty());
    }
    let last = attempts.chunk_failed(&worker("a"), stale(), OutputSoFar::Nothing, no_retry);
    let error = last.1.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.retry_after_ms.is_some());
    // The next lease has to be a newer one, whoever grants it.
    attempts.leased(&worker("b"), 5);
    assert_eq!(attempts.epoch_seen(), 7);
}

#[test]
fn a_request_is_transferred_once_and_not_tried_for_ever() {
    let mut attempts = attempts();
    attempts.chunk_ended(&worker("a"), NextChunk::Transfer(worker("b")));
    assert_eq!(attempts.prefer(), Some(&worker("b")));
    assert!(attempts.transfers_to_preferred() && !attempts.is_transferred());
    attempts.leased(&worker("b"), 1);
    assert!(!attempts.transfers_to_preferred() && attempts.is_transferred());

    let mut attempts = self::attempts();
    for sent in 0..TRANSFERS_MAX {
        assert!(!attempts.is_transferred(), "{sent} transfers");
        attempts.chunk_ended(&worker("a"), NextChunk::Transfer(worker("b")));
        // The target was full.
        attempts.leased(&worker("a"), 1);
    }
    assert!(attempts.is_transferred());
}

#[test]
fn pauses_grow_to_a_bound_and_are_at_least_the_hint() {
    let mut attempts = Attempts::new(100, Duration::from_millis(50), Duration::from_secs(10));
    let refused = |attempts: &mut Attempts, retry_after_ms: u64| {
        let hinted = error(ErrorKind::Overloaded).with_retry_after_ms(retry_after_ms);
        pause_ms(&attempts.lease_refused(hinted, true, Instant::now()))
    };
    assert_eq!(refused(&mut attempts, 700), 700);
    for _ in 0..40 {
        assert!(refused(&mut attempts, 0) <= 2_000);
    }
    assert!((1_000..=2_000).contains(&refused(&mut attempts, 0)));
    assert_eq!(refused(&mut attempts, 1_000_000), 2_000);
    // A chunk that ends shows progress, so pauses begin anew.
    attempts.chunk_ended(&worker("a"), NextChunk::SameWorker);
    assert!((50..=100).contains(&refused(&mut attempts, 0)));
}

#[test]
fn a_worker_that_cannot_be_reached_has_failed() {
    let refused = error(ErrorKind::Unavailable).with_code(code::SERVICE_UNREACHABLE);
    let mut attempts = attempts();
    let (outcome, decision) =
        attempts.chunk_failed(&worker("a"), refused, OutputSoFar::Nothing, granted);
    assert_eq!(outcome, LeaseOutcome::WorkerFailed);
    assert!(decision.is_ok());
    assert_eq!(attempts.exclude(), [worker("a")]);
}

#[test]
fn a_rollout_waits_for_a_worker_and_once_it_has_output_for_room() {
    let start = Instant::now();
    let late = start + Duration::from_secs(10);
    let no_worker = || error(ErrorKind::Unavailable).with_code("no_worker");
    let full = || error(ErrorKind::Overloaded).with_code("queue_full");
    for (refused, has_output) in [(no_worker(), false), (no_worker(), true), (full(), true)] {
        let mut attempts = attempts().patient(true);
        let failed = error(ErrorKind::Upstream);
        let ended =
            attempts.chunk_failed(&worker("a"), failed, OutputSoFar::EarlierChunks, granted);
        assert!(ended.1.is_ok() && !attempts.exclude().is_empty());
        let left = attempts.left();
        for second in 0..10 {
            let now = start + Duration::from_secs(second);
            let decision = attempts.lease_refused(refused.clone(), has_output, now);
            assert!(decision.is_ok(), "after {second} s");
        }
        // Waiting costs no attempt, and a worker that failed is better than none.
        assert_eq!(attempts.left(), left);
        assert!(attempts.exclude().is_empty());
        let decision = attempts.lease_refused(refused.clone(), has_output, late);
        assert_eq!(decision.unwrap_err(), refused);
    }
    let mut attempts = attempts().patient(true);
    let decision = attempts.lease_refused(full(), false, start);
    assert_eq!(decision.unwrap_err(), full());
}

#[test]
fn the_last_attempt_gives_a_request_up_that_no_worker_has_failed() {
    let mut attempts = attempts();
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        let full = error(ErrorKind::Overloaded).with_code(code::WORKER_FULL);
        let ended = attempts.chunk_failed(&worker("a"), full, OutputSoFar::Nothing, granted);
        outcomes.push((ended.0, ended.1.is_ok()));
    }
    let goes_on = (LeaseOutcome::Continues, true);
    let last = (LeaseOutcome::GivenUp, false);
    assert_eq!(outcomes, [goes_on, goes_on, goes_on, last]);
}
