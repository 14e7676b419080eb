//! Failures and what follows from them.

use refrain_protocol::error::code;

use super::*;

fn error(kind: ErrorKind) -> ApiError {
    ApiError::new(kind, "x")
}

fn attempts() -> Attempts {
    Attempts::new(4, Duration::from_millis(50), Duration::from_secs(10))
}

fn granted() -> bool {
    true
}

fn worker(name: &str) -> WorkerId {
    WorkerId(name.into())
}

#[test]
fn a_full_queue_is_the_clients_to_know_before_its_first_token_only() {
    assert!(matches!(
        attempts().lease_refused(error(ErrorKind::Overloaded), false, Instant::now()),
        Verdict::GiveUp(_)
    ));
    assert!(matches!(
        attempts().lease_refused(error(ErrorKind::Overloaded), true, Instant::now()),
        Verdict::Again(_)
    ));
}

#[test]
fn a_mesh_without_workers_is_asked_once_more() {
    let mut attempts = attempts();
    assert_eq!(
        attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now()),
        Verdict::Again(Duration::from_millis(50))
    );
    assert!(matches!(
        attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now()),
        Verdict::GiveUp(_)
    ));
}

#[test]
fn a_scheduler_that_is_away_is_waited_for_and_costs_no_attempt() {
    let mut attempts = attempts();
    let start = Instant::now();
    let gone = || error(ErrorKind::Unavailable).with_code(code::SCHEDULER_UNAVAILABLE);
    let away = [
        error(ErrorKind::Upstream),
        error(ErrorKind::Timeout),
        gone(),
    ];
    for (second, error) in (0..9).zip(away.iter().cycle()) {
        let now = start + Duration::from_secs(second);
        for has_output in [false, true] {
            let verdict = attempts.lease_refused(error.clone(), has_output, now);
            assert!(matches!(verdict, Verdict::Again(_)), "after {second} s");
        }
    }
    assert_eq!(attempts.left(), 4);
    let late = start + Duration::from_secs(10);
    let verdict = attempts.lease_refused(error(ErrorKind::Upstream), true, late);
    let Verdict::GiveUp(error) = verdict else {
        panic!("{verdict:?}");
    };
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert_eq!(error.code.as_deref(), Some(code::SCHEDULER_UNAVAILABLE));
    assert!(error.retry_after_ms.is_some());
    // It came back, and is away again.
    attempts.leased(&worker("a"));
    let verdict = attempts.lease_refused(gone(), false, late);
    assert!(matches!(verdict, Verdict::Again(_)));
}

#[test]
fn clients_are_not_told_that_they_are_strangers_where_clocks_differ() {
    for code in [code::CLOCK_SKEW, code::NAMESPACE_EXPIRED] {
        let refused = || {
            let why = "namespace refused: signed 7320 s ahead of this service's clock";
            ApiError::new(ErrorKind::Unauthorized, why).with_code(code)
        };
        let told = |verdict: Verdict, whose: &str| {
            let Verdict::GiveUp(error) = verdict else {
                panic!("{verdict:?}");
            };
            assert_eq!(error.kind, ErrorKind::Unavailable);
            assert_eq!(error.code.as_deref(), Some(code::CLOCK_SKEW));
            assert!(error.retry_after_ms.is_some());
            let detail = error.detail.unwrap();
            assert!(
                detail.starts_with(whose) && detail.contains("7320 s"),
                "{detail}"
            );
        };
        told(
            attempts().lease_refused(refused(), false, Instant::now()),
            "the scheduler: ",
        );
        // Another worker's clock may be right, and no engine was asked.
        let mut attempts = attempts();
        let unasked = || unreachable!("no engine was asked");
        for number in 0..3 {
            let worker = worker(&format!("w{number}"));
            let (outcome, verdict) =
                attempts.chunk_failed(&worker, refused(), Said::Nothing, unasked);
            assert_eq!(outcome, LeaseOutcome::Continues);
            assert!(matches!(verdict, Verdict::Again(_)));
            assert!(attempts.exclude().contains(&worker));
        }
        let last = attempts.chunk_failed(&worker("w3"), refused(), Said::Nothing, unasked);
        told(last.1, "worker w3: ");
    }
    // A wrong secret is a fault of ours as well.
    let stranger = || error(ErrorKind::Unauthorized);
    for verdict in [
        attempts().lease_refused(stranger(), false, Instant::now()),
        Attempts::new(1, Duration::ZERO, Duration::ZERO)
            .chunk_failed(&worker("a"), stranger(), Said::Nothing, granted)
            .1,
    ] {
        assert!(matches!(verdict, Verdict::GiveUp(error) if error.kind == ErrorKind::Internal));
    }
}

