//! The goodput router over a scripted engine, whose steps take the planned time: what is drafted, and what
//! all of it takes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{ChunkRequest, DraftSource, Priority, Speculation, Urgency};
use refrain_speculation::draft::Setting;
use refrain_worker::{RouterChoice, SpeculationConfig};

use crate::bench::*;
use crate::fakes::{FakeEngine, Target};

/// A few tokens in no order: what followed before says nothing of what follows.
fn misleading(text: &[TokenId]) -> TokenId {
    let mixed = (text.len() as u32 ^ 0x9e37).wrapping_mul(0x9e37_79b1);
    1 + (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77) % 23
}

/// Says the same eight tokens again and again, but for every third time, when it goes astray after five of them.
fn half_repetitive(text: &[TokenId]) -> TokenId {
    let at = text.len() as u32;
    if at / 8 % 3 == 2 && at % 8 > 4 {
        100 + misleading(text)
    } else {
        1 + at % 8
    }
}

/// Draft tokens verified and accepted, and seconds of engine steps, of `count` requests at once.
async fn serve(
    target: Target,
    verify_s: f64,
    count: usize,
    change: fn(&mut SpeculationConfig),
) -> (f64, f64, f64, Bench) {
    let mut engine = FakeEngine::new(target);
    engine.verify_s = verify_s;
    let bench = bench(engine, |config| change(&mut config.speculation)).await;
    let prompts: Vec<Vec<TokenId>> = (0..count as u32).map(|n| (0..3 + n).collect()).collect();
    let runs = prompts.iter().map(|prompt| {
        let bench = &bench;
        async move { (prompt, run(bench, chunk(bench, prompt, 1500)).await) }
    });
    for (prompt, received) in futures_util::future::join_all(runs).await {
        assert_eq!(received.tokens, plainly(target, prompt, 1500));
    }
    let sum = |name: &str| -> f64 {
        ["request", "group", "tenant"]
            .map(|scope| {
                bench.figure(&format!(
                    "refrain_spec_{name}_tokens_total{{model=\"fake\",scope=\"{scope}\",source=\"suffix\"}}"
                ))
            })
            .iter()
            .sum()
    };
    let seconds = bench.figure("refrain_engine_step_seconds_total{model=\"fake\"}");
    (sum("drafted"), sum("accepted"), seconds, bench)
}

fn off(config: &mut SpeculationConfig) {
    config.router = RouterChoice::Score;
    config.score_threshold = Setting::Fixed(f32::INFINITY);
}

/// The rule of SuffixDecoding, with its own drafts.
fn score(config: &mut SpeculationConfig) {
    config.router = RouterChoice::Score;
    config.alpha = Setting::Fixed(15.0);
    config.min_token_prob = Setting::Fixed(0.06);
    config.gain_min = 0.0;
}

/// The same rule, with drafts by what is learnt.
fn score_by_learnt(config: &mut SpeculationConfig) {
    score(config);
    config.alpha = Setting::Auto;
    config.min_token_prob = Setting::Auto;
}

/// No guard: what the router does by itself.
fn goodput(config: &mut SpeculationConfig) {
    config.gain_min = 0.0;
}

#[tokio::test]
async fn where_tokens_are_dear_hardly_any_is_drafted() {
    let (drafted, _, seconds, bench) = serve(misleading, 0.001, 1, goodput).await;
    let (_, _, plain, _) = serve(misleading, 0.001, 1, off).await;
    assert!(drafted < 90.0, "{drafted} drafted");
    assert!(seconds < 1.06 * plain, "{seconds} s against {plain} s");
    assert!(bench.decisions("plain", "over_budget") > 200.0);
    // A request that asks for drafts gets them all the same.
    let mut asked = chunk(&bench, &[1, 2, 3], 50);
    asked.speculation = Speculation::Suffix;
    let received = run(&bench, asked).await;
    assert!(received.sources.contains(&DraftSource::Suffix));
}

#[tokio::test]
async fn the_batch_decides_which_drafts_are_worth_it() {
    // A draft token takes a tenth of what a step takes: the sure ones pay, the others do not.
    for count in [1, 4, 8] {
        let (drafted, accepted, seconds, bench) =
            serve(half_repetitive, 0.000_1, count, goodput).await;
        let (_, _, by_score, _) = serve(half_repetitive, 0.000_1, count, score).await;
        let (_, _, by_learnt, _) = serve(half_repetitive, 0.000_1, count, score_by_learnt).await;
        assert!(
            by_learnt < 0.98 * by_score,
            "{count} at once: {by_learnt} s, by counts {by_score} s"
        );
        let (_, _, plain, _) = serve(half_repetitive, 0.000_1, count, off).await;
        assert!(
            seconds < 0.98 * by_score && seconds < 0.97 * plain,
            "{count} at once: {seconds} s, by score {by_score} s, plain {plain} s"
        );
        // About as many tokens were accepted as the router expected. The text goes astray in a fixed rhythm, so its
        // drafts are believed most just before they fail.
        let series = |name: &str| {
            bench.figure(&format!(
                "refrain_spec_{name}_total{{model=\"fake\",source=\"suffix\"}}"
            ))
        };
        let expected = series("expected_tokens");
        assert_eq!(series("expected_accepted_tokens"), accepted);
        assert!(
            (expected / accepted - 1.0).abs() < 0.2,
            "{count} at once: {expected} expected, {accepted} accepted of {drafted}"
        );
        let slots = |outcome: &str| {
            bench.figure(&format!(
                "refrain_spec_budget_tokens_total{{model=\"fake\",outcome=\"{outcome}\"}}"
            ))
        };
        assert_eq!(slots("admitted"), drafted);
        assert!(slots("refused") > 0.0);
        let error = bench.figure("refrain_engine_step_cost_error_ratio{model=\"fake\"}");
        assert!(error < 0.1, "{error}");
    }
}

