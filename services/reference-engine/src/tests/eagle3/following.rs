//! Tests that a head's drafts depend only on the text, not on the steps that led to it.

use std::time::Instant;

use refrain_protocol::engine::{CloseRequest, Draft, Sampling, SelfDraft, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, TokenId};

use super::{drafting, opening_for_drafts, tiny_head, wanted};
use crate::config::EngineConfig;
use crate::tests::support::{Random, TestEngine, chain, engine_with_head, item, opening};

/// A draft so wide that a wrong bit in the head's cache changes the order of its nodes.
const WIDE: SelfDraft = SelfDraft {
    depth: 4,
    top_k: 6,
    tokens_max: 50,
    path_prob_min: 0.0,
    sampled: false,
};

/// Runs a step, and returns the session's draft and the number of text rows that the head computed for it.
fn draft(engine: &mut TestEngine, session: u128, len: usize) -> (Draft, usize) {
    let request = StepRequest {
        items: vec![drafting(session, len, WIDE)],
    };
    let mut batch = engine.core.begin(request, engine.now).unwrap();
    engine.core.draft(&mut batch);
    let draft = batch.drafts()[0].clone();
    let stepped = engine.core.verify(batch, Instant::now());
    (draft, stepped.draft_rows.text)
}

/// Returns the draft of a new session with this text.
fn fresh(text: &[TokenId]) -> Draft {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    engine.step(StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), text)
    });
    let (draft, followed) = draft(&mut engine, 1, text.len());
    assert_eq!((draft.tokens.len(), followed), (50, text.len() - 1));
    draft
}

#[test]
fn drafts_do_not_depend_on_earlier_steps() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
        let len = 1 + random.below(40);
        let mut text = random.tokens(len);
        engine.step(StepItem {
            sample: false,
            ..opening_for_drafts(1, &Sampling::default(), &text)
        });
        let mut sent = text.len();
        for _ in 0..25 {
            match random.below(5) {
                // The session gets a piece of text.
                0 => {
                    let count = 1 + random.below(9);
                    text.extend(random.tokens(count));
                    engine.step(StepItem {
                        sample: false,
                        ..item(1, sent, &text[sent..])
                    });
                }
                // The text is cut, by so little that the states that the head reads again are still held.
                1 => {
                    text.truncate((text.len() - random.below(8).min(text.len())).max(1));
                    let keep = text.len() - random.below(3).min(text.len());
                    if random.below(2) == 0 {
                        // The text continues differently.
                        text.truncate(keep);
                        let count = 1 + random.below(4);
                        text.extend(random.tokens(count));
                    }
                    engine.step(StepItem {
                        sample: false,
                        ..item(1, keep, &text[keep..])
                    });
                }
                2 => {
                    // The draft is the output of plain decoding, so it is accepted.
                    let told = engine.step(item(1, sent, &[])).emitted;
                    let output = engine.step(StepItem {
                        draft: Some(chain(&told)),
                        ..item(1, sent, &[])
                    });
                    assert_eq!(output.accepted_nodes, [0]);
                    text.extend(output.emitted);
                }
                _ => {
                    let output = engine.step(drafting(1, sent, wanted(3, 4, 9)));
                    text.extend(output.emitted);
                }
            }
            sent = text.len();
            text.truncate(150);
            sent = sent.min(150);
        }
        if text.len() > 1 {
            let truth = fresh(&text);
            let (found, followed) = draft(&mut engine, 1, text.len());
            assert_eq!(found, truth, "seed {seed}");
            assert!(followed < text.len(), "seed {seed}");
        }
    }
}

#[test]
fn a_head_that_was_not_asked_catches_up_in_one_pass() {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(40);
    text.extend(
        engine
            .step(opening_for_drafts(1, &Sampling::default(), &text))
            .emitted,
    );
    assert_eq!(draft(&mut engine, 1, 41), (fresh(&text), 40));
    for _ in 0..10 {
        let emitted = engine.step(item(1, text.len(), &[])).emitted;
        text.extend(emitted);
    }
    assert_eq!(draft(&mut engine, 1, 51), (fresh(&text), 10));
    // A second draft at the same place computes only the last row again.
    assert_eq!(draft(&mut engine, 1, 51), (fresh(&text), 1));
}

#[test]
fn after_a_gap_the_head_starts_over() {
    let config = || EngineConfig {
        eagle3_window_tokens: 40,
        ..EngineConfig::default()
    };
    let text = Random(1).tokens(150);
    let prompt = |tokens| StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), tokens)
    };
    let mut asked = engine_with_head(tiny_head(), config());
    asked.step(prompt(&text[..30]));
    assert_eq!(draft(&mut asked, 1, 30).1, 29);
    asked.step(StepItem {
        sample: false,
        ..item(1, 30, &text[30..])
    });
    let mut never_asked = engine_with_head(tiny_head(), config());
    never_asked.step(prompt(&text));
    let truth = draft(&mut never_asked, 1, 150);
    assert_eq!((truth.0.tokens.len(), truth.1), (50, 40));
    assert_eq!(draft(&mut asked, 1, 150), truth);
    // It has not read the whole text.
    assert_ne!(truth.0, fresh(&text));
}

#[test]
fn a_deep_cut_costs_one_draft() {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(140);
    engine.step(StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), &text)
    });
    draft(&mut engine, 1, 140);
    // The states at position 48 are gone, but the head's own cache of them is not.
    text.truncate(50);
    let (none, followed) = draft(&mut engine, 1, 50);
    assert_eq!((none, followed), (Draft::default(), 0));
    let emitted = engine.step(item(1, 50, &[])).emitted;
    text.extend(emitted);
    assert_eq!(draft(&mut engine, 1, 51), (fresh(&text), 1));
}

