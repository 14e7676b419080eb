//! What a head drafts depends on the text alone, not on the steps that led to it.

use std::time::Instant;

use refrain_protocol::engine::{CloseRequest, Draft, Sampling, SelfDraft, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, TokenId};

use super::{drafting, opening_for_drafts, tiny_head, wanted};
use crate::config::EngineConfig;
use crate::tests::support::{Bench, Random, bench_with, chain, item, opening};

/// So wide that a wrong bit in what the head has read shows in the order of the nodes.
const WIDE: SelfDraft = SelfDraft {
    depth: 4,
    top_k: 6,
    tokens_max: 50,
    path_prob_min: 0.0,
    sampled: false,
};

/// The draft that a session gets now, and the rows of its text that the head computed for it. The step is
/// finished as well.
fn draft(bench: &mut Bench, session: u128, len: usize) -> (Draft, usize) {
    let request = StepRequest {
        items: vec![drafting(session, len, WIDE)],
    };
    let mut batch = bench.core.begin(request, bench.now).unwrap();
    bench.core.draft(&mut batch);
    let draft = batch.drafts()[0].clone();
    let stepped = bench.core.verify(batch, Instant::now());
    (draft, stepped.draft_rows.follow)
}

/// The draft of a session that knows nothing but the text.
fn fresh(text: &[TokenId]) -> Draft {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    bench.step(StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), text)
    });
    let (draft, followed) = draft(&mut bench, 1, text.len());
    assert_eq!((draft.tokens.len(), followed), (50, text.len() - 1));
    draft
}

#[test]
fn the_way_to_a_text_leaves_no_trace() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let mut bench = bench_with(tiny_head(), EngineConfig::default());
        let len = 1 + random.below(40);
        let mut text = random.tokens(len);
        bench.step(StepItem {
            sample: false,
            ..opening_for_drafts(1, &Sampling::default(), &text)
        });
        let mut sent = text.len();
        for _ in 0..25 {
            match random.below(5) {
                // A piece of text.
                0 => {
                    let count = 1 + random.below(9);
                    text.extend(random.tokens(count));
                    bench.step(StepItem {
                        sample: false,
                        ..item(1, sent, &text[sent..])
                    });
                }
                // A cut, too short for what the head reads again to be gone.
                1 => {
                    text.truncate((text.len() - random.below(8).min(text.len())).max(1));
                    let keep = text.len() - random.below(3).min(text.len());
                    if random.below(2) == 0 {
                        // Another text goes on from there.
                        text.truncate(keep);
                        let count = 1 + random.below(4);
                        text.extend(random.tokens(count));
                    }
                    bench.step(StepItem {
                        sample: false,
                        ..item(1, keep, &text[keep..])
                    });
                }
                2 => {
                    // What plain decoding says, as a draft that is accepted.
                    let told = bench.step(item(1, sent, &[])).emitted;
                    let output = bench.step(StepItem {
                        draft: Some(chain(&told)),
                        ..item(1, sent, &[])
                    });
                    assert_eq!(output.accepted_nodes, [0]);
                    text.extend(output.emitted);
                }
                _ => {
                    let output = bench.step(drafting(1, sent, wanted(3, 4, 9)));
                    text.extend(output.emitted);
                }
            }
            sent = text.len();
            text.truncate(150);
            sent = sent.min(150);
        }
        if text.len() > 1 {
            let truth = fresh(&text);
            let (found, followed) = draft(&mut bench, 1, text.len());
            assert_eq!(found, truth, "seed {seed}");
            assert!(followed < text.len(), "seed {seed}");
        }
    }
}

#[test]
fn a_head_that_was_not_asked_catches_up_in_one_pass() {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(40);
    text.extend(
        bench
            .step(opening_for_drafts(1, &Sampling::default(), &text))
            .emitted,
    );
    assert_eq!(draft(&mut bench, 1, 41), (fresh(&text), 40));
    for _ in 0..10 {
        let emitted = bench.step(item(1, text.len(), &[])).emitted;
        text.extend(emitted);
    }
    assert_eq!(draft(&mut bench, 1, 51), (fresh(&text), 10));
    // Asked again at the same place, only the output of the last row is computed again.
    assert_eq!(draft(&mut bench, 1, 51), (fresh(&text), 1));
}

#[test]
fn behind_a_gap_the_head_begins_anew() {
    let config = || EngineConfig {
        eagle3_window_tokens: 40,
        ..EngineConfig::default()
    };
    let text = Random(1).tokens(150);
    let prompt = |tokens| StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), tokens)
    };
    let mut asked = bench_with(tiny_head(), config());
    asked.step(prompt(&text[..30]));
    assert_eq!(draft(&mut asked, 1, 30).1, 29);
    asked.step(StepItem {
        sample: false,
        ..item(1, 30, &text[30..])
    });
    let mut never_asked = bench_with(tiny_head(), config());
    never_asked.step(prompt(&text));
    let truth = draft(&mut never_asked, 1, 150);
    assert_eq!((truth.0.tokens.len(), truth.1), (50, 40));
    assert_eq!(draft(&mut asked, 1, 150), truth);
    // It has read less than all of the text.
    assert_ne!(truth.0, fresh(&text));
}

