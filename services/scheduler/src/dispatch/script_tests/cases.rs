//! The behaviour of the dispatcher, case by case.

use expect_test::expect;

use super::*;

#[test]
fn a_freed_slot_goes_to_the_next_in_line() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme
         3 ask 3 acme
         4 withdraw 2
         500 done 1 20
         501 done 1 20",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            500 end of 1 on a: finished
            500 grant #3 on a after 497 ms
        "#]],
    );
}

#[test]
fn tenants_take_turns_by_tokens_served_and_not_by_arrival() {
    check(
        "0 beat a slots=1
         1 ask 1 greedy
         2 ask 2 greedy
         3 ask 3 greedy
         4 ask 4 modest
         10 continues 1 400
         20 continues 4 100
         30 continues 2 400",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            10 end of 1 on a: continues
            10 grant #4 on a after 6 ms
            20 end of 4 on a: continues
            20 grant #2 on a after 18 ms
            30 end of 2 on a: continues
            30 grant #3 on a after 27 ms
        "#]],
    );
}

#[test]
fn a_tenant_back_from_idling_has_saved_nothing_up() {
    let mut script = Script::new(SchedulerConfig::default());
    script.run("0 beat a slots=1");
    // `busy` has been served many tokens before `fresh` arrives with a burst.
    for request in 1..=20 {
        script.run(&format!("1 ask {request} busy\n1 continues {request} 500"));
    }
    script.log.clear();
    script.run(
        "2 ask 100 busy
         3 ask 101 fresh
         3 ask 102 fresh
         3 ask 103 busy
         10 continues 100 100
         20 continues 101 300
         30 continues 103 100",
    );
    expect![[r#"
        2 grant #21 on a after 0 ms
        10 end of 100 on a: continues
        10 grant #22 on a after 7 ms
        20 end of 101 on a: continues
        20 grant #24 on a after 17 ms
        30 end of 103 on a: continues
        30 grant #23 on a after 27 ms
    "#]]
    .assert_eq(&script.log);
}

#[test]
fn past_the_limits_the_answer_is_429_with_a_hint() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme
         3 ask 3 acme
         4 ask 4 acme
         5 ask 5 other
         6 ask 6 other
         7 ask 7 third
         7 beat b slots=1 model=idle
         8 ask 8 acme model=idle
         120002 tick",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            4 reject #4: 429 2 of your requests are already waiting; send fewer at once or try again later [retry in 3000 ms]
            7 reject #7: 429 4 requests are already waiting; try again later [retry in 5000 ms]
            7 b joined
            8 grant #8 on b after 0 ms
            120002 a lost
            120002 end of 1 on a: worker_lost
            120002 b lost
            120002 end of 8 on b: worker_lost
            120002 reject #2: 429 no worker of model m had a free slot for 120000 ms; try again later [retry in 4000 ms]
        "#]],
    );
}

