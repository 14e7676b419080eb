//! Placement by what lies in KV caches, and their limits.

use expect_test::expect;

use super::*;

#[test]
fn a_request_goes_where_its_prefix_lies() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=8
         0 beat b slots=8
         1 ask 1 acme context=1920 prefixes=101-130
         2 ask 2 acme context=1920 prefixes=201-230
         3 ask 3 acme context=100 not=a
         4 ask 4 acme context=2000 prefixes=201-231
         5 beat b slots=8 inc=2
         6 ask 5 acme context=100 not=a
         6 ask 6 acme context=100 not=a
         6 ask 7 acme context=100 not=a
         7 ask 8 acme context=2000 prefixes=201-231",
        expect![[r#"
            0 a joined
            0 b joined
            1 grant #1 on a after 0 ms
            2 grant #2 on b after 0 ms
            3 grant #3 on b after 0 ms
            4 grant #4 on b after 0 ms
            5 b restarted
            5 end of 2 on b: worker_lost
            5 end of 3 on b: worker_lost
            5 end of 4 on b: worker_lost
            6 grant #5 on b after 0 ms
            6 grant #6 on b after 0 ms
            6 grant #7 on b after 0 ms
            7 grant #8 on a after 0 ms
        "#]],
    );
}

#[test]
fn a_report_tells_what_a_worker_holds() {
    check_with(
        SchedulerConfig::default(),
        "0 beat a slots=4 kv=100000
         0 beat b slots=4 kv=100000 held=40
         1 ask 1 acme context=2560 prefixes=1-29,40
         2 beat b slots=4 runs=1 kv=100000 held=41",
        expect![[r#"
            0 a joined
            0 b joined
            1 grant #1 on b after 0 ms
        "#]],
    );
}

#[test]
fn one_hot_prefix_does_not_drown_a_worker() {
    let mut script = Script::new(SchedulerConfig {
        queue_max: 100,
        tenant_queue_max: 100,
        ..SchedulerConfig::default()
    });
    script.run("0 beat a slots=64\n0 beat b slots=64\n0 beat c slots=64");
    for request in 1..=90 {
        script.run(&format!(
            "{request} ask {request} acme context=3072 prefixes=1-48"
        ));
    }
    let on = |worker: &str| script.log.matches(&format!(" on {worker} ")).count();
    let counts = ["a", "b", "c"].map(on);
    assert_eq!(counts.iter().sum::<usize>(), 90);
    assert!(counts.iter().all(|count| *count <= 39), "{counts:?}");
}

#[test]
fn the_kv_cache_is_never_overfilled_by_plans() {
    // Rollouts plan for context and chunk: 1000 + 500 tokens each. The third one waits until one has ended.
    let config = SchedulerConfig {
        chunk_tokens: 500,
        ..SchedulerConfig::default()
    };
    check_with(
        config,
        "0 beat a slots=8 kv=4000
         1 ask 1 acme rollout context=1000
         1 ask 2 acme rollout context=1000
         1 ask 3 acme rollout context=1000
         1 ask 4 acme rollout context=300 max=200
         100 done 4 200
         110 done 1 500
         900 beat a slots=8 kv=4000 used=3400 runs=2,3
         910 ask 5 acme rollout context=1000
         920 ask 6 acme rollout context=100 max=100",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 500 tokens
            1 grant #2 on a after 0 ms, 500 tokens
            1 grant #4 on a after 0 ms, 500 tokens
            100 end of 4 on a: finished
            110 end of 1 on a: finished
            110 grant #3 on a after 109 ms, 500 tokens
            920 grant #6 on a after 0 ms, 500 tokens
        "#]],
    );
}

#[test]
fn a_request_that_needs_all_of_a_kv_cache_gets_it_alone() {
    // Smaller requests keep coming, but after a second no more of them are let in before it.
    let config = SchedulerConfig {
        chunk_tokens: 500,
        ..SchedulerConfig::default()
    };
    check_with(
        config,
        "0 beat a slots=8 kv=2000
         1 ask 1 acme rollout context=500
         2 ask 2 acme rollout context=4000
         3 ask 3 acme rollout context=500
         900 beat a slots=8 kv=2000 used=1000 runs=1,3
         1000 done 1 500
         1001 ask 4 acme rollout context=500
         1100 beat a slots=8 kv=2000 used=2000 runs=3,4
         1200 done 3 500
         1201 ask 5 acme rollout context=500
         1300 done 4 500
         1400 done 2 500",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 500 tokens
            3 grant #3 on a after 0 ms, 500 tokens
            1000 end of 1 on a: finished
            1001 grant #4 on a after 0 ms, 500 tokens
            1200 end of 3 on a: finished
            1300 end of 4 on a: finished
            1300 grant #2 on a after 1298 ms, 500 tokens
            1400 end of 2 on a: finished
            1400 grant #5 on a after 199 ms, 500 tokens
        "#]],
    );
}

#[test]
fn round_robin_and_least_loaded_know_nothing_of_prefixes() {
    let script = "0 beat a slots=4
         0 beat b slots=4
         1 ask 1 acme context=2048 prefixes=1,2,3
         2 ask 2 acme context=2048 prefixes=1,2,3
         3 ask 3 acme context=2048 prefixes=1,2,3
         4 done 2 5
         5 ask 4 acme context=2048 prefixes=1,2,3
         6 ask 5 acme context=2048 prefixes=1,2,3";
    let placed_by = |placement| {
        let config = SchedulerConfig {
            placement,
            ..SchedulerConfig::default()
        };
        let mut script_run = Script::new(config);
        let log = script_run.run(script).log.clone();
        let grants = log.lines().filter_map(|line| line.split(" on ").nth(1));
        let workers: Vec<String> = grants.map(|rest| rest[..1].to_owned()).collect();
        workers.join("")
    };
    // The fourth line is the end of request 2.
    assert_eq!(placed_by(PlacementPolicy::RoundRobin), "ababba");
    assert_eq!(placed_by(PlacementPolicy::LeastLoaded), "ababbb");
}
