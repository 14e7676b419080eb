//! The order of rollouts by lengths.

use expect_test::expect;

use super::*;

fn ordered_by(order: OrderPolicy) -> SchedulerConfig {
    SchedulerConfig {
        order,
        ..SchedulerConfig::default()
    }
}

/// Two groups of three on one slot. The members of `l` write 900 tokens, those of `s` 100.
const TWO_GROUPS: &str = "0 beat a slots=1
     1 ask 1 acme group=s
     2 ask 2 acme group=s
     3 ask 3 acme group=s
     4 ask 4 acme group=l
     5 ask 5 acme group=l
     6 ask 6 acme group=l
     10 done 1 100
     20 done 4 900
     30 done 5 900
     40 done 6 900
     50 done 2 100";

#[test]
fn context_probes_each_group_and_then_takes_the_longest() {
    check_with(
        ordered_by(OrderPolicy::Context),
        TWO_GROUPS,
        expect![[r#"
        0 a joined
        1 grant #1 on a after 0 ms, 2048 tokens
        10 end of 1 on a: finished
        10 grant #4 on a after 6 ms, 2048 tokens
        20 end of 4 on a: finished
        20 grant #5 on a after 15 ms, 2048 tokens
        30 end of 5 on a: finished
        30 900 tokens where 900 were expected
        30 grant #6 on a after 24 ms, 2048 tokens
        40 end of 6 on a: finished
        40 900 tokens where 900 were expected
        40 grant #2 on a after 38 ms, 2048 tokens
        50 end of 2 on a: finished
        50 100 tokens where 100 were expected
        50 grant #3 on a after 47 ms, 2048 tokens
    "#]],
    );
}

#[test]
fn arrival_takes_them_as_they_come() {
    check_with(
        ordered_by(OrderPolicy::Arrival),
        "0 beat a slots=1
         1 ask 1 acme group=s
         2 ask 2 acme group=s
         3 ask 4 acme group=l
         10 done 1 100
         20 done 2 100",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            10 end of 1 on a: finished
            10 grant #2 on a after 8 ms, 2048 tokens
            20 end of 2 on a: finished
            20 100 tokens where 100 were expected
            20 grant #3 on a after 17 ms, 2048 tokens
        "#]],
    );
}

/// The log of a script, after ten pairs of siblings whose lengths are `lengths(pair)`. They ran before the script.
fn log_after_pairs(order: OrderPolicy, lengths: fn(u32) -> u32, script: &str) -> String {
    let mut before = "0 beat z slots=20\n".to_owned();
    for nth in 0..20u32 {
        let group = nth / 2;
        before += &format!("0 ask 9{nth:02} acme group=before-{group}\n");
    }
    for nth in 0..20u32 {
        let tokens = lengths(nth / 2);
        before += &format!("0 done 9{nth:02} {tokens}\n");
    }
    // The script has one slot, on another worker.
    before += "0 beat z slots=20 drains\n";
    let mut run = Script::new(ordered_by(order));
    run.run(&before);
    let seen = run.log.len();
    run.run(script);
    run.log[seen..].to_owned()
}

#[test]
fn auto_has_the_first_members_of_all_groups_served_until_chunks_show_no_drafts() {
    let asks = |first: u32| {
        let ask = |nth: u32| format!("1 ask {} acme group=g{}\n", first + nth, (first + nth) / 3);
        (0..6).map(ask).collect::<String>()
    };
    let mut script = "0 beat a slots=1\n".to_owned() + &asks(300);
    for (nth, request) in [300, 303, 301, 304, 302, 305].into_iter().enumerate() {
        script += &format!("{} done {request} 40 accepted=10\n", 10 + nth);
    }
    // Chunks without an accepted draft have shown by then that the engine makes none.
    script += "20 beat a slots=20\n";
    for nth in 0..20 {
        script += &format!("20 ask 9{nth:02} acme rollout group=n{nth}\n");
    }
    for nth in 0..20 {
        script += &format!("30 done 9{nth:02} 400\n");
    }
    script += "40 beat a slots=1\n";
    script += &asks(600);
    for (nth, request) in (600..606).enumerate() {
        script += &format!("{} done {request} 40\n", 50 + nth);
    }
    // Each request is done when its lease was granted, or the script would fail.
    let log = Script::new(ordered_by(OrderPolicy::Auto))
        .run(&script)
        .log
        .clone();
    assert_eq!(log.matches(": finished").count(), 32, "{log}");
}

#[test]
fn auto_goes_by_arrival_until_siblings_have_proved_alike_and_then_by_length() {
    let different = |pair: u32| 64 << pair;
    let after = |order| log_after_pairs(order, different, TWO_GROUPS);
    assert_eq!(after(OrderPolicy::Auto), after(OrderPolicy::Context));
    assert_ne!(after(OrderPolicy::Auto), after(OrderPolicy::Arrival));
    // Siblings that are as alike as all others tell nothing.
    let equal = |order| log_after_pairs(order, |_| 150, TWO_GROUPS);
    assert_eq!(equal(OrderPolicy::Auto), equal(OrderPolicy::Arrival));
}

#[test]
fn probes_with_fewer_tokens_go_first_in_context_and_a_started_one_goes_on_in_auto() {
    let script = "0 beat a slots=1
         1 ask 1 acme group=g
         2 ask 2 acme group=h
         10 ask 1 acme group=g age=9 so-far=500 after=500
         20 done 2 100
         30 done 1 100";
    check_with(
        ordered_by(OrderPolicy::Context),
        script,
        expect![[r#"
        0 a joined
        1 grant #1 on a after 0 ms, 2048 tokens
        10 end of 1 on a: continues
        10 grant #2 on a after 8 ms, 2048 tokens
        20 end of 2 on a: finished
        20 grant #3 on a after 10 ms, 2048 tokens
        30 end of 1 on a: finished
    "#]],
    );
    check_with(
        ordered_by(OrderPolicy::Auto),
        script,
        expect![[r#"
        0 a joined
        1 grant #1 on a after 0 ms, 2048 tokens
        10 end of 1 on a: continues
        10 grant #3 on a after 0 ms, 2048 tokens
        30 end of 1 on a: finished
        30 grant #2 on a after 28 ms, 2048 tokens
    "#]],
    );
}

#[test]
fn only_finished_outputs_teach_lengths() {
    // The long output of group `g` is aborted, so its next member is the probe. It goes before the members of `h`,
    // of which one has finished.
    check_with(
        ordered_by(OrderPolicy::Context),
        "0 beat a slots=1
         1 ask 1 acme group=h
         2 ask 2 acme group=h
         3 ask 3 acme group=g
         4 ask 4 acme group=g
         10 done 1 500
         20 aborted 3 999
         30 done 4 10",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            10 end of 1 on a: finished
            10 grant #3 on a after 7 ms, 2048 tokens
            20 end of 3 on a: aborted
            20 grant #4 on a after 16 ms, 2048 tokens
            30 end of 4 on a: finished
            30 grant #2 on a after 28 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn a_longer_member_that_goes_on_raises_the_estimate() {
    // A short member of both groups has finished. Then one of `g` goes on beyond 400, so the other one of `g` goes
    // before that of `h`.
    check_with(
        ordered_by(OrderPolicy::Context),
        "0 beat a slots=2
         1 ask 1 acme group=g
         1 ask 2 acme group=h
         2 ask 3 acme group=g
         2 ask 4 acme group=h
         3 ask 5 acme group=h
         4 ask 6 acme group=g
         10 done 2 300
         11 done 1 200
         20 ask 3 acme group=g so-far=400 after=400 age=18
         30 done 4 10",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            1 grant #2 on a after 0 ms, 2048 tokens
            10 end of 2 on a: finished
            10 grant #3 on a after 8 ms, 2048 tokens
            11 end of 1 on a: finished
            11 grant #4 on a after 9 ms, 2048 tokens
            20 end of 3 on a: continues
            20 grant #7 on a after 0 ms, 2048 tokens
            30 end of 4 on a: finished
            30 10 tokens where 300 were expected
            30 grant #6 on a after 26 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn history_orders_by_earlier_outputs_from_the_start() {
    check_with(
        ordered_by(OrderPolicy::History),
        "0 beat a slots=1
         1 ask 1 acme
         2 ask 2 acme group=s expects=100
         3 ask 3 acme group=l expects=900
         4 ask 4 acme rollout expects=400
         5 ask 5 acme group=new
         10 done 1 5
         20 done 5 600
         30 done 3 850
         40 done 4 400",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            10 end of 1 on a: finished
            10 grant #5 on a after 5 ms, 2048 tokens
            20 end of 5 on a: finished
            20 grant #3 on a after 17 ms, 2048 tokens
            30 end of 3 on a: finished
            30 850 tokens where 900 were expected
            30 grant #4 on a after 26 ms, 2048 tokens
            40 end of 4 on a: finished
            40 400 tokens where 400 were expected
            40 grant #2 on a after 38 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn a_rollout_is_overtaken_only_by_those_that_came_soon_after_it() {
    let config = SchedulerConfig {
        overtake_ms_max: 1_000,
        ..ordered_by(OrderPolicy::History)
    };
    check_with(
        config,
        "0 beat a slots=1
         1 ask 1 acme
         100 ask 2 acme rollout expects=10
         1099 ask 3 acme rollout expects=500
         1101 ask 4 acme rollout expects=900
         1200 done 1 5
         1300 done 3 5
         1400 done 2 5",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms
            1200 end of 1 on a: finished
            1200 grant #3 on a after 101 ms, 2048 tokens
            1300 end of 3 on a: finished
            1300 5 tokens where 500 were expected
            1300 grant #2 on a after 1200 ms, 2048 tokens
            1400 end of 2 on a: finished
            1400 5 tokens where 10 were expected
            1400 grant #4 on a after 299 ms, 2048 tokens
        "#]],
    );
}

#[test]
fn tenants_stay_fair_whatever_the_lengths() {
    check_with(
        ordered_by(OrderPolicy::History),
        "0 beat a slots=1
         1 ask 1 long rollout expects=900
         2 ask 2 long rollout expects=900
         3 ask 3 long rollout expects=900
         4 ask 4 short rollout expects=10
         10 done 1 400
         20 done 4 10",
        expect![[r#"
            0 a joined
            1 grant #1 on a after 0 ms, 2048 tokens
            10 end of 1 on a: finished
            10 400 tokens where 900 were expected
            10 grant #4 on a after 6 ms, 2048 tokens
            20 end of 4 on a: finished
            20 10 tokens where 10 were expected
            20 grant #2 on a after 18 ms, 2048 tokens
        "#]],
    );
}
