//! Drafts that come with a step and those of the engine, verified as one tree.

use std::time::Instant;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, Sampling, SelfDraft, StepItem, StepOutput, StepRequest};

use super::{drafting, opening_for_drafts, wanted};
use crate::config::{EngineConfig, WeightFormat};
use crate::engine::Core;
use crate::tests::eagle3::golden::shipped;
use crate::tests::support::{Bench, Random, by_head, chain, item};

const TREE: SelfDraft = SelfDraft {
    depth: 4,
    top_k: 2,
    tokens_max: 10,
    path_prob_min: 0.0,
    sampled: false,
};

/// The shipped model and head, which is often right.
fn bench() -> Bench {
    let (model, head) = shipped(WeightFormat::F32);
    Bench {
        core: Core::new(model, Some(by_head(head)), &EngineConfig::default()),
        now: Instant::now(),
    }
}

/// A session after its prompt, and the length of its text.
fn open(bench: &mut Bench, session: u128, sampling: &Sampling, prompt: &[TokenId]) -> usize {
    let first = opening_for_drafts(session, sampling, prompt);
    prompt.len() + bench.step(first).emitted.len()
}

/// What is verified of an item, and what comes of it.
fn verified(bench: &mut Bench, item: StepItem) -> (Draft, StepOutput) {
    let request = StepRequest { items: vec![item] };
    let mut batch = bench.core.begin(request, bench.now).unwrap();
    bench.core.draft(&mut batch);
    let draft = batch.drafts()[0].clone();
    let mut stepped = bench.core.verify(batch, bench.now);
    (draft, stepped.results.remove(0).unwrap())
}

fn merging(session: u128, len: usize, draft: &Draft, own: SelfDraft) -> StepItem {
    StepItem {
        draft: Some(draft.clone()),
        ..drafting(session, len, own)
    }
}

#[test]
fn shared_nodes_stand_once_and_every_node_says_whose_it_is() {
    let mut bench = bench();
    let prompt = Random(5).tokens(24);
    let greedy = Sampling::default();
    let len = open(&mut bench, 1, &greedy, &prompt);
    open(&mut bench, 2, &greedy, &prompt);
    let (own, _) = verified(&mut bench, drafting(1, len, TREE));
    assert_eq!(own.tokens.len(), 10);
    // The head's first path as far as its second token, and something else after either.
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
    let (tree, output) = verified(&mut bench, merging(2, len, &sent, TREE));
    tree.validate().unwrap();
    assert_eq!(
        (&tree.tokens[..4], &tree.parents[..4]),
        (&sent.tokens[..], &sent.parents[..])
    );
    assert_eq!(tree.tokens.len(), 4 + 10 - 2);
    assert_eq!((output.self_drafted, output.agreed_nodes), (8, vec![0, 2]));
    // All of the head's tree is in it.
    let mut rest = tree.clone();
    assert!(
        rest.merge(&own)
            .iter()
            .all(|node| (*node as usize) < tree.tokens.len())
    );
}

#[test]
fn a_merged_tree_brings_what_the_better_of_both_would() {
    let mut bench = bench();
    let mut random = Random(31);
    // Who was better, and whether the merged tree was better than either.
    let mut wins = [0u32; 3];
    for trial in 0..40u32 {
        let sampling = Sampling {
            temperature: [0.0, 0.7][trial as usize % 2],
            seed: u64::from(trial),
            ..Sampling::default()
        };
        let prompt = random.tokens(20);
        let sessions = [0, 1, 2, 3].map(|at| u128::from(4 * trial + at));
        let len = open(&mut bench, sessions[0], &sampling, &prompt);
        let mut truth: Vec<TokenId> = Vec::new();
        while truth.len() < 8 {
            let next = bench
                .step(item(sessions[0], len + truth.len(), &[]))
                .emitted;
            truth.extend(next);
        }
        // Right so far, then wrong.
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
            open(&mut bench, item.session.0, &sampling, &prompt);
            let output = bench.step(item);
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
fn what_cannot_be_reached_is_not_verified() {
    let mut bench = bench();
    let prompt = Random(5).tokens(24);
    let greedy = Sampling::default();
    let len = open(&mut bench, 1, &greedy, &prompt);
    let sent = chain(&[1, 2, 3, 4]);
    let item = StepItem {
        max_emit: 2,
        ..merging(1, len, &sent, wanted(4, 1, 4))
    };
    let request = StepRequest { items: vec![item] };
    let stepped = bench.core.step(request, bench.now).unwrap();
    // The last token of the text, the first of the draft, and the first of the head.
    let output = stepped.results[0].as_ref().unwrap();
    assert_eq!((stepped.computed_tokens, output.self_drafted), (3, 1));
}