#[test]
fn new_tokens_without_states_cost_one_draft() {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(40);
    engine.step(opening_for_drafts(1, &Sampling::default(), &text));
    let added = Random(2).tokens(5);
    text.extend(&added);
    let asked = StepItem {
        tokens: added,
        ..drafting(1, 40, WIDE)
    };
    let output = engine.step(asked);
    assert_eq!(output.self_drafted, 0);
    text.extend(output.emitted);
    assert_eq!(draft(&mut engine, 1, text.len()), (fresh(&text), 45));
}

#[test]
fn long_texts_are_read_over_several_steps() {
    let mut engine = engine_with_head(
        tiny_head(),
        EngineConfig {
            max_step_tokens: 70,
            ..EngineConfig::default()
        },
    );
    let text = Random(1).tokens(160);
    for piece in 0..4 {
        let tokens = &text[40 * piece..40 * (piece + 1)];
        let next = match piece {
            0 => opening_for_drafts(1, &Sampling::default(), tokens),
            piece => item(1, 40 * piece, tokens),
        };
        engine.step(StepItem {
            sample: false,
            ..next
        });
    }
    assert_eq!(draft(&mut engine, 1, 160), (Draft::default(), 70));
    assert_eq!(draft(&mut engine, 1, 160), (Draft::default(), 70));
    assert_eq!(draft(&mut engine, 1, 160), (fresh(&text), 19));
}

#[test]
fn a_shared_prefix_includes_the_heads_state() {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    let text = Random(1).tokens(100);
    engine.step(opening_for_drafts(1, &Sampling::default(), &text[..90]));
    engine.step(drafting(1, 90, wanted(2, 2, 4)));
    let mut own = text[..80].to_vec();
    own.extend(Random(2).tokens(12));
    // The prefix of an open session, shorter than its text.
    let output = engine.step(opening_for_drafts(2, &Sampling::default(), &own));
    assert_eq!(output.cached_tokens, 80);
    own.extend(output.emitted);
    assert_eq!(draft(&mut engine, 2, 93), (fresh(&own), 13));
    // The prefix of a kept session, whose states were not read.
    let other = Random(3).tokens(60);
    engine.step(opening_for_drafts(3, &Sampling::default(), &other));
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(3)],
        keep_kv: true,
        parks: false,
    });
    engine.step(opening_for_drafts(4, &Sampling::default(), &other));
    assert_eq!(draft(&mut engine, 4, 60), (fresh(&other), 59));
    // The prefix of a session without self_drafts: the head starts where the states start.
    let plain = Random(4).tokens(60);
    engine.step(crate::tests::support::opening(
        5,
        &Sampling::default(),
        &plain,
    ));
    let output = engine.step(opening_for_drafts(6, &Sampling::default(), &plain));
    assert_eq!(output.cached_tokens, 59);
    let (late, followed) = draft(&mut engine, 6, 61);
    assert_eq!((late.tokens.len(), followed), (50, 1));
}

#[test]
fn kept_sessions_pass_on_what_heads_have_read() {
    let text = Random(1).tokens(70);
    let greedy = Sampling::default();
    // The head's state stays, whichever session is kept last and whichever is longer.
    for (first, second) in [(1, 2), (2, 1)] {
        for (with, without) in [(70, 40), (40, 70), (60, 60)] {
            let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
            engine.step(opening_for_drafts(1, &greedy, &text[..with]));
            engine.step(opening(2, &greedy, &text[..without]));
            for id in [first, second] {
                engine.core.close(&CloseRequest {
                    sessions: vec![EngineSessionId(id)],
                    keep_kv: true,
                    parks: false,
                });
            }
            assert_eq!(engine.core.sessions().counts(), (0, 1));
            let own = &text[..with.min(without)];
            let output = engine.step(opening_for_drafts(3, &greedy, own));
            assert_eq!(output.cached_tokens as usize, own.len() - 1);
            let (found, followed) = draft(&mut engine, 3, own.len());
            assert_eq!((found, followed), (fresh(own), own.len() - 1));
        }
    }
}

#[test]
fn sessions_are_drafted_for_together_as_alone() {
    let mut engine = engine_with_head(tiny_head(), EngineConfig::default());
    let texts: Vec<Vec<TokenId>> = [5, 40, 33]
        .iter()
        .map(|len| Random(*len as u64).tokens(*len))
        .collect();
    let opened = texts.iter().enumerate().map(|(id, text)| StepItem {
        sample: false,
        ..opening_for_drafts(id as u128, &Sampling::default(), text)
    });
    engine.steps(opened.collect());
    let shapes = [wanted(1, 3, 9), WIDE, wanted(5, 1, 9)];
    let items = || {
        let asked = texts.iter().enumerate().zip(shapes);
        asked.map(|((id, text), shape)| drafting(id as u128, text.len(), shape))
    };
    let mut drafts = |items: Vec<StepItem>| {
        let mut batch = engine
            .core
            .begin(StepRequest { items }, engine.now)
            .unwrap();
        engine.core.draft(&mut batch);
        let drafts: Vec<Draft> = batch.drafts().into_iter().cloned().collect();
        engine.core.verify(batch, Instant::now());
        drafts
    };
    let together = drafts(items().collect());
    assert_eq!(together[1], fresh(&texts[1]));
    for (item, together) in items().zip(&together) {
        assert_eq!(&drafts(vec![item])[0], together);
    }
}
