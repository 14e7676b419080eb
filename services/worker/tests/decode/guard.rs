//! Suffix drafts are held back where they make steps longer than they are worth, and used where they pay.

use std::time::Duration;

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftSource, Speculation};
use refrain_speculation::draft::Setting;
use refrain_speculation::router::GainParams;
use refrain_worker::RouterChoice;

use crate::bench::*;
use crate::fakes::FakeEngine;

/// A few tokens in no order: what followed before says nothing of what follows.
fn misleading(text: &[TokenId]) -> TokenId {
    let mixed = (text.len() as u32 ^ 0x9e37).wrapping_mul(0x9e37_79b1);
    1 + (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77) % 23
}

const IN_USE: &str = "refrain_spec_in_use{batch=\"1\",model=\"fake\"}";

#[tokio::test]
async fn drafts_that_cost_more_than_they_bring_are_held_back() {
    let mut engine = FakeEngine::new(misleading);
    engine.verify_s = 0.001;
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        // Drafts whatever they cost: what is learnt would leave these out.
        config.speculation.alpha = Setting::Fixed(1.0);
        config.speculation.min_token_prob = Setting::Fixed(0.1);
    })
    .await;
    let received = run(&bench, chunk(&bench, &[1, 2, 3], 1500)).await;
    assert_eq!(received.tokens, plainly(misleading, &[1, 2, 3], 1500));
    assert_eq!(bench.figure(IN_USE), 0.0);
    assert!(bench.decisions("plain", "suffix_not_paying") > 100.0);
    // A request that asks for drafts gets them all the same.
    let mut asked = chunk(&bench, &[1, 2, 3], 50);
    asked.speculation = Speculation::Suffix;
    let received = run(&bench, asked).await;
    assert!(received.sources.contains(&DraftSource::Suffix));
}

#[tokio::test]
async fn drafts_that_pay_stay_but_for_a_look_at_what_goes_without() {
    let mut engine = FakeEngine::new(counting);
    engine.verify_s = 0.000_01;
    engine.step_time = Duration::from_millis(1);
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        // The first request is all plain, and the others hardly, which makes a large error.
        config.speculation.gain = GainParams {
            warm_up: Duration::ZERO,
            window: Duration::from_secs(24),
            error_max: 100.0,
            ..GainParams::default()
        };
    })
    .await;
    // The first time there is nothing to draft from, and going without is no loss.
    run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
    let before = bench.decisions("plain", "suffix_not_paying");
    for _ in 0..10 {
        let received = run(&bench, chunk(&bench, &[1, 2, 3], 900)).await;
        assert_eq!(received.tokens, plainly(counting, &[1, 2, 3], 900));
    }
    assert_eq!(bench.figure(IN_USE), 1.0);
    let held_back = bench.decisions("plain", "suffix_not_paying") - before;
    let used = bench.decisions("suffix", "above_threshold");
    assert!(
        (1.0..=16.0).contains(&held_back) && used > 400.0,
        "{used} used, {held_back} held back"
    );
    let gain = |family: &str| {
        bench.figure(&format!(
            "refrain_spec_gain_{family}{{batch=\"1\",model=\"fake\"}}"
        ))
    };
    assert!(gain("ratio") > 2.0 && gain("error_ratio") > 0.0);
}

#[tokio::test]
async fn a_gain_of_nothing_never_holds_back() {
    let mut engine = FakeEngine::new(misleading);
    engine.verify_s = 0.001;
    let bench = bench(engine, |config| {
        config.speculation.router = RouterChoice::Score;
        config.speculation.gain_min = 0.0;
    })
    .await;
    run(&bench, chunk(&bench, &[1, 2, 3], 600)).await;
    assert_eq!(bench.decisions("plain", "suffix_not_paying"), 0.0);
    // Nothing of the first minute is evidence of a gain.
    let page = String::from_utf8(bench.metrics.render()).unwrap();
    assert!(!page.contains("refrain_spec_gain_"), "{page}");
}
