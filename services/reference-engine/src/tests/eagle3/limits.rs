//! Tests of limits on a head's drafts and of a full KV cache.

use refrain_protocol::engine::{DrafterKind, Sampling, SelfDraft, StepItem, StepRequest};
use refrain_protocol::{ErrorKind, TokenId};
use refrain_service_kit::telemetry::Metrics;

use super::{drafting, opening_for_drafts, tiny_head, wanted};
use crate::config::EngineConfig;
use crate::service::EngineHandle;
use crate::tests::support::{
    Random, TestEngine, by_head, chain, engine, engine_with_head, item, opening, tiny,
};

/// Opens a session whose head can draft at once, and returns its text.
fn ready(config: EngineConfig) -> (TestEngine, Vec<TokenId>) {
    let mut engine = engine_with_head(tiny_head(), config);
    let mut text = Random(3).tokens(30);
    let output = engine.step(opening_for_drafts(1, &Sampling::default(), &text));
    assert_eq!(output.self_drafted, 0);
    text.extend(output.emitted);
    (engine, text)
}

#[test]
fn invalid_requests_are_refused_by_field() {
    let (mut engine, text) = ready(EngineConfig {
        max_draft_tokens: 20,
        ..EngineConfig::default()
    });
    engine.step(opening(2, &Sampling::default(), &text));
    let len = text.len();
    let cases = [
        (
            drafting(1, len, wanted(0, 1, 4)),
            "self_draft.depth",
            "depth is 0",
        ),
        (
            drafting(1, len, wanted(17, 1, 4)),
            "self_draft.depth",
            "1 to 16",
        ),
        (
            drafting(1, len, wanted(2, 0, 4)),
            "self_draft.top_k",
            "top_k is 0",
        ),
        (
            drafting(1, len, wanted(2, 17, 4)),
            "self_draft.top_k",
            "1 to 16",
        ),
        (
            drafting(1, len, wanted(2, 2, 21)),
            "self_draft.tokens_max",
            "0 to 20",
        ),
        (
            drafting(
                1,
                len,
                SelfDraft {
                    path_prob_min: f32::NAN,
                    ..wanted(2, 2, 4)
                },
            ),
            "self_draft.path_prob_min",
            "NaN",
        ),
        (
            drafting(
                1,
                len,
                SelfDraft {
                    sampled: true,
                    ..wanted(2, 2, 4)
                },
            ),
            "self_draft.sampled",
            "top_k must be 1",
        ),
        (
            StepItem {
                draft: Some(chain(&[1, 2, 3])),
                ..drafting(1, len, wanted(2, 2, 18))
            },
            "self_draft.tokens_max",
            "0 to 17",
        ),
        (
            StepItem {
                draft: Some(chain(&[1])),
                ..drafting(
                    1,
                    len,
                    SelfDraft {
                        sampled: true,
                        ..wanted(2, 1, 4)
                    },
                )
            },
            "self_draft.sampled",
            "cannot be merged",
        ),
        (
            StepItem {
                sample: false,
                ..drafting(1, len, wanted(2, 2, 4))
            },
            "self_draft",
            "`sample`",
        ),
        (
            drafting(2, len, wanted(2, 2, 4)),
            "self_draft",
            "without `self_drafts`",
        ),
    ];
    for (faulty, param, words) in cases {
        let error = engine.try_step(faulty).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidRequest);
        assert_eq!(error.param, Some(format!("items[0].{param}")), "{error}");
        assert!(error.message.contains(words), "{error}");
    }
    // The refused requests did not change the session.
    let output = engine.step(drafting(1, len, wanted(2, 2, 4)));
    assert_eq!(output.self_drafted, 4);
}

#[test]
fn an_engine_without_head_keeps_nothing_and_refuses() {
    let mut engine = engine(EngineConfig::default());
    let text = Random(3).tokens(30);
    let output = engine.step(opening_for_drafts(1, &Sampling::default(), &text));
    let len = output.text_len as usize;
    let error = engine
        .try_step(drafting(1, len, wanted(2, 2, 4)))
        .unwrap_err();
    assert!(error.message.contains("neither an EAGLE-3 head"), "{error}");
    assert_eq!(engine.core.sessions().state_tokens(), 0);
}

#[test]
fn own_drafts_count_in_the_limit_of_a_step() {
    let (mut engine, text) = ready(EngineConfig {
        max_step_tokens: 40,
        max_draft_tokens: 39,
        ..EngineConfig::default()
    });
    let now = engine.now;
    let items = vec![
        drafting(1, text.len(), wanted(2, 2, 30)),
        opening(2, &Sampling::default(), &text[..11]),
    ];
    let error = engine.core.step(StepRequest { items }, now).unwrap_err();
    assert_eq!(error.code.as_deref(), Some("step_too_large"));
    assert!(error.message.contains("has 41 tokens"), "{error}");
}