#[test]
fn a_slow_engine_is_not_waited_for_again() {
    let slow = || error(ErrorKind::Timeout).with_code(code::ENGINE_TIMEOUT);
    let verdict = |said| {
        attempts()
            .chunk_failed(&worker("a"), slow(), said, granted)
            .1
    };
    assert!(matches!(verdict(Said::Nothing), Verdict::GiveUp(_)));
    assert!(matches!(verdict(Said::Before), Verdict::GiveUp(_)));
    assert!(matches!(verdict(Said::InThisChunk), Verdict::Again(_)));
}

#[test]
fn nobody_is_to_blame_for_a_request_whose_time_is_up() {
    let overdue = || error(ErrorKind::Timeout).with_code(code::REQUEST_TIMEOUT);
    for said in [Said::Nothing, Said::Before, Said::InThisChunk] {
        let mut attempts = attempts();
        let ended = attempts.chunk_failed(&worker("a"), overdue(), said, granted);
        assert_eq!(ended, (LeaseOutcome::Done, Verdict::GiveUp(overdue())));
        assert!(attempts.exclude().is_empty(), "{said:?}");
    }
}

#[test]
fn failed_workers_are_left_out_until_nobody_else_is_there() {
    let mut attempts = attempts();
    let (outcome, verdict) = attempts.chunk_failed(
        &worker("a"),
        error(ErrorKind::Upstream),
        Said::Nothing,
        granted,
    );
    assert_eq!(
        (outcome, verdict),
        (
            LeaseOutcome::WorkerFailed,
            Verdict::Again(Duration::from_millis(50))
        )
    );
    assert_eq!(attempts.exclude(), [worker("a")]);
    let verdict = attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now());
    assert_eq!(verdict, Verdict::Again(Duration::from_millis(100)));
    assert!(attempts.exclude().is_empty());
}

#[test]
fn failures_are_counted_in_a_row() {
    let mut attempts = attempts();
    for _ in 0..20 {
        let (_, verdict) = attempts.chunk_failed(
            &worker("a"),
            error(ErrorKind::Timeout),
            Said::InThisChunk,
            granted,
        );
        assert!(matches!(verdict, Verdict::Again(_)));
    }
    let mut last = None;
    for _ in 0..3 {
        last = Some(
            attempts
                .chunk_failed(
                    &worker("b"),
                    error(ErrorKind::Timeout),
                    Said::Nothing,
                    granted,
                )
                .1,
        );
    }
    assert!(matches!(last, Some(Verdict::GiveUp(_))));
}

#[test]
fn retries_need_leave_and_continuations_do_not() {
    let refused = || false;
    let unasked = || unreachable!("an output goes on");
    let lost = || error(ErrorKind::Upstream);
    let mut attempts = attempts();
    for (failures, said) in [
        (1, Said::InThisChunk),
        (2, Said::Before),
        (3, Said::Before),
        (4, Said::Before),
    ] {
        let verdict = attempts.chunk_failed(&worker("a"), lost(), said, unasked).1;
        assert_eq!(matches!(verdict, Verdict::Again(_)), failures < 4);
    }
    let verdict = self::attempts()
        .chunk_failed(&worker("b"), lost(), Said::Nothing, refused)
        .1;
    assert_eq!(verdict, Verdict::GiveUp(lost()));
}

#[test]
fn where_no_engine_was_asked_nobody_is_asked_for_leave() {
    let unasked = || unreachable!("no engine was asked");
    for refusal in [
        error(ErrorKind::Overloaded).with_code(code::WORKER_FULL),
        error(ErrorKind::Unavailable).with_code(code::DRAINING),
        error(ErrorKind::Unavailable).with_code(code::ENGINE_BREAKER_OPEN),
    ] {
        let mut attempts = attempts();
        let (outcome, verdict) =
            attempts.chunk_failed(&worker("a"), refusal, Said::Nothing, unasked);
        assert_eq!(outcome, LeaseOutcome::Continues);
        assert!(matches!(verdict, Verdict::Again(_)));
    }
    // An engine that has no room was asked.
    let full = || error(ErrorKind::Overloaded);
    let verdict = attempts()
        .chunk_failed(&worker("a"), full(), Said::Nothing, || false)
        .1;
    assert_eq!(verdict, Verdict::GiveUp(full()));
}

