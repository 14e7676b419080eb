//! Tests that drafts change the number of steps and nothing else.

use proptest::prelude::*;
use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, Sampling, StepItem};

use crate::config::EngineConfig;

use super::support::{Random, TestEngine, VOCAB, chain, engine, item, opening};

/// Returns a tree that has a part of the true continuation, and noise.
pub(super) fn random_tree(random: &mut Random, future: &[TokenId]) -> Draft {
    let mut draft = Draft::default();
    // The node of each depth that lies on the true path, as far as the path is drafted.
    let mut truth: Vec<Option<u32>> = vec![None];
    for _ in 0..random.below(14) {
        let node = draft.tokens.len() as u32;
        let (parent, token) = if random.below(2) == 0 && truth.len() <= future.len() {
            (truth[truth.len() - 1], future[truth.len() - 1])
        } else {
            let parent = random
                .below(draft.tokens.len() + 1)
                .checked_sub(1)
                .map(|parent| parent as u32);
            (parent, random.below(VOCAB as usize) as TokenId)
        };
        if (0..draft.tokens.len())
            .any(|other| draft.parents[other] == parent && draft.tokens[other] == token)
        {
            continue;
        }
        if truth.len() <= future.len()
            && parent == truth[truth.len() - 1]
            && token == future[truth.len() - 1]
        {
            truth.push(Some(node));
        }
        draft.tokens.push(token);
        draft.parents.push(parent);
    }
    draft
}

/// Returns the length of the draft's path that agrees with the continuation.
fn agreement(draft: &Draft, future: &[TokenId]) -> usize {
    let mut at = None;
    for (depth, token) in future.iter().enumerate() {
        let child = (0..draft.tokens.len())
            .find(|node| draft.parents[*node] == at && draft.tokens[*node] == *token);
        match child {
            Some(child) => at = Some(child as u32),
            None => return depth,
        }
    }
    future.len()
}

fn check(sampling: &Sampling, seed: u64) {
    let mut random = Random(seed);
    let prompt_len = 1 + random.below(60);
    let prompt = random.tokens(prompt_len);
    let mut plain = engine(EngineConfig::default());
    let truth = plain.decode(1, sampling, &prompt, 50);
    let mut drafted = engine(EngineConfig::default());
    let mut text = prompt.clone();
    let mut kept = 0;
    let mut first = true;
    while text.len() < prompt.len() + 30 {
        let done = text.len() - prompt.len();
        let future = &truth[done..];
        let draft = random_tree(&mut random, future);
        let agreed = agreement(&draft, future);
        let max_emit = 1 + random.below(9);
        let base = if first {
            opening(1, sampling, &prompt)
        } else {
            item(1, 0, &[])
        };
        let output = drafted.step(StepItem {
            keep_len: kept as u32,
            tokens: text[kept..].to_vec(),
            draft: Some(draft),
            max_emit: max_emit as u32,
            ..base
        });
        first = false;
        let room = (agreed + 1).min(max_emit);
        let stops = |token: &TokenId| sampling.stop_token_ids.contains(token);
        let forced = sampling.forced_output.len().saturating_sub(done);
        let free = future[..room].iter().skip(forced);
        let stop = free.clone().position(stops);
        let emitted = stop.map_or(room, |at| forced + at + 1);
        assert_eq!(output.emitted, future[..emitted], "seed {seed}");
        assert_eq!(output.accepted_nodes.len(), agreed.min(emitted));
        assert_eq!(output.stopped, stop.is_some());
        assert_eq!(output.text_len as usize, text.len() + emitted);
        text.extend(&output.emitted);
        // Sometimes the caller cuts the text, or sends tokens again that the engine already has.
        if random.below(3) == 0 {
            let cut = text.len().saturating_sub(random.below(5));
            text.truncate(prompt.len().max(cut));
        }
        kept = text.len() - random.below(4).min(text.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases((ProptestConfig::default().cases / 6).max(1))
    })]

    #[test]
    fn any_tree_leaves_greedy_output_alone(seed in any::<u64>()) {
        check(&Sampling::default(), seed);
    }

    #[test]
    fn any_tree_leaves_sampled_output_alone(seed in any::<u64>()) {
        check(&Sampling { temperature: 0.8, top_p: 0.95, seed, choice: 1, ..Sampling::default() }, seed);
    }
}