#[tokio::test]
async fn above_a_size_of_batch_nothing_is_drafted_and_all_of_it_is_remembered() {
    let small_batches_only = |config: &mut SpeculationConfig| config.off_above_batch = 1;
    let (_, _, _, bench) = serve(repetitive, 0.0, 4, small_batches_only).await;
    assert!(bench.decisions("plain", "large_batch") > 100.0);
    let received = run(&bench, chunk(&bench, &[0, 1, 2], 400)).await;
    assert!(received.steps < 200, "{} steps", received.steps);
}

#[tokio::test]
async fn a_head_that_disappointed_is_tried_again_and_less_and_less_often() {
    /// Knows nothing of how a text begins.
    fn late(text: &[TokenId]) -> TokenId {
        if text.len() < 300 {
            999
        } else {
            counting(text)
        }
    }
    let with_head = |head: Target| FakeEngine::new(counting).with_head(head, 0.000_3);
    let late_head = bench(with_head(late), |_| {}).await;
    run(&late_head, chunk(&late_head, &[1, 2, 3], 290)).await;
    let doubted = late_head.decisions("eagle3", "probe");
    assert!((3.0..=30.0).contains(&doubted), "{doubted} trials");
    assert!(late_head.decisions("plain", "over_budget") > 200.0);
    // It knows the rest, and comes to be believed.
    run(&late_head, chunk(&late_head, &[1, 2, 3, 4], 1900)).await;
    let believed = late_head.decisions("eagle3", "within_budget");
    assert!(believed > 50.0, "{believed} drafts");
    // One that never knows costs little.
    let wrong = bench(with_head(|_| 999), |_| {}).await;
    run(&wrong, chunk(&wrong, &[1, 2, 3], 1900)).await;
    let trials = wrong.decisions("eagle3", "probe");
    assert!(trials < 40.0, "{trials} trials");
}

#[tokio::test]
async fn a_head_in_use_shares_the_budget_with_suffix_drafts() {
    // The head always knows, at a third of a step per draft; earlier outputs come for nothing.
    let mut engine = FakeEngine::new(counting).with_head(counting, 0.000_3);
    engine.verify_s = 0.000_01;
    let bench = bench(engine, |config| {
        config.speculation.gain_min = 0.0;
        config.speculation.drafter.depth = 3;
        config.speculation.drafter.tokens_max = 3;
    })
    .await;
    let first = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    assert!(bench.decisions("eagle3", "within_budget") > 100.0);
    assert!(first.steps < 450, "{} steps", first.steps);
    let again = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    assert_eq!(again.tokens, first.tokens);
    assert!(bench.decisions("suffix", "within_budget") > 40.0);
    assert!(again.steps < 150, "{} steps", again.steps);
    let series = |name: &str| {
        bench.figure(&format!(
            "refrain_spec_{name}_total{{model=\"fake\",source=\"eagle3\"}}"
        ))
    };
    let (expected, accepted) = (
        series("expected_tokens"),
        series("expected_accepted_tokens"),
    );
    assert!(
        (expected / accepted - 1.0).abs() < 0.1,
        "{expected} expected, {accepted} accepted"
    );
}

/// Pseudo-random bits of a place in a text.
fn bit(text: &[TokenId], salt: u32) -> u32 {
    let key = text[0] * 7919 + text.len() as u32 * 104_729 + salt * 1_299_709;
    let mixed = (key ^ (key >> 15)).wrapping_mul(0x2c1b_3c6d);
    (mixed ^ (mixed >> 12)).wrapping_mul(0x297a_2d39) >> 31
}

/// One of two tokens at each place; which, only the first token of the text tells.
fn forking(text: &[TokenId]) -> TokenId {
    2 * (1 + text.len() as u32 % 400) + bit(text, 1)
}

/// Knows about half of them.
fn guessing(text: &[TokenId]) -> TokenId {
    forking(text) ^ bit(text, 2)
}

