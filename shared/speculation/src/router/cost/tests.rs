use super::*;

/// A small spread, the same in every run.
fn noise(step: u32) -> f64 {
    let mixed = step.wrapping_mul(0x9e37_79b9) ^ (step >> 3).wrapping_mul(0x85eb_ca77);
    f64::from(mixed >> 8) / f64::from(1u32 << 24) - 0.5
}

fn close(is: f64, should: f64, share: f64) -> bool {
    (is / should - 1.0).abs() <= share
}

#[test]
fn buckets_cover_every_size_once_and_in_order() {
    let mut last = 0;
    for tokens in 1..=5000 {
        let (at, end) = bucket_of(tokens);
        assert!(at == last || at == last + 1, "{tokens}");
        assert!(end >= tokens && bucket_of(end).0 == at, "{tokens}");
        assert_eq!(bucket_of(end + 1).0, at + 1, "{tokens}");
        if tokens <= 4096 {
            let width = stairs::WIDTHS
                .iter()
                .find(|(to, _)| tokens <= *to)
                .unwrap()
                .1;
            assert!(
                (middle(at) - f64::from(tokens)).abs() < f64::from(width),
                "{tokens} in {at}"
            );
        }
        last = at;
    }
    let buckets = [0, 1, 64, 65, 68, 69].map(|tokens| bucket_of(tokens).0);
    assert_eq!(buckets, [0, 0, 63, 64, 64, 65]);
    // The largest number is a size as well.
    assert!(bucket_of(u32::MAX) > bucket_of(u32::MAX - 1));
}

#[test]
fn nothing_known_is_flat_and_a_profile_is_believed() {
    let unknown = StepCost::default();
    assert!(!unknown.is_known());
    assert_eq!(unknown.seconds(1, 0), unknown.seconds(100_000, 1 << 40));
    let profile = [
        (1, 0.001),
        (2, 0.00103),
        (4, 0.0012),
        (8, 0.0016),
        (16, 0.0027),
        (32, 0.005),
    ];
    let cost = StepCost::from_profile(&profile);
    for (tokens, seconds) in profile {
        assert!(
            close(cost.seconds(tokens, 0), seconds, 0.1),
            "{tokens}: {}",
            cost.seconds(tokens, 0)
        );
    }
    // Between points and beyond them.
    let between = cost.seconds(12, 0);
    assert!(0.0017 < between && between < 0.0027, "{between}");
    assert!(cost.seconds(64, 0) > 0.007 && cost.seconds(10_000, 0) > 1.0);
}

#[test]
fn a_staircase_is_found_step_by_step() {
    // Tiles of 16 tokens, a floor of 5 ms, 2 us per thousand KV tokens.
    let truth =
        |tokens: u32, kv: u64| 0.005 + 0.001 * f64::from(tokens.div_ceil(16)) + 2e-9 * kv as f64;
    let mut cost = StepCost::default();
    for step in 0..6000u32 {
        let tokens = 1 + step * 7 % 60;
        let kv = u64::from(step * 13 % 40) * 10_000;
        cost.observe(tokens, kv, truth(tokens, kv) * (1.0 + 0.1 * noise(step)));
    }
    for tokens in 1..=60 {
        for kv in [0, 200_000] {
            let (is, should) = (cost.seconds(tokens, kv), truth(tokens, kv));
            assert!(close(is, should, 0.04), "{tokens} {kv}: {is} for {should}");
        }
    }
    // The jump is where it is, and not spread over a tile.
    let jump = cost.seconds(17, 0) - cost.seconds(16, 0);
    assert!(jump > 0.0005, "{jump}");
    assert!(cost.seconds(32, 0) - cost.seconds(18, 0) < 0.0003);
    let all: Vec<f64> = (1..=5000).map(|tokens| cost.seconds(tokens, 7)).collect();
    assert!(all.is_sorted());
    for tokens in 1..=5000 {
        let stair = cost.at_kv(7)(tokens);
        let same = &all[tokens as usize - 1..(stair.tokens_max as usize).min(5000)];
        assert!(
            same.iter().all(|seconds| *seconds == stair.seconds),
            "{tokens}"
        );
    }
}