#[test]
fn without_a_worker_a_request_waits_for_one_to_come_back() {
    check(
        "0 ask 1 acme
         1 ask 2 acme context=4096
         9999 tick
         9999 beat a slots=2
         10001 tick
         15000 tick
         15001 ask 3 acme
         25001 tick",
        expect![[r#"
            9999 a joined
            9999 grant #1 on a after 9999 ms
            10001 reject #2: 503 no live worker of model m can take a context of 4096 tokens; try again later [retry in 10000 ms]
            15000 a lost
            15000 end of 1 on a: worker_lost
            25001 reject #3: 503 no live worker of model m can take a context of 100 tokens; try again later [retry in 10000 ms]
        "#]],
    );
}

#[test]
fn a_request_that_no_worker_takes_is_told_why() {
    check(
        "0 beat a drains trouble=its_engine_is_away
         1 ask 1 acme
         2 beat b
         3 ask 2 acme
         9000 beat a drains trouble=its_engine_is_away
         9001 beat b drains
         9002 ask 3 acme not=b
         18000 beat a drains trouble=its_engine_is_away
         18001 beat b drains
         19003 tick",
        expect![[r#"
            0 a joined
            2 b joined
            2 grant #1 on b after 1 ms
            9001 end of 1 on b: healed
            19003 reject #2: 503 no worker of model m takes requests now (worker a: its_engine_is_away); try again later [retry in 10000 ms]
            19003 reject #3: 503 no worker of model m takes requests now (worker a: its_engine_is_away); try again later [retry in 10000 ms]
        "#]],
    );
}

#[test]
fn an_excluded_worker_is_avoided_until_it_restarts() {
    check(
        "0 beat a slots=2
         1 ask 1 acme
         2 failed 1
         3 ask 1 acme not=a
         4 beat a slots=2
         5 ask 2 acme
         6 beat a slots=2 inc=2 runs=2
         7 ask 3 acme not=a
         10007 tick",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            2 end of 1 on a: worker_failed
            5 grant #3 on a after 0 ms
            6 a restarted
            6 end of 2 on a: worker_lost
            6 grant #2 on a after 3 ms
            10007 a lost
            10007 end of 1 on a: worker_lost
            10007 reject #4: 503 no live worker of model m can take a context of 100 tokens, not counting 1 on which this request failed; try again later [retry in 10000 ms]
        "#]],
    );
}

#[test]
fn a_worker_that_failed_a_request_gets_none_until_it_reports() {
    check(
        "0 beat a slots=4
         1 ask 1 acme
         2 ask 2 acme
         3 failed 1
         4 ask 3 acme
         900 beat a slots=4 runs=2",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            2 grant #2 on a after 0 ms
            3 end of 1 on a: worker_failed
            900 grant #3 on a after 896 ms
        "#]],
    );
}

#[test]
fn a_worker_that_completes_a_chunk_is_trusted_again() {
    check(
        "0 beat a slots=4
         1 ask 1 acme
         1 ask 2 acme
         1 ask 3 acme
         4 failed 1
         5 ask 4 acme
         6 continues 2 9 ended=1
         7 failed 4
         8 ask 5 acme
         9 done 3 9 ended=0",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            1 grant #3 on a after 0 ms
            4 end of 1 on a: worker_failed
            6 end of 2 on a: continues
            6 grant #4 on a after 1 ms
            7 end of 4 on a: worker_failed
            9 end of 3 on a: finished
            9 grant #5 on a after 1 ms
        "#]],
    );
}

#[test]
fn a_worker_is_not_trusted_for_chunks_that_prove_nothing() {
    // Two chunks whose client left, with and without output; one without output; and two that ended before the
    // failure or in the same millisecond.
    check(
        "0 beat a slots=9
         1 ask 1 acme
         1 ask 2 acme
         1 ask 3 acme
         1 ask 4 acme
         1 ask 5 acme
         1 ask 6 acme
         4 failed 1
         5 ask 7 acme
         6 done 2
         7 done 3 9
         8 done 4 0 ended=0
         9 done 5 9 ended=6
         9 done 6 9 ended=5
         900 beat a slots=9",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            1 grant #3 on a after 0 ms
            1 grant #4 on a after 0 ms
            1 grant #5 on a after 0 ms
            1 grant #6 on a after 0 ms
            4 end of 1 on a: worker_failed
            6 end of 2 on a: finished
            7 end of 3 on a: finished
            8 end of 4 on a: finished
            9 end of 5 on a: finished
            9 end of 6 on a: finished
            900 grant #7 on a after 895 ms
        "#]],
    );
}

#[test]
fn a_tick_is_due_when_something_can_time_out() {
    let mut script = Script::new(SchedulerConfig::default());
    let mut due = |line: &str| {
        script.run(line);
        script.dispatch.due_ms().map(|due_ms| due_ms - START_MS)
    };
    assert_eq!(due("0 tick"), None);
    // When the worker has been silent for too long.
    assert_eq!(due("0 beat a slots=1"), Some(5_000));
    assert_eq!(due("1 ask 1 acme"), Some(5_000));
    assert_eq!(due("900 beat a slots=1 runs=1"), Some(5_900));
    // At the next tick, because a request waits.
    assert_eq!(due("901 ask 2 acme"), Some(1_001));
    assert_eq!(due("902 withdraw 2"), Some(5_900));
    // A lease that no heartbeat names does not expire before its worker.
    assert_eq!(due("903 done 1"), Some(5_900));
    assert_eq!(due("904 ask 3 acme"), Some(5_900));
    assert_eq!(due("905 tick"), Some(5_900));
    assert_eq!(due("5899 tick"), Some(5_900));
    assert_eq!(due("5900 tick"), None);
    assert!(
        script
            .log
            .ends_with("5900 a lost\n5900 end of 3 on a: worker_lost\n"),
        "{}",
        script.log
    );
}

#[test]
fn leases_live_while_heartbeats_name_them() {
    check(
        "0 beat a slots=4
         1 ask 1 acme
         2 ask 2 acme
         2 ask 3 acme
         1000 beat a slots=4 runs=1,3
         2000 beat a slots=4 runs=1
         3002 beat a slots=4 runs=1
         4000 beat a slots=4 runs=1
         4100 done 3 9
         8999 tick
         9000 tick
         9001 beat a slots=4 runs=1",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            2 grant #2 on a after 0 ms
            2 grant #3 on a after 0 ms
            3002 end of 2 on a: healed
            4000 end of 3 on a: healed
            9000 a lost
            9000 end of 1 on a: worker_lost
            9001 a joined
        "#]],
    );
}

#[test]
fn an_unnamed_lease_expires_even_while_its_worker_reports() {
    let config = SchedulerConfig {
        lease_ttl_ms: 3_000,
        ..SchedulerConfig::default()
    };
    let mut script = Script::new(config);
    script.run(
        "0 beat a slots=1
         1 ask 1 acme
         2000 beat a slots=1
         3000 tick
         3001 tick",
    );
    expect![[r#"
        0 a joined
        1 grant #1 on a after 0 ms
        3001 end of 1 on a: expired
    "#]]
    .assert_eq(&script.log);
}

#[test]
fn a_new_process_of_a_worker_ends_the_old_ones_leases() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme
         500 beat a slots=1 inc=2
         501 beat a slots=1 inc=1 runs=1
         502 beat a slots=1 inc=2 runs=2",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            500 a restarted
            500 end of 1 on a: worker_lost
            500 grant #2 on a after 498 ms
            501 refuse heartbeat: 409 a newer process reports as worker a; stop this process or give it another id
        "#]],
    );
}

#[test]
fn a_draining_worker_keeps_what_it_has_and_gets_nothing_new() {
    check(
        "0 beat a slots=2
         1 ask 1 acme
         2 beat a slots=2 runs=1 drains
         3 ask 2 acme
         1000 beat b slots=1
         1001 continues 1 10
         1002 ask 1 acme prefer=a",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1000 b joined
            1000 grant #2 on b after 997 ms
            1001 end of 1 on a: continues
        "#]],
    );
}

#[test]
fn a_worker_that_leaves_is_forgotten_at_once_unless_a_newer_process_has_its_name() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 beat b slots=1 inc=2
         3 ask 2 acme
         4 beat b slots=1 leaves
         5 beat nobody slots=1 leaves
         6 beat b slots=1 inc=2 leaves",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            2 b joined
            3 grant #2 on b after 0 ms
            6 b lost
            6 end of 2 on b: worker_lost
        "#]],
    );
}

#[test]
fn a_worker_gets_its_fallbacks_report_while_a_request_could_go_on_there() {
    check(
        "0 beat e slots=1 eagle3=3.5
         1 beat a fallback=e
         2 beat b fallback=b eagle3=2
         3 beat c fallback=e model=other
         4 beat d fallback=e context=8192
         5 beat f fallback=nobody
         6 ask 1 acme not=a,b,c,d,f
         7 beat a fallback=e
         8 done 1
         9 beat a fallback=e
         10 beat e slots=1 eagle3=3.25 drains
         11 beat a fallback=e
         12 beat e slots=1
         13 beat a fallback=e",
        expect![[r#"
            0 e joined
            1 a joined
            1 fallback accepts 3.5
            2 b joined
            3 c joined
            4 d joined
            5 f joined
            6 grant #1 on e after 0 ms
            8 end of 1 on e: finished
            9 fallback accepts 3.5
        "#]],
    );
}

#[test]
fn a_request_that_asks_again_replaces_its_earlier_call_and_lease() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 1 acme
         3 ask 2 acme
         4 ask 2 acme
         5 undelivered 1",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            2 end of 1 on a: superseded
            2 grant #2 on a after 0 ms
            4 reject #3: 409 the same request asked for a lease again; only the newer call goes on waiting
            5 end of 1 on a: undelivered
            5 grant #4 on a after 1 ms
        "#]],
    );
}

#[test]
fn a_restarted_scheduler_counts_the_chunks_that_still_run() {
    let mut before = Script::new(small());
    before.run("0 beat a slots=2\n1 ask 1 acme\n1 ask 2 acme");
    // The new scheduler knows only the content of the heartbeat.
    let mut after = Script::new(small());
    after.newest_lease = before.newest_lease.clone();
    after.run(
        "2000 beat a slots=2 runs=1,2
         2001 ask 3 acme
         2002 done 1 5
         2003 ask 4 acme
         3000 beat a slots=2 runs=1,3
         6000 beat a slots=2 runs=1,3,4",
    );
    expect![[r#"
        2000 a joined
        2002 grant #1 on a after 1 ms
        3000 grant #2 on a after 997 ms
    "#]]
    .assert_eq(&after.log);
    let epoch = |script: &Script, request: u128| script.newest_lease[&request].0 >> 64;
    assert!(epoch(&after, 3) > epoch(&before, 2));
}

#[test]
fn draining_refuses_waiting_and_new_requests() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme
         3 drain
         4 ask 3 acme
         5 done 1 1
         6 beat a",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            3 reject #2: 503 the scheduler is shutting down; try again [retry in 1000 ms]
            4 reject #3: 503 the scheduler is shutting down; try again [retry in 1000 ms]
            5 end of 1 on a: finished
        "#]],
    );
}

#[test]
fn invalid_heartbeats_and_too_many_workers_are_refused() {
    let mut script = Script::new(SchedulerConfig {
        workers_max: 1,
        ..small()
    });
    script.run(
        "0 beat a slots=0
         1 beat a slots=5000
         2 beat a
         3 beat b
         5002 tick
         5003 beat b",
    );
    expect![[r#"
        0 refuse heartbeat: 400 heartbeat: max_running is 0; send 1 to 4096
        1 refuse heartbeat: 400 heartbeat: max_running is 5000; send 1 to 4096
        2 a joined
        3 refuse heartbeat: 429 the scheduler has 1 workers, its limit; raise scheduler.workers_max or stop some workers
        5002 a lost
        5003 b joined
    "#]].assert_eq(&script.log);
}

#[test]
fn a_newcomer_gets_a_slot_of_a_tenant_above_its_share() {
    // The reply to its next heartbeat tells the full worker which chunk to end. Tenants get equal shares and no more:
    // the second request of the newcomer gets a slot as well, and the third waits until one is free.
    check(
        "0 beat a slots=4
         1 ask 1 acme
         1 ask 2 acme
         2 ask 3 acme
         2 ask 4 acme
         3 ask 5 acme
         200 beat a slots=4 runs=1,2,3,4
         210 ask 6 new
         220 beat a slots=4 runs=1,2,3,4
         300 beat a slots=4 runs=1,2,3,4
         310 beat a slots=4 runs=1,2,3,4
         320 continues 1 40
         330 ask 7 new
         340 ask 1 acme prefer=a
         400 beat a slots=4 runs=2,3,4,6
         410 continues 2 50
         420 ask 8 new
         600 beat a slots=4 runs=3,4,6,7
         700 done 6 9",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            2 grant #3 on a after 0 ms
            2 grant #4 on a after 0 ms
            300 preempt 1; next heartbeat in 100 ms
            310 preempt 1; next heartbeat in 100 ms
            320 end of 1 on a: continues
            320 grant #6 on a after 110 ms
            400 preempt 2; next heartbeat in 100 ms
            410 end of 2 on a: continues
            410 grant #7 on a after 80 ms
            700 end of 6 on a: finished
            700 grant #8 on a after 360 ms
        "#]],
    );
}

#[test]
fn a_preempted_chunk_frees_its_slot_without_a_finish() {
    // The reader has stalled, so no `finish` comes. Only the worker shows that the chunk has ended: it no longer
    // names it.
    check(
        "0 beat a slots=2
         1 ask 1 acme
         1 ask 2 acme
         2 ask 3 new
         200 beat a slots=2 runs=1,2
         300 beat a slots=2 runs=2
         400 continues 1 12",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            200 preempt 1; next heartbeat in 100 ms
            300 end of 1 on a: healed
            300 grant #3 on a after 298 ms
        "#]],
    );
}

#[test]
fn no_tenant_preempts_itself_or_one_below_its_share() {
    check(
        "0 beat a slots=2
         1 ask 1 acme
         1 ask 2 acme
         2 ask 3 acme
         500 beat a slots=2 runs=1,2
         600 done 1 5
         610 ask 4 new
         900 beat a slots=2 runs=2,3
         910 continues 2 9
         920 ask 5 third
         930 ask 2 acme
         2000 beat a slots=2 runs=3,4",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            600 end of 1 on a: finished
            600 grant #3 on a after 598 ms
            900 preempt 2; next heartbeat in 100 ms
            910 end of 2 on a: continues
            910 grant #4 on a after 300 ms
        "#]],
    );
}
