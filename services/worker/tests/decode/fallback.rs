//! The router with an engine that has an EAGLE-3 head: who gets its drafts, when it pays, what is told of it.

use std::sync::atomic::Ordering;

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftSource, Speculation};
use refrain_speculation::draft::Setting;
use refrain_worker::{FallbackChoice, RouterChoice, SpeculationConfig};

use crate::bench::*;
use crate::fakes::{FakeEngine, Target};

/// Thinks of tokens that the target never emits.
fn wrong(_: &[TokenId]) -> TokenId {
    999
}

/// Is right about two of three.
fn erratic_mostly(text: &[TokenId]) -> TokenId {
    if text.len().is_multiple_of(3) {
        999
    } else {
        erratic(text)
    }
}

const MODES: [Speculation; 4] = [
    Speculation::Auto,
    Speculation::Suffix,
    Speculation::Eagle3,
    Speculation::Off,
];

/// Opens one session in each mode and says which of them were opened for the head, and which were served by it.
async fn modes(engine: FakeEngine, change: fn(&mut SpeculationConfig)) -> ([bool; 4], [bool; 4]) {
    let bench = bench(engine, |config| {
        // The gate has no time to open.
        config.speculation.router = RouterChoice::Score;
        config.speculation.drafter.trials.backoff_steps = 1000;
        change(&mut config.speculation);
    })
    .await;
    let mut served = [false; 4];
    for (served, mode) in served.iter_mut().zip(MODES) {
        let mut request = chunk(&bench, &[1, 2, 3], 20);
        request.speculation = mode;
        let received = run(&bench, request).await;
        assert_eq!(
            received.tokens,
            plainly(erratic, &[1, 2, 3], 20),
            "{mode:?}"
        );
        *served = received.sources.contains(&DraftSource::Eagle3);
    }
    let opened = bench.engine.opened.lock().unwrap().clone();
    (opened.try_into().unwrap(), served)
}

#[tokio::test]
async fn only_sessions_that_may_use_the_head_are_opened_for_it() {
    let with_head = || FakeEngine::new(erratic).with_head(erratic_mostly, 0.0);
    let none = [false; 4];
    let asked = [false, false, true, false];
    assert_eq!(
        modes(with_head(), |_| {}).await,
        ([true, false, true, false], asked)
    );
    let fixed_at_0 = |config: &mut SpeculationConfig| {
        config.score_threshold = Setting::Fixed(0.0);
    };
    assert_eq!(modes(with_head(), fixed_at_0).await, (asked, asked));
    let off = |config: &mut SpeculationConfig| config.fallback = FallbackChoice::Off;
    assert_eq!(modes(with_head(), off).await, (none, none));
    assert_eq!(
        modes(FakeEngine::new(erratic), |_| {}).await,
        (none, none),
        "an engine without a head"
    );
}

#[tokio::test]
async fn a_draft_model_goes_by_its_own_name() {
    let engine = FakeEngine::new(counting).with_head(counting, 0.0);
    let bench = bench(engine.drafting_by_model(), |_| {}).await;
    for (mode, served) in [
        (Speculation::DraftModel, true),
        (Speculation::Eagle3, false),
    ] {
        let mut request = chunk(&bench, &[1, 2, 3], 60);
        request.speculation = mode;
        let received = run(&bench, request).await;
        assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 60));
        assert_eq!(received.sources.contains(&DraftSource::DraftModel), served);
        assert!(!received.sources.contains(&DraftSource::Eagle3));
    }
    assert!(bench.decisions("draft_model", "asked") > 0.0);
    assert!(bench.decisions("plain", "no_fallback") > 0.0);
    let accepted = "refrain_self_draft_accepted_length{model=\"fake\",source=\"draft_model\"}";
    assert!(bench.figure(accepted) > 1.0);
}