#[test]
fn what_was_not_seen_follows_the_line_past_all_steps_and_is_cheap_between_them() {
    let truth = |tokens: u32| 0.002 + 0.000_1 * f64::from(tokens);
    let mut cost = StepCost::default();
    for step in 0..500u32 {
        let tokens = [1, 3, 20, 128][step as usize % 4];
        cost.observe(tokens, 0, truth(tokens));
    }
    for tokens in [2, 300, 4000, 8000] {
        assert!(
            close(cost.seconds(tokens, 0), truth(tokens), 0.05),
            "{tokens}: {}",
            cost.seconds(tokens, 0)
        );
    }
    for (tokens, smaller) in [(10, 3), (60, 20), (100, 20)] {
        let seconds = cost.seconds(tokens, 0);
        assert!(
            seconds >= truth(smaller) * 0.99 && seconds <= truth(tokens),
            "{tokens}: {seconds}"
        );
    }
}

#[test]
fn what_is_cheap_up_to_a_ridge_is_found_from_both_sides_of_it() {
    // Sixteen requests, and drafts of which each next token brings a little less. 128 tokens take as long as one.
    let truth = |tokens: u32| 0.008 * f64::from(tokens.div_ceil(128)) + 1e-6 * f64::from(tokens);
    let worth = |tokens: u32| {
        16.0 + (1..=tokens - 16)
            .map(|slot| 0.99f64.powi(slot as i32))
            .sum::<f64>()
    };
    let mut cost = StepCost::default();
    for step in 0..20 {
        let tokens = [16, 150][step % 2];
        cost.observe(tokens, 0, truth(tokens));
    }
    let rate = 4000.0;
    let mut chosen = 16;
    for _ in 0..100 {
        let merit = |tokens: u32| worth(tokens) - rate * cost.seconds(tokens, 0);
        let best = (16..300).max_by(|a, b| merit(*a).total_cmp(&merit(*b)));
        chosen = best.expect("there are sizes");
        cost.observe(chosen, 0, truth(chosen));
    }
    assert!((112..=128).contains(&chosen), "{chosen}");
}

#[test]
fn one_step_over_an_edge_does_not_make_small_steps_free() {
    let mut cost = StepCost::default();
    for _ in 0..9 {
        cost.observe(112, 2000, 0.0137);
    }
    cost.observe(132, 2600, 0.0195);
    assert!(cost.seconds(16, 2600) > 0.001, "{}", cost.seconds(16, 2600));
    for _ in 0..6 {
        cost.observe(17, 2900, 0.0123);
    }
    assert!(
        close(cost.seconds(17, 2900), 0.0123, 0.25),
        "{}",
        cost.seconds(17, 2900)
    );
}

#[test]
fn steps_that_were_held_up_change_little_and_a_new_speed_is_learnt() {
    let mut cost = StepCost::default();
    for step in 0..2000u32 {
        let held_up = step > 50 && step.is_multiple_of(40);
        let seconds = if held_up { 5.0 } else { 0.01 };
        cost.observe(1 + step % 8, 1000, seconds);
    }
    for tokens in 1..=8 {
        assert!(
            close(cost.seconds(tokens, 1000), 0.01, 0.12),
            "{}",
            cost.seconds(tokens, 1000)
        );
    }
    // Another engine, ten times as fast.
    for step in 0..6000u32 {
        cost.observe(1 + step % 8, 1000, 0.001);
    }
    assert!(
        close(cost.seconds(4, 1000), 0.001, 0.05),
        "{}",
        cost.seconds(4, 1000)
    );
    let before = cost.clone();
    for seconds in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        cost.observe(4, 0, seconds);
    }
    cost.observe(0, 0, 1.0);
    assert_eq!(cost.curve, before.curve);
}

