//! How long drafts are, by the configuration, by the engine and by the number of requests.

use refrain_speculation::draft::Setting;

use super::*;
use crate::SpeculationConfig;

/// A request whose prompt ends with ten tokens that stood before, and forty that followed them then.
fn rig(speculation: SpeculationConfig) -> Rig {
    let rig = Rig::new(|config| config.speculation = speculation);
    rig.begin("a", &[text(0, 50), text(0, 10)].concat(), None);
    rig
}

fn drafted(rig: &Rig, engine: EngineRules) -> usize {
    let drafts = rig.proposer.propose(vec![("a".into(), 1_000)], &engine);
    drafts[0].tokens.len()
}

fn stepped(rig: &Rig) -> usize {
    let step = RequestStep {
        request: "a".into(),
        emitted: Vec::new(),
        draft_tokens_max: 1_000,
        engine_draft: Vec::new(),
    };
    let drafts = rig.proposer.step(vec![step]);
    drafts[0].as_ref().map_or(0, Vec::len)
}

#[test]
fn configured_rules_hold_in_both_calls() {
    let cases: [(SpeculationConfig, usize); 5] = [
        (
            SpeculationConfig {
                alpha: Setting::Fixed(0.5),
                ..SpeculationConfig::default()
            },
            5,
        ),
        (
            SpeculationConfig {
                alpha: Setting::Fixed(2.0),
                ..SpeculationConfig::default()
            },
            20,
        ),
        (
            SpeculationConfig {
                max_spec_tokens: 7,
                ..SpeculationConfig::default()
            },
            7,
        ),
        (
            SpeculationConfig {
                alpha: Setting::Fixed(1.0),
                match_tokens_max: 4,
                ..SpeculationConfig::default()
            },
            4,
        ),
        // A single copy is worth a half.
        (
            SpeculationConfig {
                min_token_prob: Setting::Fixed(0.6),
                ..SpeculationConfig::default()
            },
            0,
        ),
    ];
    for (speculation, tokens) in cases {
        let rig = rig(speculation.clone());
        let both = (drafted(&rig, EngineRules::default()), stepped(&rig));
        assert_eq!(both, (tokens, tokens), "{speculation:?}");
    }
}

#[test]
fn what_an_engine_sets_comes_before_the_configuration() {
    let rig = rig(SpeculationConfig {
        alpha: Setting::Fixed(1.0),
        max_spec_tokens: 30,
        ..SpeculationConfig::default()
    });
    let engine = |change: fn(&mut EngineRules)| {
        let mut engine = EngineRules::default();
        change(&mut engine);
        drafted(&rig, engine)
    };
    assert_eq!(engine(|_| {}), 10);
    assert_eq!(engine(|of| of.alpha = Some(2.5)), 25);
    assert_eq!(engine(|of| of.offset = 3.0), 13);
    assert_eq!(engine(|of| of.alpha = Some(40.0)), 30);
    assert_eq!(engine(|of| of.min_token_prob = Some(0.6)), 0);
    assert_eq!(engine(|of| of.match_plus_draft_max = Some(12)), 6);
}

#[test]
fn auto_follows_the_number_of_requests_unless_a_step_is_padded() {
    let rig = rig(SpeculationConfig::default());
    assert_eq!(drafted(&rig, EngineRules::default()), 50);
    for other in 0..24 {
        rig.begin(&format!("other {other}"), &[1], None);
    }
    // alpha is 2.2 for 25 requests.
    assert_eq!(drafted(&rig, EngineRules::default()), 22);
    assert_eq!(stepped(&rig), 22);
    let padded = EngineRules {
        is_padded: true,
        ..EngineRules::default()
    };
    assert_eq!(drafted(&rig, padded), 50);
}
