//! Tests of the compiled-in head against the reference outputs of its training code, and of its use in an engine.

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Sampling, StepItem, StepRequest};
use serde::Deserialize;

use super::{Reading, drafting, opening_for_drafts, wanted};
use crate::config::EngineConfig;
use crate::drafter::eagle3::Eagle3Head;
use crate::engine::EngineCore;
use crate::kernels::WeightFormat;
use crate::model::Model;
use crate::model::{shipped_head, shipped_model};
use crate::tests::support::{by_head, item};

#[derive(Deserialize)]
struct Golden {
    depth: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    /// The whole text. The target's forward pass of the last token is outstanding.
    ids: Vec<TokenId>,
    /// Guesses of a greedy chain.
    guesses: Vec<Guess>,
}

#[derive(Deserialize)]
struct Guess {
    token: TokenId,
    logprob: f32,
    /// The likeliest tokens, with log-probabilities over the draft vocabulary.
    top: Vec<(TokenId, f32)>,
}

fn golden() -> Golden {
    let golden: Golden =
        serde_json::from_str(include_str!("../../../model/eagle3/golden.json")).unwrap();
    assert!(golden.cases.len() >= 3 && golden.depth == 4);
    golden
}

pub(in crate::tests) fn shipped(format: WeightFormat) -> (Arc<Model>, Arc<Eagle3Head>) {
    let model = Model::load(&shipped_model(), format).unwrap();
    let head = Eagle3Head::load(&shipped_head(), &model, format).unwrap();
    (Arc::new(model), Arc::new(head))
}

/// Returns log-probabilities by target token.
fn log_probs(head: &Eagle3Head, logits: &[f32]) -> Vec<(TokenId, f32)> {
    let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let tokens = head.tokens.iter().zip(logits);
    tokens
        .map(|(token, logit)| (*token, logit - total.ln() as f32))
        .collect()
}

#[test]
fn guesses_are_those_of_the_training_code() {
    for format in [WeightFormat::F32, WeightFormat::Bf16] {
        let (model, head) = shipped(format);
        for case in golden().cases {
            let mut reading = Reading::new(model.clone(), head.clone(), &case.ids);
            let mut logits = reading.follow(&case.ids, 0, 64);
            let (mut nodes, mut parents) = (Vec::new(), Vec::new());
            for (depth, guess) in case.guesses.iter().enumerate() {
                if let Some(node) = depth.checked_sub(1) {
                    nodes.push(case.guesses[node].token);
                    parents.push(node.checked_sub(1).map(|parent| parent as u32));
                    logits = reading.guess(&nodes, &parents, node).remove(0);
                }
                let found = log_probs(&head, &logits);
                let best = found.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
                assert_eq!(best.0, guess.token, "{}, guess {depth}", case.name);
                assert_eq!((guess.token, guess.logprob), guess.top[0]);
                for (token, theirs) in &guess.top {
                    let (_, ours) = found.iter().find(|(id, _)| id == token).unwrap();
                    assert!(
                        (ours - theirs).abs() < 1e-3,
                        "{}, guess {depth}: token {token} has {ours}, not {theirs}",
                        case.name
                    );
                }
            }
        }
    }
}

#[test]
fn the_engine_drafts_that_chain() {
    let (model, head) = shipped(WeightFormat::F32);
    for case in golden().cases {
        let mut core = EngineCore::new(
            model.clone(),
            Some(by_head(head.clone())),
            &EngineConfig::default(),
        );
        let now = Instant::now();
        let computed = StepItem {
            sample: false,
            ..opening_for_drafts(1, &Sampling::default(), &case.ids)
        };
        let request = StepRequest {
            items: vec![computed],
        };
        core.step(request, now).unwrap();
        let request = StepRequest {
            items: vec![drafting(1, case.ids.len(), wanted(4, 1, 4))],
        };
        let mut batch = core.begin(request, now).unwrap();
        assert!(core.draft(&mut batch));
        let chain: Vec<TokenId> = case.guesses.iter().map(|guess| guess.token).collect();
        assert_eq!(batch.drafts()[0].tokens, chain, "{}", case.name);
        core.verify(batch, now);
    }
}

/// Returns the numbers of steps and tokens of answers to the reference texts, with drafts of the head and without.
fn answers(temperature: f32, depth: u32, top_k: u32, tokens_max: u32) -> (usize, Vec<TokenId>) {
    let (model, head) = shipped(WeightFormat::F32);
    let mut core = EngineCore::new(model, Some(by_head(head)), &EngineConfig::default());
    let now = Instant::now();
    let (mut steps, mut tokens) = (0, Vec::new());
    for (id, case) in golden().cases.iter().enumerate() {
        let sampling = Sampling {
            temperature,
            seed: 9,
            ..Sampling::default()
        };
        let id = id as u128;
        let mut next = opening_for_drafts(id, &sampling, &case.ids);
        let mut answer: Vec<TokenId> = Vec::new();
        while answer.len() < 24 {
            next.max_emit = (24 - answer.len()) as u32;
            let request = StepRequest { items: vec![next] };
            let output = core.step(request, now).unwrap().results.remove(0).unwrap();
            answer.extend(output.emitted);
            steps += 1;
            let len = case.ids.len() + answer.len();
            next = match depth {
                0 => item(id, len, &[]),
                depth => drafting(id, len, wanted(depth, top_k, tokens_max)),
            };
        }
        tokens.extend(answer);
    }
    (steps, tokens)
}

#[test]
fn drafts_save_steps_and_change_no_answer() {
    for temperature in [0.0, 0.8] {
        let (plain_steps, plain) = answers(temperature, 0, 0, 0);
        let (chain_steps, chain) = answers(temperature, 4, 1, 4);
        let (tree_steps, tree) = answers(temperature, 5, 4, 20);
        assert!(plain == chain && plain == tree, "temperature {temperature}");
        assert!(
            chain_steps * 10 < plain_steps * 7 && tree_steps <= chain_steps,
            "temperature {temperature}: {plain_steps} steps, {chain_steps} with chains, {tree_steps} \
             with trees"
        );
    }
}