#[tokio::test]
async fn where_either_draft_is_often_wrong_both_are_verified_as_one_tree() {
    let serve = |merging: bool| async move {
        let mut engine = FakeEngine::new(forking).with_head(guessing, 0.000_1);
        engine.verify_s = 0.000_01;
        engine.capabilities.tree_drafts = merging;
        let bench = bench(engine, |config| {
            config.speculation.gain_min = 0.0;
            config.speculation.drafter.depth = 3;
            config.speculation.drafter.tokens_max = 3;
        })
        .await;
        let mut steps = 0;
        for first in 2..14 {
            let received = run(&bench, chunk(&bench, &[first, 1, 2], 390)).await;
            assert_eq!(received.tokens, plainly(forking, &[first, 1, 2], 390));
            steps += if first < 8 { 0 } else { received.steps };
        }
        (bench, steps)
    };
    let (apart, steps_apart) = serve(false).await;
    assert_eq!(apart.decisions("merged", "within_budget"), 0.0);
    let (bench, steps) = serve(true).await;
    let merged = bench.decisions("merged", "within_budget");
    assert!(merged > 200.0, "{merged} merged trees");
    // Two independent drafts bring more tokens together than the better one alone.
    assert!(
        (steps as f64) < 0.93 * steps_apart as f64,
        "{steps} steps, {steps_apart} with one draft at a time"
    );
    // The accepted and the expected tokens of each source are counted.
    let series = |name: &str, labels: &str| {
        let name = format!("refrain_spec_{name}_total{{model=\"fake\",{labels}}}");
        bench.figure(&name)
    };
    for (source, scope) in [("eagle3", "none"), ("suffix", "tenant")] {
        let labels = format!("scope=\"{scope}\",source=\"{source}\"");
        assert!(series("accepted_tokens", &labels) > 100.0);
        let source = format!("source=\"{source}\"");
        let expected = series("expected_tokens", &source);
        let accepted = series("expected_accepted_tokens", &source);
        assert!(
            (expected / accepted - 1.0).abs() < 0.2,
            "{source}: {expected} expected, {accepted} accepted"
        );
    }
}

#[tokio::test]
async fn the_engine_is_measured_before_the_first_request_and_left_as_it_was() {
    let bench = bench(FakeEngine::new(counting), |config| {
        config.profile_ms_max = 60_000;
    })
    .await;
    // One that opens the session, and two of each size up to the 64 tokens of a step.
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), 15);
    assert_eq!(bench.engine.closed.load(Ordering::Relaxed), 1);
    // They are nobody's steps.
    let shown = "refrain_engine_step_seconds_total{model=\"fake\"}";
    assert_eq!(bench.figure(shown), 0.0);
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 60)).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 60));
}

#[tokio::test]
async fn an_engine_that_fails_its_measurement_is_measured_by_requests() {
    let engine = FakeEngine::new(counting);
    engine.failures.store(1, Ordering::Relaxed);
    let bench = bench(engine, |config| config.profile_ms_max = 60_000).await;
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 60)).await;
    assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 60));
}

#[tokio::test]
async fn an_engine_too_slow_to_be_measured_keeps_nobody_waiting() {
    let mut engine = FakeEngine::new(counting);
    engine.step_time = Duration::from_secs(3600);
    let bench = bench(engine, |config| config.profile_ms_max = 1).await;
    assert_eq!(bench.engine.steps.load(Ordering::Relaxed), 0);
    assert_eq!(bench.worker.handle().readiness(), Ok(()));
}

/// Steps of a request with these hints and of one without any, which share every step and have the same to draft.
async fn steps_beside_another(bench: &Bench, urgency: Urgency) -> (u64, u64) {
    let request = |urgency| ChunkRequest {
        prediction: plainly(counting, &[1, 2, 3], 240),
        urgency,
        ..chunk(bench, &[1, 2, 3], 240)
    };
    let (hinted, other) = tokio::join!(
        run(bench, request(urgency)),
        run(bench, request(Urgency::default()))
    );
    // Hints change no output.
    assert_eq!(hinted.tokens, plainly(counting, &[1, 2, 3], 240));
    assert_eq!(other.tokens, hinted.tokens);
    (hinted.steps, other.steps)
}

#[tokio::test]
async fn hints_say_whose_drafts_come_first() {
    let mut engine = FakeEngine::new(counting);
    // One that wants a token every millisecond would need all of a step and more.
    engine.step_time = Duration::from_millis(16);
    let bench = bench(engine, |config| config.step_tokens_max = 16).await;
    let hints = |priority, tpot_ms| Urgency { priority, tpot_ms };
    steps_beside_another(&bench, Urgency::default()).await;
    let same = steps_beside_another(&bench, Urgency::default()).await;
    assert!(same.0.abs_diff(same.1) <= 3, "{same:?}");
    let high = steps_beside_another(&bench, hints(Priority::High, None)).await;
    assert!(high.0 * 4 < high.1 * 3, "{high:?}");
    let low = steps_beside_another(&bench, hints(Priority::Low, None)).await;
    assert!(low.1 * 4 < low.0 * 3, "{low:?}");
    let behind = steps_beside_another(&bench, hints(Priority::Normal, Some(1))).await;
    assert!(behind.0 * 4 < behind.1 * 3, "{behind:?}");
    let ahead = steps_beside_another(&bench, hints(Priority::Normal, Some(60_000))).await;
    assert!(ahead.0.abs_diff(ahead.1) <= 3, "{ahead:?}");
}
