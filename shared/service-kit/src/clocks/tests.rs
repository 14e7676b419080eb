//! Clocks that differ, and who says so.

use super::*;

const TRUE_MS: u64 = 1_700_000_000_000;
const HOUR_MS: i64 = 3_600_000;
const HOUR_S: u64 = 3_600;

/// Of a service whose clock is off by so much and stands still.
fn off_by(name: &str, judges: bool, off_ms: i64) -> Clocks {
    let shows = TRUE_MS.saturating_add_signed(off_ms);
    Clocks::by(name, judges, HOUR_S, move || shows)
}

/// One call of each to the scheduler, and the answers.
fn round(scheduler: &Clocks, others: &[&Clocks]) {
    for other in others {
        let said = other.call(&Told::default()).expect("it was never told");
        let answer = scheduler.heard(&said, None).expect("the scheduler judges");
        other.answered(&answer, Instant::now());
    }
}

/// Skews in whole seconds: what the answers took is below that.
fn skews_s(clocks: &[&Clocks]) -> Vec<i64> {
    clocks
        .iter()
        .map(|clocks| (clocks.skew_ms() as f64 / 1_000.0).round() as i64)
        .collect()
}

#[test]
fn the_one_is_off_that_disagrees_with_most() {
    // Which of scheduler, gateway and two workers is off, and by how much.
    for (off, off_ms) in (0..4).flat_map(|off| [(off, 2 * HOUR_MS), (off, -2 * HOUR_MS)]) {
        let names = ["scheduler", "gateway", "worker-0", "worker-1"];
        let all: Vec<Clocks> = (0..4)
            .map(|place| {
                let off_ms = if place == off { off_ms } else { 0 };
                off_by(names[place], place == 0, off_ms)
            })
            .collect();
        let others: Vec<&Clocks> = all[1..].iter().collect();
        // In the first round the scheduler has not heard of all.
        for _ in 0..2 {
            round(&all[0], &others);
        }
        let skews = skews_s(&all.iter().collect::<Vec<_>>());
        for (place, skew_s) in skews.into_iter().enumerate() {
            let expected = if place == off { off_ms / 1_000 } else { 0 };
            assert_eq!(skew_s, expected, "{} with {} off", names[place], names[off]);
            assert_eq!(all[place].readiness().is_err(), place == off);
        }
        let reason = all[off].readiness().unwrap_err();
        let side = if off_ms > 0 {
            "7200 s ahead of"
        } else {
            "7200 s behind"
        };
        assert!(reason.contains(side), "{reason}");
    }
}

#[test]
fn gateways_and_workers_that_differ_by_less_than_is_believed_all_work() {
    let minutes = |minutes: i64| minutes * 60_000;
    let scheduler = off_by("scheduler", true, 0);
    let gateway = off_by("gateway", false, minutes(6));
    let worker = off_by("worker", false, minutes(-6));
    for _ in 0..2 {
        round(&scheduler, &[&gateway, &worker]);
    }
    assert_eq!(skews_s(&[&scheduler, &gateway, &worker]), [0, 360, -360]);
    for clocks in [&scheduler, &gateway, &worker] {
        clocks.readiness().unwrap();
    }
}

#[test]
fn who_is_not_heard_by_the_scheduler_is_told_by_who_is() {
    let scheduler = off_by("scheduler", true, 0);
    let worker = off_by("worker", false, -HOUR_MS);
    let gateway = off_by("gateway", false, 0);
    for _ in 0..2 {
        round(&scheduler, &[&worker, &gateway]);
    }
    for off_ms in [0, 2 * HOUR_MS] {
        let store = off_by("store", false, off_ms);
        let said = worker.call(&Told::default()).unwrap();
        // It judges nobody, so it answers nothing.
        assert_eq!(store.heard(&said, None), None);
        assert_eq!(skews_s(&[&store]), [off_ms / 1_000]);
        assert_eq!(store.readiness().is_err(), off_ms > 0);
    }
    // Whoever was told nothing passes nothing on.
    let store = off_by("store", false, 2 * HOUR_MS);
    let stranger = off_by("worker", false, 0);
    store.heard(&stranger.call(&Told::default()).unwrap(), None);
    store.readiness().unwrap();
}

#[test]
fn where_two_disagree_the_scheduler_is_believed() {
    let scheduler = off_by("scheduler", true, 0);
    let gateway = off_by("gateway", false, 2 * HOUR_MS);
    round(&scheduler, &[&gateway]);
    scheduler.readiness().unwrap();
    assert!(gateway.readiness().is_err());
    assert_eq!(median_near_zero(vec![-5, 0, 7, 9]), Some(0));
    assert_eq!(median_near_zero(vec![5, 0, 9, 7]), Some(5));
    assert_eq!(median_near_zero(Vec::new()), None);
}

#[test]
fn one_clock_counts_once_however_often_it_is_heard() {
    let scheduler = off_by("scheduler", true, 0);
    let worker = off_by("worker", false, 0);
    round(&scheduler, &[&worker]);
    for _ in 0..10 {
        // A process that starts anew each time.
        round(&scheduler, &[&off_by("gateway", false, 2 * HOUR_MS)]);
    }
    assert_eq!(skews_s(&[&scheduler]), [0]);
}

#[test]
fn what_was_heard_long_ago_counts_no_more() {
    let (scheduler, gateway) = (off_by("s", true, 0), off_by("g", false, 2 * HOUR_MS));
    round(&scheduler, &[&gateway]);
    let now = Instant::now();
    assert!(gateway.known().mesh_ahead_ms(now).is_some());
    let later = now + REMEMBERED;
    assert_eq!(gateway.known().mesh_ahead_ms(later), None);
    assert_eq!(scheduler.known().mesh_ahead_ms(later), Some(0));
}

#[test]
fn what_cannot_be_read_is_not_believed() {
    let scheduler = off_by("scheduler", true, 0);
    for said in [
        "",
        ";",
        "x;;gateway",
        "-5;;gateway",
        "1;2",
        "99999999999999999999;;g",
    ] {
        assert_eq!(scheduler.heard(said, None), None, "{said}");
    }
    let extreme = scheduler.heard(&format!("{};;worker", u64::MAX), None);
    assert_eq!(extreme, Some(TRUE_MS.to_string()));
    let gateway = off_by("gateway", false, 0);
    gateway.answered("soon", Instant::now());
    assert_eq!(gateway.skew_ms(), 0);
}

#[test]
fn a_service_is_told_once_a_second() {
    let gateway = off_by("gate;way 1", false, 0);
    let told = Told::default();
    assert_eq!(
        gateway.call(&told).unwrap(),
        format!("{TRUE_MS};;gate_way_1")
    );
    assert_eq!(gateway.call(&told), None);
    assert!(gateway.call(&Told::default()).is_some());
}
