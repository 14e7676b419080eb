//! Tests of limits and of refused requests.

use refrain_protocol::engine::{CloseRequest, Draft, Sampling, SessionSpec, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, ErrorKind, NamespaceId};

use crate::config::EngineConfig;

use super::support::{Random, VOCAB, chain, engine, item, opening};

#[test]
fn batches_over_a_limit_are_refused_whole() {
    let config = EngineConfig {
        max_batch: 2,
        max_step_tokens: 20,
        max_draft_tokens: 8,
        ..EngineConfig::default()
    };
    let mut engine = engine(config);
    let greedy = Sampling::default();
    let now = engine.now;
    let mut refused =
        |items: Vec<StepItem>| engine.core.step(StepRequest { items }, now).unwrap_err();
    let three = (1..=3).map(|id| opening(id, &greedy, &[1])).collect();
    assert_eq!(refused(three).code.as_deref(), Some("batch_too_large"));
    let tokens = Random(1).tokens(15);
    let long = StepItem {
        draft: Some(chain(&tokens[..6])),
        ..opening(1, &greedy, &tokens)
    };
    assert_eq!(refused(vec![long]).code.as_deref(), Some("step_too_large"));
    let twice = vec![opening(1, &greedy, &[1]), opening(1, &greedy, &[1])];
    assert!(refused(twice).message.contains("twice"));
    assert!(engine.steps(Vec::new()).is_empty());
    assert_eq!(engine.core.sessions().counts(), (0, 0));
}