#[test]
fn what_follows_a_failed_chunk_is_no_new_one() {
    let mut attempts = attempts();
    attempts.lease_refused(error(ErrorKind::Unavailable), false, Instant::now());
    assert!(!attempts.is_again());
    attempts.chunk_failed(
        &worker("a"),
        error(ErrorKind::Upstream),
        Said::Nothing,
        granted,
    );
    assert!(attempts.is_again());
    attempts.chunk_ended(&worker("b"), NextChunk::Here);
    assert!(!attempts.is_again());
}

#[test]
fn what_a_worker_tried_counts() {
    let mut attempts = attempts();
    assert_eq!(attempts.left(), 4);
    attempts.retried();
    attempts.retried();
    let lost = error(ErrorKind::Upstream);
    let verdict = attempts
        .chunk_failed(&worker("a"), lost.clone(), Said::Nothing, granted)
        .1;
    assert!(matches!(verdict, Verdict::Again(_)));
    assert_eq!(attempts.left(), 1);
    // Nobody is asked for leave for what is not done in any case.
    let unasked = || unreachable!("the last attempt has failed");
    let verdict = attempts
        .chunk_failed(&worker("b"), lost.clone(), Said::Nothing, unasked)
        .1;
    assert_eq!(verdict, Verdict::GiveUp(lost));
}

#[test]
fn what_no_worker_can_do_is_not_tried_elsewhere() {
    let (outcome, verdict) = attempts().chunk_failed(
        &worker("a"),
        error(ErrorKind::InvalidRequest),
        Said::Nothing,
        granted,
    );
    assert_eq!(outcome, LeaseOutcome::Done);
    assert!(matches!(verdict, Verdict::GiveUp(error) if error.kind == ErrorKind::InvalidRequest));
}

#[test]
fn the_last_worker_is_preferred_unless_it_drains() {
    let mut attempts = attempts();
    attempts.chunk_ended(&worker("a"), NextChunk::Here);
    assert_eq!(attempts.prefer(), Some(&worker("a")));
    attempts.chunk_ended(&worker("a"), NextChunk::Elsewhere);
    assert_eq!(
        (attempts.prefer(), attempts.exclude()),
        (None, &[worker("a")][..])
    );
}

#[test]
fn a_request_is_transferred_once_it_is_there_and_not_sent_on_for_ever() {
    let mut attempts = attempts();
    attempts.chunk_ended(&worker("a"), NextChunk::On(worker("b")));
    assert_eq!(attempts.prefer(), Some(&worker("b")));
    assert!(attempts.prefers_named() && !attempts.is_transferred());
    attempts.leased(&worker("b"));
    assert!(!attempts.prefers_named() && attempts.is_transferred());

    let mut attempts = self::attempts();
    for sent in 0..TRANSFERS_MAX {
        assert!(!attempts.is_transferred(), "sent on {sent} times");
        attempts.chunk_ended(&worker("a"), NextChunk::On(worker("b")));
        // It was full.
        attempts.leased(&worker("a"));
    }
    assert!(attempts.is_transferred());
}

#[test]
fn pauses_grow_to_a_bound_and_heed_hints() {
    let mut attempts = Attempts::new(100, Duration::from_millis(50), Duration::from_secs(10));
    let hinted = error(ErrorKind::Overloaded).with_retry_after_ms(700);
    assert_eq!(
        attempts.lease_refused(hinted, true, Instant::now()),
        Verdict::Again(Duration::from_millis(700))
    );
    for _ in 0..40 {
        attempts.lease_refused(error(ErrorKind::Overloaded), true, Instant::now());
    }
    assert_eq!(
        attempts.lease_refused(error(ErrorKind::Overloaded), true, Instant::now()),
        Verdict::Again(PAUSE_MAX)
    );
}