#[test]
fn nothing_is_drafted_that_cannot_be_emitted() {
    let config = || EngineConfig {
        max_context: Some(34),
        ..EngineConfig::default()
    };
    let draft = |max_emit: u32| {
        let (mut engine, text) = ready(config());
        let item = StepItem {
            max_emit,
            ..drafting(1, text.len(), wanted(6, 1, 6))
        };
        let request = StepRequest { items: vec![item] };
        let stepped = engine.core.step(request, engine.now).unwrap();
        let drafted = stepped.results[0].as_ref().unwrap().self_drafted;
        assert_eq!(
            stepped.draft_rows.draft,
            (drafted as usize).saturating_sub(1),
            "a level too much was computed"
        );
        drafted
    };
    assert_eq!(draft(1), 0);
    assert_eq!(draft(2), 1);
    // The text takes 31 of the 34 tokens.
    assert_eq!(draft(1000), 2);
}

#[test]
fn fewer_nodes_and_likelier_paths_cost_fewer_rows() {
    let rows = |wanted: SelfDraft| {
        let (mut engine, text) = ready(EngineConfig::default());
        let item = drafting(1, text.len(), wanted);
        let request = StepRequest { items: vec![item] };
        let stepped = engine.core.step(request, engine.now).unwrap();
        let drafted = stepped.results[0].as_ref().unwrap().self_drafted;
        assert_eq!(stepped.draft_rows.text, 30);
        (stepped.draft_rows.draft, drafted)
    };
    assert_eq!(rows(wanted(4, 3, 64)), (9, 30));
    let (few, drafted) = rows(wanted(4, 3, 3));
    assert!(few < 9 && drafted == 3, "{few} rows for {drafted} nodes");
    let likely = SelfDraft {
        path_prob_min: 0.999,
        ..wanted(4, 3, 64)
    };
    let (likely, drafted) = rows(likely);
    assert!(
        likely <= 3 && drafted <= 3,
        "{likely} rows, {drafted} nodes"
    );
    assert_eq!(rows(wanted(1, 3, 64)), (0, 3));
}

#[test]
fn heads_yield_to_targets_when_the_cache_is_full() {
    // There is room for one block of the target. A block of the head is smaller.
    let mut config = EngineConfig {
        kv_tokens_max: 32,
        ..EngineConfig::default()
    };
    let text = Random(3).tokens(20);
    let run = |config: &EngineConfig| {
        let mut engine = engine_with_head(tiny_head(), config.clone());
        engine.step(opening_for_drafts(1, &Sampling::default(), &text));
        let output = engine.step(drafting(1, 21, wanted(2, 2, 4)));
        (output.self_drafted, engine.core.sessions().kv_tokens().0)
    };
    assert_eq!(run(&config), (0, 32));
    config.kv_tokens_max = 64;
    let (drafted, used) = run(&config);
    assert!(drafted == 4 && used == 64, "{drafted} drafted, {used} used");
    // A target that needs the room takes it from the head, and no session is refused or closed.
    let mut engine = engine_with_head(tiny_head(), config);
    engine.step(opening_for_drafts(1, &Sampling::default(), &text));
    engine.step(drafting(1, 21, wanted(2, 2, 4)));
    engine.step(opening(2, &Sampling::default(), &Random(4).tokens(20)));
    assert_eq!(engine.core.sessions().counts(), (2, 0));
    assert_eq!(engine.core.sessions().kv_tokens().0, 64);
}

#[test]
fn states_are_bounded_per_session_and_counted() {
    let config = EngineConfig {
        eagle3_window_tokens: 40,
        ..EngineConfig::default()
    };
    let mut engine = engine_with_head(tiny_head(), config);
    let text = Random(3).tokens(150);
    let request = StepRequest {
        items: vec![opening_for_drafts(1, &Sampling::default(), &text)],
    };
    let stepped = engine.core.step(request, engine.now).unwrap();
    assert_eq!(stepped.states_dropped, 110);
    // 40 positions lie in two or three blocks.
    assert_eq!(engine.core.sessions().state_tokens(), 64);
    let request = StepRequest {
        items: vec![drafting(1, 151, wanted(2, 1, 2))],
    };
    let stepped = engine.core.step(request, engine.now).unwrap();
    assert_eq!((stepped.draft_rows.text, stepped.states_dropped), (40, 0));
    engine.step(opening(2, &Sampling::default(), &Random(9).tokens(60)));
    assert_eq!(engine.core.sessions().state_tokens(), 64);
}

#[tokio::test]
async fn capabilities_and_timings_include_the_head() {
    let engine = |head: Option<_>| {
        let (config, metrics) = (EngineConfig::default(), Metrics::new().unwrap());
        let network = head.map(by_head);
        EngineHandle::with_model(
            &config,
            &metrics,
            tiny(),
            network,
            "tiny".into(),
            None,
            Vec::new(),
        )
        .unwrap()
    };
    assert_eq!(engine(None).capabilities().drafter, None);
    let engine = engine(Some(tiny_head()));
    let head = engine.capabilities().drafter.unwrap();
    assert_eq!(
        (head.kind, head.depth_max, head.top_k_max),
        (DrafterKind::Eagle3, 16, 16)
    );
    let text = Random(3).tokens(30);
    for (next, drafts) in [
        (opening_for_drafts(1, &Sampling::default(), &text), false),
        (drafting(1, 31, wanted(3, 2, 8)), true),
        (item(1, 31, &[]), false),
    ] {
        let request = StepRequest { items: vec![next] };
        let response = engine.step(request).await.unwrap();
        assert_eq!(response.draft_s > 0.0, drafts);
        assert!(response.draft_s < response.step_s);
    }
}
