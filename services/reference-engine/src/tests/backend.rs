//! Tests of models that a backend computes, with a backend that computes each row from its whole text.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::engine::{CloseRequest, Draft, Sampling};
use refrain_protocol::{EngineSessionId, TokenId};

use super::drafts::random_tree;
use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{Random, TestEngine, VOCAB, engine, item, opening, tiny};
use crate::backend::{Backend, BackendModel, BackendPart, SequenceId};
use crate::config::EngineConfig;
use crate::drafter::{DraftNetwork, backend_network};
use crate::engine::{EngineCore, LoadedModel};
use crate::model::shipped_model;
use crate::network::{BlockCount, Branch, KvCache, KvShape, ModelForward};

/// Keeps the tokens of its sequences, and nothing else.
#[derive(Debug)]
struct PlainBackend {
    state: Mutex<State>,
    sequences_max: usize,
}

#[derive(Debug, Default)]
struct State {
    texts: HashMap<SequenceId, Text>,
    opened: SequenceId,
    fails: bool,
}

#[derive(Clone, Debug, Default)]
struct Text {
    tokens: Vec<TokenId>,
    /// The path to each node of the draft.
    paths: Vec<Vec<TokenId>>,
}

impl PlainBackend {
    fn new(sequences_max: usize) -> Arc<Self> {
        Arc::new(PlainBackend {
            state: Mutex::default(),
            sequences_max,
        })
    }

    fn begin(&self, text: Text) -> Option<SequenceId> {
        let mut state = self.state.lock();
        if state.texts.len() >= self.sequences_max {
            return None;
        }
        state.opened += 1;
        let id = state.opened;
        state.texts.insert(id, text);
        Some(id)
    }
}

impl Backend for PlainBackend {
    fn free(&self) -> usize {
        self.sequences_max - self.state.lock().texts.len()
    }

    fn open(&self) -> Option<SequenceId> {
        self.begin(Text::default())
    }

    fn fork(&self, sequence: SequenceId, len: usize) -> Option<SequenceId> {
        let mut tokens = self.state.lock().texts[&sequence].tokens.clone();
        tokens.truncate(len);
        self.begin(Text {
            tokens,
            paths: Vec::new(),
        })
    }

    fn truncate(&self, sequence: SequenceId, len: usize) {
        let mut state = self.state.lock();
        let text = state.texts.get_mut(&sequence).unwrap();
        text.tokens.truncate(len);
        text.paths.clear();
    }

    fn accept(&self, sequence: SequenceId, nodes: &[usize]) {
        let mut state = self.state.lock();
        let text = state.texts.get_mut(&sequence).unwrap();
        if let Some(last) = nodes.last() {
            assert_eq!(text.paths[*last].len(), nodes.len());
            text.tokens.extend(&text.paths[*last]);
        }
    }

    fn close(&self, sequence: SequenceId) {
        self.state.lock().texts.remove(&sequence).unwrap();
    }

