//! Classes of requests, and chunks that end and go on.

use expect_test::expect;

use super::*;

#[test]
fn interactive_requests_go_first_and_rollouts_keep_their_share() {
    // A quarter of four slots is one. Interactive requests get each slot that becomes free, except the last one of
    // the rollouts.
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=4
         1 ask 1 acme group=g
         1 ask 2 acme group=g
         2 ask 3 acme group=g
         2 ask 4 acme group=g
         3 ask 5 acme group=g
         4 ask 6 acme
         4 ask 7 acme
         4 ask 8 acme
         4 ask 9 acme
         100 continues 1 2048
         110 continues 2 2048
         120 continues 3 2048
         130 continues 4 2048
         140 done 6 5",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            1 grant #2 on a after 0 ms, 2048 tokens
            2 grant #3 on a after 0 ms, 2048 tokens
            2 grant #4 on a after 0 ms, 2048 tokens
            100 end of 1 on a: continues
            100 grant #6 on a after 96 ms
            110 end of 2 on a: continues
            110 grant #7 on a after 106 ms
            120 end of 3 on a: continues
            120 grant #8 on a after 116 ms
            130 end of 4 on a: continues
            130 grant #5 on a after 127 ms, 2048 tokens
            140 end of 6 on a: finished
            140 grant #9 on a after 136 ms
        "#]],
    );
}