#[test]
fn a_curve_that_would_fall_is_flat() {
    let mut values = [3.0, 1.0, 2.0, 5.0, 4.0, 4.5, 9.0];
    never_falling(&mut values, &[1.0; 7]);
    assert_eq!(values, [2.0, 2.0, 2.0, 4.5, 4.5, 4.5, 9.0]);
    let mut values = [2.0, 1.0];
    never_falling(&mut values, &[3.0, 1.0]);
    assert_eq!(values, [1.75, 1.75]);
}

#[test]
fn a_head_is_known_by_its_passes_and_its_rows() {
    let mut head = HeadCost::default();
    assert_eq!((head.seconds(3, 6), head.tokens(6)), (0.0, 6.0));
    let truth =
        |requests: u32, depth: u32| f64::from(depth) * (0.000_05 + 0.000_02 * f64::from(requests));
    for step in 0..400u32 {
        let requests = 1 + step % 9;
        let depth = 2 + step % 5;
        let work = HeadWork {
            requests,
            depth,
            tokens_max: requests * depth,
            drafted: requests * depth / 2,
        };
        head.observe(work, 0, truth(requests, depth) * (1.0 + 0.2 * noise(step)));
    }
    for (requests, depth) in [(1, 6), (4, 3), (16, 6)] {
        assert!(close(
            head.seconds(requests, depth),
            truth(requests, depth),
            0.1
        ));
    }
    assert_eq!(head.seconds(0, 6), 0.0);
    assert!((head.tokens(8) - 4.0).abs() < 0.5, "{}", head.tokens(8));
    // A depth that never varies is known all the same.
    let mut head = HeadCost::default();
    let work = HeadWork {
        requests: 1,
        depth: 6,
        tokens_max: 6,
        drafted: 6,
    };
    for _ in 0..50 {
        head.observe(work, 0, 0.0003);
    }
    assert!(
        close(head.seconds(1, 6), 0.0003, 0.02),
        "{}",
        head.seconds(1, 6)
    );
    head.observe(work, 0, 1.0);
    assert!(head.seconds(1, 6) < 0.0005, "{}", head.seconds(1, 6));
    // Reading is told apart.
    assert_eq!(head.reading_seconds(100), 0.0);
    let before = head.seconds(1, 6);
    head.observe(work, 200, before + 0.002);
    assert!(
        close(head.reading_seconds(100), 0.001, 0.01),
        "{}",
        head.reading_seconds(100)
    );
    assert_eq!(head.seconds(1, 6), before);
}

#[test]
fn times_that_no_step_takes_spoil_nothing() {
    let mut cost = StepCost::default();
    // Squared, the first is nothing, and its weight infinite.
    for seconds in [1e-200, f64::MIN_POSITIVE, 0.9 * STEP_SECONDS_MIN] {
        cost.observe(4, 100, seconds);
        assert!(!cost.is_known(), "{seconds}");
    }
    for _ in 0..20 {
        cost.observe(4, 100, 0.01);
    }
    assert!(close(cost.seconds(4, 100), 0.01, 0.01));
    let profile = StepCost::from_profile(&[(1, 0.0), (4, 0.01)]);
    assert!(close(profile.seconds(4, 0), 0.01, 0.01));
}

#[test]
fn a_head_whose_first_drafts_took_no_time_is_learnt_all_the_same() {
    let mut head = HeadCost::default();
    let work = HeadWork {
        requests: 1,
        depth: 4,
        tokens_max: 4,
        drafted: 4,
    };
    for _ in 0..10 {
        head.observe(work, 0, 0.0);
    }
    for _ in 0..4000 {
        head.observe(work, 0, 0.004);
    }
    let seconds = head.seconds(1, 4);
    assert!(close(seconds, 0.004, 0.05), "{seconds}");
}