/// Every parameter that makes a position depend on the tokens before it.
fn dependent(temperature: f32, random: &mut Random) -> Sampling {
    Sampling {
        temperature,
        seed: random.next(),
        logit_bias: vec![(3, 0.5)],
        stop_token_ids: random.tokens(2),
        top_logprobs: Some(1),
        presence_penalty: random.float() * 2.0,
        frequency_penalty: random.float() * 2.0,
        repetition_penalty: 1.0 + random.float() * 0.6,
        min_tokens: random.below(40) as u32,
        bad_tokens: (0..60)
            .map(|_| random.tokens(1 + random.0 as usize % 2))
            .collect(),
        forced_output: random.tokens(random.0 as usize % 9),
        ..Sampling::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases((ProptestConfig::default().cases / 4).max(1))
    })]

    #[test]
    fn any_tree_leaves_output_alone_that_depends_on_the_text(seed in any::<u64>()) {
        for temperature in [0.0, 0.9] {
            check(&dependent(temperature, &mut Random(seed)), seed);
        }
    }
}

#[test]
fn a_session_that_continues_an_output_counts_it_as_output() {
    let mut random = Random(3);
    for _ in 0..20 {
        let sampling = dependent(0.7, &mut random);
        let prompt = random.tokens(9);
        let whole = engine(EngineConfig::default()).decode(1, &sampling, &prompt, 30);
        let cut = 1 + random.below(28);
        let text = [&*prompt, &whole[..cut]].concat();
        let mut other = opening(2, &sampling, &prompt);
        other.tokens = text.clone();
        let mut second = engine(EngineConfig::default());
        let next = second.step(other).emitted;
        assert_eq!(next, whole[cut..=cut]);
        let next = second.step(item(2, text.len() + 1, &[])).emitted;
        assert_eq!(next, whole[cut + 1..=cut + 1]);
    }
}

fn ready(sampling: &Sampling) -> (TestEngine, Vec<TokenId>, Vec<TokenId>) {
    let prompt = Random(5).tokens(20);
    let truth = engine(EngineConfig::default()).decode(1, sampling, &prompt, 12);
    (engine(EngineConfig::default()), prompt, truth)
}

#[test]
fn a_stop_id_ends_the_walk_and_is_emitted() {
    let (_, prompt, truth) = ready(&Sampling::default());
    let sampling = Sampling {
        stop_token_ids: vec![truth[3]],
        ..Sampling::default()
    };
    let end = truth.iter().position(|token| *token == truth[3]).unwrap();
    let mut engine = engine(EngineConfig::default());
    let output = engine.step(StepItem {
        draft: Some(chain(&truth[..8])),
        ..opening(1, &sampling, &prompt)
    });
    assert_eq!(output.emitted, truth[..=end]);
    assert!(output.stopped);
    // The caller may continue nevertheless.
    let output = engine.step(item(1, prompt.len() + end + 1, &[]));
    assert_eq!(output.emitted, truth[end + 1..end + 2]);
}

#[test]
fn logprobs_come_with_every_emitted_token() {
    let sampling = Sampling {
        top_logprobs: Some(3),
        ..Sampling::default()
    };
    let (mut drafted, prompt, truth) = ready(&sampling);
    let output = drafted.step(StepItem {
        draft: Some(chain(&truth[..4])),
        ..opening(1, &sampling, &prompt)
    });
    let logprobs = output.logprobs.unwrap();
    assert_eq!((output.emitted.len(), logprobs.len()), (5, 5));
    for (token, logprob) in output.emitted.iter().zip(&logprobs) {
        assert_eq!(logprob.top[0], (*token, logprob.logprob));
        assert!(logprob.logprob < 0.0 && logprob.top.len() == 3);
    }
    let mut plain = engine(EngineConfig::default());
    let alone = plain.step(opening(1, &sampling, &prompt));
    assert_eq!(alone.logprobs.unwrap()[0], logprobs[0]);
}

#[test]
fn only_rows_that_can_matter_are_computed() {
    let (mut engine, prompt, truth) = ready(&Sampling::default());
    let mut draft = chain(&truth[..8]);
    draft.tokens.push(truth[0].wrapping_add(1) % VOCAB);
    draft.parents.push(None);
    let step = |engine: &mut TestEngine, item: StepItem| {
        let request = refrain_protocol::engine::StepRequest { items: vec![item] };
        let now = engine.now;
        engine.core.step(request, now).unwrap()
    };
    let opened = step(
        &mut engine,
        StepItem {
            draft: Some(draft),
            max_emit: 3,
            ..opening(1, &Sampling::default(), &prompt)
        },
    );
    // The computed rows are the prompt, the nodes of depths 1 and 2, and the sibling of depth 1.
    assert_eq!(opened.computed_tokens, prompt.len() + 3);
    assert_eq!(
        opened.results[0].as_ref().unwrap().accepted_nodes,
        [0, 1, 2]
    );
    let next = step(&mut engine, item(1, prompt.len() + 3, &[]));
    assert_eq!(next.computed_tokens, 1);
    // A piece of a prompt computes all but its last token.
    let piece = StepItem {
        sample: false,
        ..opening(2, &Sampling::default(), &[1, 2, 3])
    };
    assert_eq!(step(&mut engine, piece).computed_tokens, 2);
}
