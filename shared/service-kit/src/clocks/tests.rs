//! Clocks that differ, and which of them counts as off.

use super::*;

const TRUE_MS: u64 = 1_700_000_000_000;
const HOUR_MS: i64 = 3_600_000;
const HOUR_S: u64 = 3_600;

/// The clocks of a service whose own clock stands still, off by `off_ms`.
fn off_by(name: &str, is_judge: bool, off_ms: i64) -> Clocks {
    let shows = TRUE_MS.saturating_add_signed(off_ms);
    Clocks::with_clock(name, is_judge, HOUR_S, move || shows)
}

/// One call of each service to the scheduler, with the response.
fn round(scheduler: &Clocks, others: &[&Clocks]) {
    for other in others {
        let header = other
            .request_header(&LastSent::default())
            .expect("no clock was sent before");
        let answer = scheduler
            .read_request_header(&header, None)
            .expect("the scheduler answers");
        other.read_response_header(&answer, Instant::now());
    }
}

/// Skews in whole seconds, which hide the time that the calls took.
fn skews_s(clocks: &[&Clocks]) -> Vec<i64> {
    clocks
        .iter()
        .map(|clocks| (clocks.skew_ms() as f64 / 1_000.0).round() as i64)
        .collect()
}

#[test]
fn the_clock_that_disagrees_with_most_is_off() {
    // The index of the service that is off, and by how much.
    for (off, off_ms) in (0..4).flat_map(|off| [(off, 2 * HOUR_MS), (off, -2 * HOUR_MS)]) {
        let names = ["scheduler", "gateway", "worker-0", "worker-1"];
        let all: Vec<Clocks> = (0..4)
            .map(|place| {
                let off_ms = if place == off { off_ms } else { 0 };
                off_by(names[place], place == 0, off_ms)
            })
            .collect();
        let others: Vec<&Clocks> = all[1..].iter().collect();
        // In the first round the scheduler does not know all clocks yet.
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
fn services_whose_clocks_differ_by_less_than_the_limit_are_all_ready() {
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
fn a_service_that_does_not_call_the_scheduler_learns_the_mesh_time_from_its_callers() {
    let scheduler = off_by("scheduler", true, 0);
    let worker = off_by("worker", false, -HOUR_MS);
    let gateway = off_by("gateway", false, 0);
    for _ in 0..2 {
        round(&scheduler, &[&worker, &gateway]);
    }
    for off_ms in [0, 2 * HOUR_MS] {
        let store = off_by("store", false, off_ms);
        let header = worker.request_header(&LastSent::default()).unwrap();
        // It is not the judge, so it answers without a header.
        assert_eq!(store.read_request_header(&header, None), None);
        assert_eq!(skews_s(&[&store]), [off_ms / 1_000]);
        assert_eq!(store.readiness().is_err(), off_ms > 0);
    }
    // A service that does not know the mesh time passes nothing on.
    let store = off_by("store", false, 2 * HOUR_MS);
    let stranger = off_by("worker", false, 0);
    store.read_request_header(
        &stranger.request_header(&LastSent::default()).unwrap(),
        None,
    );
    store.readiness().unwrap();
}

#[test]
fn between_two_clocks_the_scheduler_decides() {
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
fn one_clock_counts_once_however_often_it_is_received() {
    let scheduler = off_by("scheduler", true, 0);
    let worker = off_by("worker", false, 0);
    round(&scheduler, &[&worker]);
    for _ in 0..10 {
        // The process starts anew each time.
        round(&scheduler, &[&off_by("gateway", false, 2 * HOUR_MS)]);
    }
    assert_eq!(skews_s(&[&scheduler]), [0]);
}

#[test]
fn an_old_reading_no_longer_counts() {
    let (scheduler, gateway) = (off_by("s", true, 0), off_by("g", false, 2 * HOUR_MS));
    round(&scheduler, &[&gateway]);
    let now = Instant::now();
    assert!(gateway.shared.readings.lock().mesh_ahead_ms(now).is_some());
    let later = now + READING_AGE_MAX;
    assert_eq!(gateway.shared.readings.lock().mesh_ahead_ms(later), None);
    assert_eq!(
        scheduler.shared.readings.lock().mesh_ahead_ms(later),
        Some(0)
    );
}

#[test]
fn a_malformed_header_is_ignored() {
    let scheduler = off_by("scheduler", true, 0);
    for header in [
        "",
        ";",
        "x;;gateway",
        "-5;;gateway",
        "1;2",
        "99999999999999999999;;g",
    ] {
        assert_eq!(
            scheduler.read_request_header(header, None),
            None,
            "{header}"
        );
    }
    let extreme = scheduler.read_request_header(&format!("{};;worker", u64::MAX), None);
    assert_eq!(extreme, Some(TRUE_MS.to_string()));
    let gateway = off_by("gateway", false, 0);
    gateway.read_response_header("soon", Instant::now());
    assert_eq!(gateway.skew_ms(), 0);
}

#[test]
fn a_clock_is_sent_once_a_second() {
    let gateway = off_by("gate;way 1", false, 0);
    let sent = LastSent::default();
    assert_eq!(
        gateway.request_header(&sent).unwrap(),
        format!("{TRUE_MS};;gate_way_1")
    );
    assert_eq!(gateway.request_header(&sent), None);
    assert!(gateway.request_header(&LastSent::default()).is_some());
}