#[test]
fn a_faulty_item_leaves_the_others_alone() {
    let mut engine = engine(EngineConfig {
        max_draft_tokens: 2,
        ..EngineConfig::default()
    });
    let greedy = Sampling::default();
    engine.step(opening(1, &greedy, &[1, 2, 3]));
    engine.step(opening(2, &greedy, &[1, 2, 3]));
    let prompt = Random(1).tokens(200);
    let draft = |tokens: &[u32], parents: &[Option<u32>]| {
        Some(Draft {
            tokens: tokens.to_vec(),
            parents: parents.to_vec(),
        })
    };
    let cases = [
        (item(9, 0, &[1]), ErrorKind::NotFound, "open it again"),
        (
            item(1, 5, &[1]),
            ErrorKind::InvalidRequest,
            "keep_len is 5, but the text has only 4 tokens",
        ),
        (item(1, 0, &[]), ErrorKind::InvalidRequest, "not be empty"),
        (
            item(1, 2, &[VOCAB]),
            ErrorKind::InvalidRequest,
            "outside the vocabulary",
        ),
        (
            StepItem {
                draft: draft(&[VOCAB], &[None]),
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "vocabulary",
        ),
        (
            StepItem {
                draft: draft(&[1, 2, 3], &[None; 3]),
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "the draft has 3 nodes",
        ),
        (
            StepItem {
                draft: draft(&[1, 2], &[None]),
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "as long as",
        ),
        (
            StepItem {
                draft: draft(&[1], &[Some(0)]),
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "before its parent",
        ),
        (
            StepItem {
                draft: draft(&[1, 1], &[None; 2]),
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "repeats",
        ),
        (
            StepItem {
                draft: draft(&[1], &[None]),
                sample: false,
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "`sample`",
        ),
        (
            StepItem {
                max_emit: 0,
                ..item(1, 2, &[])
            },
            ErrorKind::InvalidRequest,
            "max_emit",
        ),
        (
            opening(1, &greedy, &[1]),
            ErrorKind::Conflict,
            "already open",
        ),
        (
            StepItem {
                keep_len: 1,
                ..opening(8, &greedy, &[1])
            },
            ErrorKind::InvalidRequest,
            "keep_len",
        ),
        (
            opening(8, &greedy, &prompt),
            ErrorKind::InvalidRequest,
            "200 tokens",
        ),
        (
            opening(
                8,
                &Sampling {
                    top_p: 2.0,
                    ..Sampling::default()
                },
                &[1],
            ),
            ErrorKind::InvalidRequest,
            "top_p",
        ),
    ];
    for (faulty, kind, words) in cases {
        let results = engine.steps(vec![
            faulty,
            StepItem {
                max_emit: 1,
                ..item(2, 4, &[])
            },
        ]);
        let error = results[0].as_ref().unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.message.contains(words), "{error}");
        assert_eq!(results[1].as_ref().unwrap().text_len, 5);
        assert_eq!(engine.core.sessions().counts(), (2, 0));
    }
    assert_eq!(engine.step(item(1, 4, &[])).text_len, 5);
}

#[test]
fn the_context_limit_cuts_outputs_and_refuses_longer_texts() {
    let mut engine = engine(EngineConfig {
        max_context: Some(20),
        ..EngineConfig::default()
    });
    let text = Random(1).tokens(18);
    let truth = engine.decode(1, &Sampling::default(), &text, 2);
    let error = engine.try_step(item(1, 20, &[])).unwrap_err();
    assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
    // A draft that reaches past the limit is not an error.
    let draft = Some(chain(&[truth[0], truth[1], 3, 4]));
    let output = engine.step(StepItem {
        draft,
        ..opening(2, &Sampling::default(), &text)
    });
    assert_eq!((output.emitted, output.text_len), (truth, 20));
}

#[test]
fn a_full_cache_refuses_and_recovers() {
    let mut engine = engine(EngineConfig {
        kv_tokens_max: 64,
        ..EngineConfig::default()
    });
    let greedy = Sampling::default();
    let text = Random(1).tokens(33);
    engine.step(opening(1, &greedy, &text));
    let other = Random(2).tokens(10);
    let error = engine.try_step(opening(2, &greedy, &other)).unwrap_err();
    assert_eq!(
        (error.kind, error.code.as_deref()),
        (ErrorKind::Overloaded, Some("engine_kv_full"))
    );
    assert!(error.retry_after_ms.is_some());
    assert_eq!(engine.core.sessions().counts(), (1, 0));
    // A session that cannot grow stays open.
    let error = engine.try_step(item(1, 32, &text)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Overloaded);
    engine.step(item(1, 32, &text[32..]));
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1)],
        keep_kv: true,
        parks: false,
    });
    engine.step(opening(2, &greedy, &other));
}

#[test]
fn reuse_is_reported_and_changes_nothing() {
    let mut engine = engine(EngineConfig::default());
    let sampling = Sampling {
        temperature: 0.9,
        seed: 4,
        ..Sampling::default()
    };
    let prompt = Random(1).tokens(80);
    let truth = engine.decode(1, &sampling, &prompt, 20);
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1)],
        keep_kv: true,
        parks: false,
    });
    let first = engine.step(opening(2, &sampling, &prompt));
    assert_eq!(
        (first.cached_tokens, first.emitted.as_slice()),
        (79, &truth[..1])
    );
    // The KV of an open session is reused by a text with another end.
    let mut longer = prompt[..50].to_vec();
    longer.extend(Random(2).tokens(20));
    assert_eq!(
        engine.step(opening(3, &sampling, &longer)).cached_tokens,
        50
    );
    // If the text comes in pieces, the later pieces are looked up too.
    let piece = StepItem {
        sample: false,
        ..opening(4, &sampling, &prompt[..10])
    };
    assert_eq!(engine.step(piece).cached_tokens, 9);
    let rest = engine.step(item(4, 10, &prompt[10..]));
    assert_eq!(
        (rest.cached_tokens, rest.emitted.as_slice()),
        (70, &truth[..1])
    );
    // Another namespace reuses nothing.
    let spec = SessionSpec {
        namespace: NamespaceId(2),
        sampling,
        prompt_len: prompt.len() as u32,
        ..SessionSpec::default()
    };
    let foreign = engine.step(StepItem {
        open: Some(spec),
        ..item(5, 0, &prompt)
    });
    assert_eq!(
        (foreign.cached_tokens, foreign.emitted.as_slice()),
        (0, &truth[..1])
    );
}
