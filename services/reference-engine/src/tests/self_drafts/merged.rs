//! Tests of drafts of the caller and of the engine that are verified as one tree.

use std::time::Instant;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, Sampling, SelfDraft, StepItem, StepOutput, StepRequest};

use super::{drafting, opening_for_drafts, wanted};
use crate::config::EngineConfig;
use crate::engine::EngineCore;
use crate::kernels::WeightFormat;
use crate::tests::eagle3::golden::shipped;
use crate::tests::support::{Random, TestEngine, by_head, chain, item};

const TREE: SelfDraft = SelfDraft {
    depth: 4,
    top_k: 2,
    tokens_max: 10,
    path_prob_min: 0.0,
    sampled: false,
};

/// Creates an engine of the compiled-in model and head, which is often right.
fn engine() -> TestEngine {
    let (model, head) = shipped(WeightFormat::F32);
    TestEngine {
        core: EngineCore::new(model, Some(by_head(head)), &EngineConfig::default()),
        now: Instant::now(),
    }
}

/// Opens a session, and returns the length of its text after the prompt.
fn open(engine: &mut TestEngine, session: u128, sampling: &Sampling, prompt: &[TokenId]) -> usize {
    let first = opening_for_drafts(session, sampling, prompt);
    prompt.len() + engine.step(first).emitted.len()
}

/// Runs an item, and returns the draft that was verified and the output.
fn verified(engine: &mut TestEngine, item: StepItem) -> (Draft, StepOutput) {
    let request = StepRequest { items: vec![item] };
    let mut batch = engine.core.begin(request, engine.now).unwrap();
    engine.core.draft(&mut batch);
    let draft = batch.drafts()[0].clone();
    let mut stepped = engine.core.verify(batch, engine.now);
    (draft, stepped.results.remove(0).unwrap())
}

fn merging(session: u128, len: usize, draft: &Draft, own: SelfDraft) -> StepItem {
    StepItem {
        draft: Some(draft.clone()),
        ..drafting(session, len, own)
    }
}

#[test]
fn shared_nodes_occur_once_and_their_origin_is_reported() {
    let mut engine = engine();
    let prompt = Random(5).tokens(24);
    let greedy = Sampling::default();
    let len = open(&mut engine, 1, &greedy, &prompt);
    open(&mut engine, 2, &greedy, &prompt);
    let (own, _) = verified(&mut engine, drafting(1, len, TREE));
    assert_eq!(own.tokens.len(), 10);
    // The first two tokens of the head's first path, and another token after each of them.
    let first = 0u32;
    let second = own
        .parents
        .iter()
        .position(|of| *of == Some(first))
        .unwrap();
    let sent = Draft {
        tokens: vec![own.tokens[0], 7, own.tokens[second], 8],
        parents: vec![None, Some(0), Some(0), Some(2)],
    };
    let (tree, output) = verified(&mut engine, merging(2, len, &sent, TREE));
    tree.validate().unwrap();
    assert_eq!(
        (&tree.tokens[..4], &tree.parents[..4]),
        (&sent.tokens[..], &sent.parents[..])
    );
    assert_eq!(tree.tokens.len(), 4 + 10 - 2);
    assert_eq!((output.self_drafted, output.agreed_nodes), (8, vec![0, 2]));
    // It contains the head's whole tree.
    let mut rest = tree.clone();
    assert!(
        rest.merge(&own)
            .iter()
            .all(|node| (*node as usize) < tree.tokens.len())
    );
}

#[test]
fn a_merged_tree_accepts_as_much_as_the_better_draft() {
    let mut engine = engine();
    let mut random = Random(31);
    // Counts which draft was better, and whether the merged tree was better than both.
    let mut wins = [0u32; 3];
    for trial in 0..40u32 {
        let sampling = Sampling {
            temperature: [0.0, 0.7][trial as usize % 2],
            seed: u64::from(trial),
            ..Sampling::default()
        };
        let prompt = random.tokens(20);
        let sessions = [0, 1, 2, 3].map(|at| u128::from(4 * trial + at));
        let len = open(&mut engine, sessions[0], &sampling, &prompt);
        let mut truth: Vec<TokenId> = Vec::new();
        while truth.len() < 8 {
            let next = engine
                .step(item(sessions[0], len + truth.len(), &[]))
                .emitted;
            truth.extend(next);
        }
        // The draft is right for a while, and then wrong.
        let right = random.below(5);
        let mut tokens = truth[..right].to_vec();
        tokens.push((truth[right] + 1) % 50);
        let sent = chain(&tokens);
        let accepted = [
            StepItem {
                draft: Some(sent.clone()),
                ..item(sessions[1], len, &[])
            },
            drafting(sessions[2], len, TREE),
            merging(sessions[3], len, &sent, TREE),
        ]
        .map(|item| {
            open(&mut engine, item.session.0, &sampling, &prompt);
            let output = engine.step(item);
            assert_eq!(
                output.emitted,
                truth[..output.emitted.len()],
                "trial {trial}"
            );
            output.accepted_nodes.len()
        });
        let [by_draft, by_head, merged] = accepted;
        assert!(
            merged >= by_draft.max(by_head),
            "trial {trial}: {accepted:?}"
        );
        wins[0] += u32::from(by_draft > by_head);
        wins[1] += u32::from(by_head > by_draft);
        wins[2] += u32::from(merged > by_draft.min(by_head));
    }
    assert!(wins.iter().all(|wins| *wins >= 4), "{wins:?}");
}

#[test]
fn unreachable_nodes_are_not_verified() {
    let mut engine = engine();
    let prompt = Random(5).tokens(24);
    let greedy = Sampling::default();
    let len = open(&mut engine, 1, &greedy, &prompt);
    let sent = chain(&[1, 2, 3, 4]);
    let item = StepItem {
        max_emit: 2,
        ..merging(1, len, &sent, wanted(4, 1, 4))
    };
    let request = StepRequest { items: vec![item] };
    let stepped = engine.core.step(request, engine.now).unwrap();
    // The rows are the last token of the text, the first of the draft and the first of the head.
    let output = stepped.results[0].as_ref().unwrap();
    assert_eq!((stepped.computed_tokens, output.self_drafted), (3, 1));
}