#[test]
fn with_one_slot_rollouts_get_every_fourth_turn() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=1
         1 ask 100 acme
         2 ask 1 acme
         2 ask 2 acme
         2 ask 3 acme
         2 ask 4 acme
         2 ask 5 acme rollout
         2 ask 6 acme rollout
         10 done 100 1
         11 done 1 1
         12 done 2 1
         13 done 3 1
         14 done 5 1
         15 done 4 1",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            10 end of 100 on a: finished
            10 grant #2 on a after 8 ms
            11 end of 1 on a: finished
            11 grant #3 on a after 9 ms
            12 end of 2 on a: finished
            12 grant #4 on a after 10 ms
            13 end of 3 on a: finished
            13 grant #6 on a after 11 ms, 2048 tokens
            14 end of 5 on a: finished
            14 grant #5 on a after 12 ms
            15 end of 4 on a: finished
            15 grant #7 on a after 13 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn interactive_requests_preempt_rollouts_whose_chunks_have_no_limit() {
    let script = "0 beat a slots=4
         1 ask 1 acme group=g
         1 ask 2 acme group=g
         1 ask 3 acme group=g
         1 ask 4 acme group=g
         2 ask 5 acme
         2 ask 6 acme
         2 ask 7 acme
         2 ask 8 acme
         200 beat a slots=4 runs=1,2,3,4
         210 continues 1 40
         211 continues 2 40
         212 continues 3 40
         300 beat a slots=4 runs=4,5,6,7";
    let unbounded = SchedulerConfig {
        chunk_tokens: 0,
        ..SchedulerConfig::default()
    };
    check_with(
        unbounded,
        script,
        expect![[r#"
        0 a joined
        1 grant #1 on a after 0 ms
        1 grant #2 on a after 0 ms
        1 grant #3 on a after 0 ms
        1 grant #4 on a after 0 ms
        200 preempt 1, 2, 3; next heartbeat in 100 ms
        210 end of 1 on a: continues
        210 grant #5 on a after 208 ms
        211 end of 2 on a: continues
        211 grant #6 on a after 209 ms
        212 end of 3 on a: continues
        212 grant #7 on a after 210 ms
    "#]],
    );
    let bounded = SchedulerConfig::default();
    let log = Script::new(bounded).run(script).log.clone();
    assert!(!log.contains("preempt"), "{log}");
}

#[test]
fn a_rollout_claims_no_slot_of_an_interactive_request_beyond_its_share() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=4
         1 ask 1 acme
         1 ask 2 acme
         1 ask 3 acme
         1 ask 4 acme
         2 ask 5 other group=g
         2 ask 6 other group=g
         200 beat a slots=4 runs=1,2,3,4
         210 continues 1 40
         300 beat a slots=4 runs=2,3,4,5",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms
            1 grant #3 on a after 0 ms
            1 grant #4 on a after 0 ms
            200 preempt 1; next heartbeat in 100 ms
            210 end of 1 on a: continues
            210 grant #5 on a after 208 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn rollouts_wait_as_long_as_it_takes() {
    let config = SchedulerConfig {
        worker_ttl_ms: 1_000_000,
        lease_ttl_ms: 1_000_000,
        ..SchedulerConfig::default()
    };
    check_with(
        config,
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme
         2 ask 3 acme group=g
         500000 tick
         500001 done 1 5",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            500000 reject #2: 429 no worker of model m had a free slot for 120000 ms; try again later [retry in 1000 ms]
            500001 end of 1 on a: finished
            500001 grant #3 on a after 499999 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn waiting_rollouts_have_limits_of_their_own() {
    let config = SchedulerConfig {
        rollout_queue_max: 3,
        tenant_rollout_queue_max: 2,
        ..small()
    };
    check_with(
        config,
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme rollout
         2 ask 3 acme rollout
         3 ask 4 acme rollout
         4 ask 5 other rollout
         5 ask 6 other rollout
         6 ask 7 other rollout so-far=50
         7 ask 8 acme",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            3 reject #4: 429 2 of your rollouts are already waiting; send fewer at once or try again later [retry in 3000 ms]
            5 reject #6: 429 3 rollouts are already waiting; try again later [retry in 4000 ms]
        "#]],
    );
}

#[test]
fn the_scheduler_says_how_long_a_chunk_is() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=9
         1 ask 1 acme
         1 ask 2 acme chunk=16
         1 ask 3 acme rollout
         1 ask 4 acme rollout chunk=512
         1 ask 5 acme rollout chunk=4096
         1 ask 6 acme rollout chunk=0",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1 grant #2 on a after 0 ms, 16 tokens
            1 grant #3 on a after 0 ms, 2048 tokens
            1 grant #4 on a after 0 ms, 512 tokens
            1 grant #5 on a after 0 ms, 2048 tokens
            1 grant #6 on a after 0 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn one_call_ends_a_chunk_and_asks_for_the_next() {
    // Request 1 came before request 3, so it goes on at once. Request 4 is interactive and goes before it.
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=1
         1 ask 1 acme rollout
         2 ask 3 acme rollout
         100 ask 1 acme rollout age=99 so-far=2048 after=2048
         101 ask 4 acme
         200 ask 1 acme rollout age=199 so-far=4096 after=2048
         300 done 4 10
         400 done 1 10",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            100 end of 1 on a: continues
            100 grant #3 on a after 0 ms, 2048 tokens
            200 end of 1 on a: continues
            200 grant #4 on a after 99 ms
            300 end of 4 on a: finished
            300 grant #5 on a after 100 ms, 2048 tokens
            400 end of 1 on a: finished
            400 grant #2 on a after 398 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn a_request_that_goes_on_keeps_its_place_after_a_restart() {
    // The new scheduler has never seen request 1, which asked first of all.
    check_with(
        SchedulerConfig::default(),
        "1000 beat a slots=1
         1001 ask 9 acme rollout age=1
         1002 ask 2 acme rollout age=500 so-far=10
         1003 ask 1 acme rollout age=900 so-far=2048
         1004 ask 3 acme rollout
         1100 done 9 5
         1200 done 1 5",
        expect![[r#"
            1000 a joined
            1001 grant #1 on a after 0 ms, 2048 tokens
            1100 end of 9 on a: finished
            1100 grant #3 on a after 97 ms, 2048 tokens
            1200 end of 1 on a: finished
            1200 grant #2 on a after 198 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn a_chunk_that_goes_on_prefers_its_worker() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=2
         1 ask 1 acme rollout context=3000
         2 beat b slots=2
         100 ask 1 acme rollout context=4000 age=99 so-far=1000 after=1000
         101 beat a slots=2 drains
         200 ask 1 acme rollout context=4000 age=199 so-far=1000 after=0 prefer=a",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            2 b joined
            100 end of 1 on a: continues
            100 grant #2 on a after 0 ms, 2048 tokens
            200 end of 1 on a: continues
            200 grant #3 on b after 0 ms, 2048 tokens, moved
        "#]],
    );
}

#[test]
fn reading_a_context_again_is_charged_when_the_chunk_ends() {
    // Both chunks have the same output, but the worker had to read the context of the first one.
    let mut script = Script::new(SchedulerConfig::default());
    script.run(
        "0 beat a slots=3
         1 ask 1 reads context=3000
         1 ask 2 saves context=3000
         10 done 1 100 cached=0
         11 done 2 100 cached=3000",
    );
    let state = serde_json::to_value(script.dispatch.observe(START_MS + 20)).unwrap();
    let served = |tenant: &str| {
        let tenants = state["pools"][0]["tenants"].as_array().unwrap();
        let tenant = tenants.iter().find(|state| state["tenant"] == tenant);
        tenant.unwrap()["served"].as_u64().unwrap()
    };
    assert_eq!(served("reads") - served("saves"), 3_000);
}

#[test]
fn a_long_line_waits_for_all_workers_to_report_and_is_spread_over_them() {
    check(
        "0 ask 1 acme group=g
         0 ask 2 acme group=g
         0 ask 3 acme group=g
         0 ask 4 acme group=g
         0 ask 5 acme
         10 beat a slots=3
         200 beat b slots=3
         1009 tick
         1010 tick",
        expect![[r#"
            10 a joined
            10 grant #5 on a after 10 ms
            200 b joined
            1010 grant #1 on b after 1010 ms, 2048 tokens
            1010 grant #2 on a after 1010 ms, 2048 tokens
            1010 grant #3 on b after 1010 ms, 2048 tokens
            1010 grant #4 on a after 1010 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn a_rollout_that_waits_when_the_last_worker_goes_is_refused_after_the_wait_for_workers() {
    check(
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme group=g
         5000 tick
         14999 tick
         15000 tick",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            5000 a lost
            5000 end of 1 on a: worker_lost
            15000 reject #2: 503 no live worker of model m can take a context of 100 tokens; try again later [retry in 10000 ms]
        "#]],
    );
}