#[tokio::test]
async fn the_head_changes_the_number_of_steps_and_nothing_else() {
    for (target, head) in [
        (repetitive as Target, wrong as Target),
        (erratic, erratic_mostly),
        (stopping, stopping),
    ] {
        let bench = bench(FakeEngine::new(target).with_head(head, 0.0), |config| {
            // Trials all the time, in every size of batch.
            config.speculation.drafter.trials.backoff_steps = 2;
            config.speculation.drafter.trials.backoff_steps_max = 4;
            config.speculation.drafter.depth = 6;
            config.speculation.drafter.tokens_max = 6;
        })
        .await;
        let prompts: Vec<Vec<TokenId>> = (0..12)
            .map(|n| (0..1 + 3 * n).map(|i| 1 + (i * (n + 1)) % 9).collect())
            .collect();
        let runs = prompts
            .iter()
            .zip(MODES.into_iter().cycle())
            .map(|(prompt, mode)| {
                let mut request = chunk(&bench, prompt, 100);
                request.speculation = mode;
                let bench = &bench;
                async move { (prompt, run_when_free(bench, request).await) }
            });
        for (prompt, received) in futures_util::future::join_all(runs).await {
            assert_eq!(received.error, None);
            assert_eq!(received.tokens, plainly(target, prompt, 100));
        }
        assert!(bench.decisions("eagle3", "asked") > 0.0);
    }
}

#[tokio::test]
async fn a_head_that_pays_comes_into_use_and_is_reported() {
    // A step takes a millisecond, a draft half of one, and five tokens come of it.
    let engine = FakeEngine::new(counting).with_head(counting, 0.0005);
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        config.speculation.gain_min = 0.0;
        config.speculation.drafter.depth = 4;
        config.speculation.drafter.tokens_max = 4;
    })
    .await;
    assert_eq!(bench.figure(IN_USE), 0.0);
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 800)).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 800));
    // 64 plain steps, then five tokens a step, but for pauses.
    assert!(
        received.steps < 64 + 800 / 5 + 40,
        "{} steps",
        received.steps
    );
    assert_eq!(bench.figure(IN_USE), 1.0);
    let gain = bench.figure(GAIN);
    assert!((gain - 5.0 / 1.5).abs() < 0.2, "{gain}");
    let accepted =
        bench.figure("refrain_self_draft_accepted_length{model=\"fake\",source=\"eagle3\"}");
    assert!((4.8..=5.0).contains(&accepted), "{accepted}");
    // The threshold follows it, and what its steps cost more than others.
    let threshold = bench.figure("refrain_spec_threshold{model=\"fake\"}");
    assert!((threshold - accepted / 1.5).abs() < 1e-5, "{threshold}");
    assert!(bench.decisions("plain", "not_paying") >= 60.0);
    assert!(bench.decisions("eagle3", "probe") >= 8.0);
    assert!(bench.decisions("eagle3", "no_match") > 100.0);
    let steps = received
        .sources
        .iter()
        .filter(|source| **source == DraftSource::Eagle3);
    let series = |name: &str| {
        bench.figure(&format!(
            "refrain_spec_{name}_total{{model=\"fake\",scope=\"none\",source=\"eagle3\"}}"
        ))
    };
    assert_eq!(series("steps"), steps.count() as f64);
    assert!(series("accepted_tokens") >= 0.9 * series("drafted_tokens"));
    let drafting = bench.figure("refrain_engine_draft_seconds_total{model=\"fake\"}");
    assert!(
        (drafting - 0.0005 * series("steps")).abs() < 1e-6,
        "{drafting}"
    );
    eventually("a heartbeat tells of it", || {
        let last = bench.scheduler.last.lock().unwrap();
        let report = last.as_ref().and_then(|heartbeat| heartbeat.eagle3);
        report.is_some_and(|report| report.accepted_length > 4.0 && report.speedup > 3.0)
    })
    .await;
}

#[tokio::test]
async fn a_head_that_loses_is_tried_and_left() {
    let engine = FakeEngine::new(counting).with_head(wrong, 0.001);
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
    })
    .await;
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    assert_eq!(received.steps, 900);
    let tried = received
        .sources
        .iter()
        .filter(|source| **source == DraftSource::Eagle3);
    let tried = tried.count();
    // Each of these steps lost a millisecond.
    assert!((3..=12).contains(&tried), "{tried} steps");
    assert_eq!(bench.decisions("eagle3", "probe"), tried as f64);
    assert_eq!(bench.figure(IN_USE), 0.0);
    let gain = bench.figure(GAIN);
    assert!((gain - 0.5).abs() < 0.05, "{gain}");
    assert_eq!(bench.figure("refrain_spec_threshold{model=\"fake\"}"), 1.0);
    let last = bench.scheduler.last.lock().unwrap();
    let report = last.as_ref().and_then(|heartbeat| heartbeat.eagle3);
    assert_eq!(report.map(|report| report.speedup), Some(1.0));
}

