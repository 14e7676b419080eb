//! How long drafts are, by the configuration, by the engine and by the number of requests.

use refrain_protocol::chunk::DraftRules;
use refrain_speculation::draft::Setting;

use super::*;
use crate::SpeculationConfig;

/// A request whose prompt ends with ten tokens that stood before, and forty that followed them then.
fn rig(speculation: SpeculationConfig) -> Rig {
    ruled(speculation, DraftRules::default())
}

/// The same with rules of the request.
fn ruled(speculation: SpeculationConfig, drafts: DraftRules) -> Rig {
    let rig = Rig::new(|config| config.speculation = speculation);
    let start = RequestStart {
        request: "a".into(),
        prompt: [text(0, 50), text(0, 10)].concat(),
        drafts,
        ..RequestStart::default()
    };
    rig.proposer.begin(start).unwrap();
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

/// Lets so many others run that alpha is 2.8 until something is learnt, and a token costs a fourth of its worth.
fn beside_others(rig: &Rig) {
    for other in 0..89 {
        rig.begin(&format!("other {other}"), &[1], None);
    }
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
    beside_others(&rig);
    assert_eq!(drafted(&rig, EngineRules::default()), 28);
    assert_eq!(stepped(&rig), 28);
    let padded = EngineRules {
        is_padded: true,
        ..EngineRules::default()
    };
    assert_eq!(drafted(&rig, padded), 50);
}

#[test]
fn rules_of_a_request_come_before_the_configuration_and_before_the_engine() {
    let configured = SpeculationConfig {
        alpha: Setting::Fixed(1.0),
        min_token_prob: Setting::Fixed(0.6),
        max_spec_tokens: 30,
        ..SpeculationConfig::default()
    };
    let drafts = |alpha, min_token_prob, max_spec_tokens| DraftRules {
        alpha,
        min_token_prob,
        max_spec_tokens,
    };
    for (rules, tokens) in [
        (drafts(None, None, None), 0),
        (drafts(None, Some(0.4), None), 10),
        (drafts(Some(2.0), Some(0.4), None), 20),
        // The limits of the configuration hold as well.
        (drafts(Some(9.0), Some(0.4), Some(40)), 30),
        (drafts(Some(9.0), Some(0.4), Some(4)), 4),
        (drafts(Some(9.0), Some(0.4), Some(0)), 0),
    ] {
        let rig = ruled(configured.clone(), rules);
        let both = (drafted(&rig, EngineRules::default()), stepped(&rig));
        assert_eq!(both, (tokens, tokens), "{rules:?}");
        // Another request of the same step has rules of its own, here none.
        rig.begin("b", &[text(0, 50), text(0, 10)].concat(), None);
        let both = vec![("b".into(), 1_000), ("a".into(), 1_000)];
        let both = rig.proposer.propose(both, &EngineRules::default());
        let both: Vec<usize> = both.iter().map(|draft| draft.tokens.len()).collect();
        assert_eq!(both, [0, tokens], "{rules:?}");
    }
    let rig = ruled(configured, drafts(Some(2.0), Some(0.4), None));
    let engine = EngineRules {
        alpha: Some(0.5),
        min_token_prob: Some(0.9),
        ..EngineRules::default()
    };
    assert_eq!(drafted(&rig, engine), 20);
    // A limit of the engine stays a limit, and so does the length of padding.
    let limited = EngineRules {
        match_plus_draft_max: Some(12),
        ..engine
    };
    assert_eq!(drafted(&rig, limited), 8);
    let padded = EngineRules {
        is_padded: true,
        ..EngineRules::default()
    };
    let drafts = rig.proposer.propose(vec![("a".into(), 7)], &padded);
    assert_eq!(drafts[0].tokens.len(), 7);
}

#[test]
fn drafts_of_the_engine_are_cut_to_the_most_tokens_of_a_request() {
    for (max_spec_tokens, kept) in [
        (None, None),
        (Some(9), None),
        (Some(2), Some(vec![900, 901])),
        (Some(0), Some(vec![])),
    ] {
        let rig = Rig::new(|_| {});
        let start = RequestStart {
            request: "a".into(),
            prompt: text(0, 10),
            drafts: DraftRules {
                max_spec_tokens,
                ..DraftRules::default()
            },
            ..RequestStart::default()
        };
        rig.proposer.begin(start).unwrap();
        let step = RequestStep {
            request: "a".into(),
            emitted: Vec::new(),
            draft_tokens_max: 16,
            engine_draft: vec![900, 901, 902],
        };
        assert_eq!(rig.proposer.step(vec![step]), [kept], "{max_spec_tokens:?}");
    }
}

#[test]
fn a_request_with_rules_out_of_range_is_counted_and_not_begun() {
    let rig = Rig::new(|_| {});
    let start = RequestStart {
        request: "a".into(),
        prompt: [text(0, 50), text(0, 10)].concat(),
        drafts: DraftRules {
            alpha: Some(-1.0),
            ..DraftRules::default()
        },
        ..RequestStart::default()
    };
    let error = rig.proposer.begin(start).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("alpha"));
    assert_eq!(rig.rejected(FIELDS), 1);
    assert_eq!(drafted(&rig, EngineRules::default()), 0);
}

/// The plugin learns from the tokens after its drafts, whether these were offered or not.
#[test]
fn drafts_that_fail_are_no_longer_offered_until_they_would_be_right() {
    let rig = rig(SpeculationConfig::default());
    beside_others(&rig);
    let prompt = [text(0, 50), text(0, 10)].concat();
    let known = text(0, 50);
    let after = |emitted: &[u32]| {
        rig.begin("a", &prompt, None);
        let tokens = drafted(&rig, EngineRules::default());
        rig.proposer.extend("a", emitted);
        rig.proposer.finish("a".into(), Some("stop"));
        tokens
    };
    assert_eq!(after(&[]), 28);
    // No draft was offered for these tokens, so nothing is learnt from them.
    for wrong in 0..8 {
        rig.begin("b", &prompt, None);
        rig.proposer.extend("b", &[8_000 + wrong]);
    }
    assert_eq!(after(&[]), 28);
    for wrong in 0..20 {
        after(&[9_000 + wrong]);
    }
    assert_eq!(after(&[]), 0);
    for _ in 0..40 {
        after(&known[10..20]);
    }
    assert!(after(&[]) > 9);
}