#[test]
fn a_deep_cut_costs_one_draft() {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(140);
    bench.step(StepItem {
        sample: false,
        ..opening_for_drafts(1, &Sampling::default(), &text)
    });
    draft(&mut bench, 1, 140);
    // The states at position 48 are gone, what the head made of them is not.
    text.truncate(50);
    let (none, followed) = draft(&mut bench, 1, 50);
    assert_eq!((none, followed), (Draft::default(), 0));
    let emitted = bench.step(item(1, 50, &[])).emitted;
    text.extend(emitted);
    assert_eq!(draft(&mut bench, 1, 51), (fresh(&text), 1));
}

#[test]
fn new_tokens_without_states_cost_one_draft() {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    let mut text = Random(1).tokens(40);
    bench.step(opening_for_drafts(1, &Sampling::default(), &text));
    let added = Random(2).tokens(5);
    text.extend(&added);
    let asked = StepItem {
        tokens: added,
        ..drafting(1, 40, WIDE)
    };
    let output = bench.step(asked);
    assert_eq!(output.self_drafted, 0);
    text.extend(output.emitted);
    assert_eq!(draft(&mut bench, 1, text.len()), (fresh(&text), 45));
}

#[test]
fn more_than_a_step_takes_is_followed_over_several() {
    let mut bench = bench_with(
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
        bench.step(StepItem {
            sample: false,
            ..next
        });
    }
    assert_eq!(draft(&mut bench, 1, 160), (Draft::default(), 70));
    assert_eq!(draft(&mut bench, 1, 160), (Draft::default(), 70));
    assert_eq!(draft(&mut bench, 1, 160), (fresh(&text), 19));
}

#[test]
fn a_prefix_brings_its_head_along() {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    let text = Random(1).tokens(100);
    bench.step(opening_for_drafts(1, &Sampling::default(), &text[..90]));
    bench.step(drafting(1, 90, wanted(2, 2, 4)));
    let mut own = text[..80].to_vec();
    own.extend(Random(2).tokens(12));
    // From an open session, at a place before its end.
    let output = bench.step(opening_for_drafts(2, &Sampling::default(), &own));
    assert_eq!(output.cached_tokens, 80);
    own.extend(output.emitted);
    assert_eq!(draft(&mut bench, 2, 93), (fresh(&own), 13));
    // From a kept one, whose states nobody had read.
    let other = Random(3).tokens(60);
    bench.step(opening_for_drafts(3, &Sampling::default(), &other));
    bench.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(3)],
        keep_kv: true,
    });
    bench.step(opening_for_drafts(4, &Sampling::default(), &other));
    assert_eq!(draft(&mut bench, 4, 60), (fresh(&other), 59));
    // From one that was opened without: the head begins where the states do.
    let plain = Random(4).tokens(60);
    bench.step(crate::tests::support::opening(
        5,
        &Sampling::default(),
        &plain,
    ));
    let output = bench.step(opening_for_drafts(6, &Sampling::default(), &plain));
    assert_eq!(output.cached_tokens, 59);
    let (late, followed) = draft(&mut bench, 6, 61);
    assert_eq!((late.tokens.len(), followed), (50, 1));
}

#[test]
fn kept_sessions_pass_on_what_heads_have_read() {
    let text = Random(1).tokens(70);
    let greedy = Sampling::default();
    // Whichever of the two is kept last, and is the longer one, the head's part stays.
    for (first, second) in [(1, 2), (2, 1)] {
        for (with, without) in [(70, 40), (40, 70), (60, 60)] {
            let mut bench = bench_with(tiny_head(), EngineConfig::default());
            bench.step(opening_for_drafts(1, &greedy, &text[..with]));
            bench.step(opening(2, &greedy, &text[..without]));
            for id in [first, second] {
                bench.core.close(&CloseRequest {
                    sessions: vec![EngineSessionId(id)],
                    keep_kv: true,
                });
            }
            assert_eq!(bench.core.sessions().counts(), (0, 1));
            let own = &text[..with.min(without)];
            let output = bench.step(opening_for_drafts(3, &greedy, own));
            assert_eq!(output.cached_tokens as usize, own.len() - 1);
            let (found, followed) = draft(&mut bench, 3, own.len());
            assert_eq!((found, followed), (fresh(own), own.len() - 1));
        }
    }
}

#[test]
fn sessions_are_drafted_for_together_as_alone() {
    let mut bench = bench_with(tiny_head(), EngineConfig::default());
    let texts: Vec<Vec<TokenId>> = [5, 40, 33]
        .iter()
        .map(|len| Random(*len as u64).tokens(*len))
        .collect();
    let opened = texts.iter().enumerate().map(|(id, text)| StepItem {
        sample: false,
        ..opening_for_drafts(id as u128, &Sampling::default(), text)
    });
    bench.steps(opened.collect());
    let shapes = [wanted(1, 3, 9), WIDE, wanted(5, 1, 9)];
    let items = || {
        let asked = texts.iter().enumerate().zip(shapes);
        asked.map(|((id, text), shape)| drafting(id as u128, text.len(), shape))
    };
    let mut drafts = |items: Vec<StepItem>| {
        let mut batch = bench.core.begin(StepRequest { items }, bench.now).unwrap();
        bench.core.draft(&mut batch);
        let drafts: Vec<Draft> = batch.drafts().into_iter().cloned().collect();
        bench.core.verify(batch, Instant::now());
        drafts
    };
    let together = drafts(items().collect());
    assert_eq!(together[1], fresh(&texts[1]));
    for (item, together) in items().zip(&together) {
        assert_eq!(&drafts(vec![item])[0], together);
    }
}