#[tokio::test]
async fn a_head_that_stops_paying_goes_out_of_use() {
    /// Loses the thread after a while.
    fn forgetful(text: &[TokenId]) -> TokenId {
        if text.len() < 500 {
            counting(text)
        } else {
            999
        }
    }
    let engine = FakeEngine::new(counting).with_head(forgetful, 0.001);
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        config.speculation.gain_min = 0.0;
    })
    .await;
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 900));
    assert!(
        bench.decisions("eagle3", "no_match") > 50.0,
        "it was in use"
    );
    assert!(
        bench.decisions("plain", "pause") >= 3.0,
        "it was compared again"
    );
    assert_eq!(bench.figure(IN_USE), 0.0);
    assert_eq!(received.sources.last(), Some(&DraftSource::None));
    eventually("heartbeats no longer tell of a gain", || {
        let last = bench.scheduler.last.lock().unwrap();
        let report = last.as_ref().and_then(|heartbeat| heartbeat.eagle3);
        report.is_some_and(|report| report.speedup == 1.0)
    })
    .await;
}

#[tokio::test]
async fn a_head_in_use_yields_to_better_suffix_drafts() {
    // The head brings two tokens a step, and text that was emitted before up to seventeen.
    let engine = FakeEngine::new(counting).with_head(counting, 0.0);
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        config.speculation.gain_min = 0.0;
        config.speculation.drafter.depth = 1;
        // Only a long match may draft more than that.
        config.speculation.alpha = Setting::Fixed(0.25);
    })
    .await;
    let first = run(&bench, chunk(&bench, &[1, 2, 3], 400)).await;
    assert!(first.sources.contains(&DraftSource::Eagle3));
    assert!(!first.sources.contains(&DraftSource::Suffix));
    let again = run(&bench, chunk(&bench, &[1, 2, 3], 400)).await;
    assert_eq!(again.tokens, first.tokens);
    assert!(again.sources.contains(&DraftSource::Suffix));
    assert!(
        bench.decisions("eagle3", "below_threshold") > 0.0,
        "short matches go to the head"
    );
    assert!(again.steps < 100, "{} steps", again.steps);
}

#[tokio::test]
async fn a_session_that_is_opened_again_keeps_its_head() {
    let engine = FakeEngine::new(counting).with_head(counting, 0.0);
    let bench = bench(engine, |_| {}).await;
    bench.engine.amnesia.store(2, Ordering::Relaxed);
    let mut request = chunk(&bench, &[1, 2, 3], 60);
    request.speculation = Speculation::Eagle3;
    let received = run(&bench, request).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 60));
    let opened = bench.engine.opened.lock().unwrap().clone();
    assert!(opened.len() >= 2, "{opened:?}");
    assert!(opened.iter().all(|self_drafts| *self_drafts));
}

const IN_USE: &str = "refrain_self_draft_in_use{batch=\"1\",model=\"fake\",source=\"eagle3\"}";
const GAIN: &str = "refrain_self_draft_gain_ratio{batch=\"1\",model=\"fake\",source=\"eagle3\"}";

#[tokio::test]
async fn a_head_that_pays_does_not_make_suffix_drafts_look_bad() {
    // Nothing is emitted twice at first, so the head serves; then all of it is emitted again.
    let mut engine = FakeEngine::new(counting).with_head(counting, 0.0005);
    engine.verify_s = 0.000_01;
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        config.speculation.drafter.depth = 3;
        config.speculation.drafter.tokens_max = 3;
    })
    .await;
    let first = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    assert!(first.sources.contains(&DraftSource::Eagle3));
    assert_eq!(bench.figure(IN_USE), 1.0);
    assert_eq!(bench.decisions("eagle3", "suffix_not_paying"), 0.0);
    for _ in 0..8 {
        let again = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
        assert_eq!(again.tokens, first.tokens);
    }
    let used = bench.decisions("suffix", "above_threshold");
    let held_back: f64 = ["eagle3", "plain"]
        .map(|route| bench.decisions(route, "suffix_not_paying"))
        .iter()
        .sum();
    assert!(
        used > 300.0 && held_back <= 24.0,
        "{used} used, {held_back} held back"
    );
}