    fn compute(&self, parts: &[BackendPart<'_>]) -> Result<Vec<f32>, String> {
        let mut state = self.state.lock();
        if state.fails {
            return Err("the device is gone".into());
        }
        let mut logits = Vec::new();
        for part in parts {
            let text = state.texts.get_mut(&part.sequence).unwrap();
            assert_eq!(
                (text.tokens.len(), text.paths.len()),
                (part.start, part.computed_nodes)
            );
            text.tokens.extend(part.chain);
            if part.wants_logits && !part.chain.is_empty() {
                logits.extend(logits_after(&text.tokens));
            }
            for node in part.computed_nodes..part.nodes.len() {
                let parent = part.parents[node].map(|parent| text.paths[parent as usize].clone());
                let mut path = parent.unwrap_or_default();
                path.push(part.nodes[node]);
                if part.wants_logits {
                    logits.extend(logits_after(&[&text.tokens[..], &path].concat()));
                }
                text.paths.push(path);
            }
        }
        Ok(logits)
    }
}

/// The logits of the model that most tests share, after a text that it reads from the beginning.
fn logits_after(text: &[TokenId]) -> Vec<f32> {
    let model = tiny();
    let mut kv = KvCache::new(KvShape::of(&model.architecture), BlockCount::default());
    kv.grow(text.len());
    let branch = Branch {
        wants_logits: true,
        ..Branch::new(&mut kv, 0, text)
    };
    let pass = ModelForward::new(&model, &[], 1).run(&model, &mut [branch]);
    pass.logits(0, None).to_vec()
}

fn model(backend: Arc<PlainBackend>) -> BackendModel {
    BackendModel {
        backend,
        name: "plain".into(),
        files: shipped_model().tokenization.unwrap(),
        vocab_size: VOCAB,
        max_context: 200,
        sessions_max: 10,
        eos_token_ids: Vec::new(),
    }
}

fn engine_of(backend: Arc<PlainBackend>, network: Option<Box<dyn DraftNetwork>>) -> TestEngine {
    TestEngine {
        core: EngineCore::new(
            LoadedModel::Backend(Box::new(model(backend))),
            network,
            &EngineConfig::default(),
        ),
        ..engine(EngineConfig::default())
    }
}

/// Runs the same steps on this crate's own network and on a backend, with sessions that share beginnings, go back,
/// and end. `compare` gets what both emitted.
fn run_both(
    backend: Arc<PlainBackend>,
    compare: impl Fn((&TestEngine, &[TokenId]), (&TestEngine, &[TokenId])),
) {
    let (mut own, mut other) = (
        engine(EngineConfig::default()),
        engine_of(backend.clone(), None),
    );
    let mut oracle = engine(EngineConfig::default());
    let mut random = Random(5);
    let common = random.tokens(40);
    for session in 0..12 {
        let mut text = common[..20 + random.below(20)].to_vec();
        let more = 1 + random.below(4);
        text.extend(random.tokens(more));
        let sampling = Sampling {
            temperature: (session % 2) as f32,
            seed: session as u64,
            ..Sampling::default()
        };
        let future = oracle.decode(session, &sampling, &text, 32);
        let mut at = 0;
        let mut is_open = false;
        while at < 24 {
            let draft = random_tree(&mut random, &future[at..31]);
            let known = [&text[..], &future[..at]].concat();
            let mut next = match is_open {
                true => item(session, known.len(), &[]),
                false => opening(session, &sampling, &known),
            };
            next.draft = Some(draft);
            is_open = true;
            let (wanted, found) = (own.step(next.clone()), other.step(next));
            compare((&own, &wanted.emitted), (&other, &found.emitted));
            assert_eq!(found.emitted, future[at..at + found.emitted.len()]);
            // Both go on from what the shorter one has.
            at += found.emitted.len();
        }
        if session % 3 == 0 {
            let request = CloseRequest {
                sessions: vec![EngineSessionId(session)],
                keep_kv: true,
                parks: false,
            };
            own.core.close(&request);
            other.core.close(&request);
        }
    }
    other.core.forget_all();
    assert_eq!(backend.free(), backend.sequences_max);
}

#[test]
fn a_backend_emits_what_the_own_network_emits_and_counts_as_much() {
    run_both(PlainBackend::new(200), |(own, wanted), (other, found)| {
        assert_eq!(wanted, found);
        let counted = |engine: &TestEngine| engine.core.sessions().kv_tokens();
        assert_eq!(counted(own), counted(other));
    });
}

#[test]
fn a_backend_without_room_for_branches_verifies_the_first_ones() {
    run_both(PlainBackend::new(13), |(_, wanted), (_, found)| {
        assert!(!found.is_empty() && wanted.starts_with(found));
    });
}

#[test]
fn branches_beyond_the_room_are_cut_with_all_below_them() {
    let backend = PlainBackend::new(2);
    let mut engine = engine_of(backend, None);
    let prompt = [1, 2, 3];
    let future = engine.decode(1, &Sampling::default(), &prompt, 4);
    engine.core.forget_all();
    // The truth is on the third branch of the root, so only two of its tokens could be emitted without the cut.
    let wrong: Vec<TokenId> = (0..VOCAB)
        .filter(|token| *token != future[0])
        .take(2)
        .collect();
    let mut next = opening(2, &Sampling::default(), &prompt);
    next.draft = Some(Draft {
        tokens: vec![wrong[0], wrong[1], future[0], future[1]],
        parents: vec![None, None, None, Some(2)],
    });
    let output = engine.step(next);
    assert_eq!(
        (output.emitted, output.accepted_nodes),
        (vec![future[0]], vec![2])
    );
    let output = engine.step(item(2, 4, &[]));
    assert_eq!(output.emitted, [future[1]]);
}

#[test]
fn a_backend_drafts_for_a_backend() {
    let tokenizer = shipped_model().tokenization.unwrap().tokenizer().unwrap();
    let drafting_backend = PlainBackend::new(64);
    let draft_model = model(drafting_backend.clone());
    let network = backend_network(
        &EngineConfig::default(),
        draft_model,
        VOCAB,
        Some(&tokenizer),
    );
    let mut engine = engine_of(PlainBackend::new(64), Some(network.unwrap()));
    let prompt = Random(8).tokens(12);
    let mut plain = engine_of(PlainBackend::new(64), None);
    let future = plain.decode(1, &Sampling::default(), &prompt, 40);
    engine.step(opening_for_drafts(1, &Sampling::default(), &prompt));
    let mut at = 1;
    for options in [(3, 1, 3), (5, 1, 5), (3, 1, 3)] {
        let (depth, top_k, tokens_max) = options;
        let draft = wanted(depth, top_k, tokens_max);
        let step = engine.step(drafting(1, prompt.len() + at, draft));
        assert_eq!(step.emitted, future[at..at + step.emitted.len()]);
        // The same network guesses all that it emits itself.
        assert_eq!(step.accepted_nodes.len(), depth as usize);
        at += step.emitted.len();
    }
    engine.core.forget_all();
    assert_eq!(drafting_backend.free(), 64);
    drafting_backend.state.lock().fails = true;
    engine.step(opening_for_drafts(2, &Sampling::default(), &prompt));
    let step = engine.step(drafting(2, prompt.len() + 1, wanted(3, 1, 3)));
    assert_eq!(step.emitted, future[1..2]);
}

#[test]
fn a_step_that_a_backend_does_not_compute_loses_its_sessions_only() {
    let backend = PlainBackend::new(8);
    let mut engine = engine_of(backend.clone(), None);
    engine.step(opening(1, &Sampling::default(), &[1, 2]));
    engine.step(opening(2, &Sampling::default(), &[3, 4]));
    backend.state.lock().fails = true;
    let fault = engine.try_step(item(1, 3, &[])).unwrap_err();
    assert_eq!(fault.code.as_deref(), Some("engine_step_failed"));
    assert!(fault.message.contains("the device is gone"), "{fault:?}");
    backend.state.lock().fails = false;
    assert_eq!(engine.core.sessions().counts(), (1, 0));
    engine.step(item(2, 3, &[]));
    engine.step(opening(1, &Sampling::default(), &[1, 2]));
}
