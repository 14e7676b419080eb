//! Tests that outputs have their form, and are the same with any drafts as without.

mod drawn;
mod guided;
mod kinds;
mod leaving;
mod limits;
mod schemas;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use refrain_output_grammar::{GrammarCompiler, GrammarLimits, Matcher};
use refrain_protocol::engine::{
    CloseRequest, Draft, OutputForm, Sampling, SelfDraft, StepItem, StepRequest, TextForm,
};
use refrain_protocol::{EngineSessionId, NamespaceId, TenantId, TokenId};
use refrain_tokenization::Tokenizer;
use refrain_tokenization::testing::{IM_END, byte_level_files};
use safetensors::Dtype;
use serde_json::json;

use super::self_drafts::opening_for_drafts;
use super::support::{Random, TestEngine, chain, item, load, opening, tensors, tiny_config};
use crate::config::EngineConfig;
use crate::drafter::DraftNetwork;
use crate::drafter::draft_model::DraftModelNetwork;
use crate::engine::EngineCore;
use crate::model::Model;

use kinds::Kind;

/// Longest output. Few are cut by it.
const OUTPUT_MAX: usize = 320;

/// A random model whose tokens are bytes and a few words.
struct ByteModel {
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<GrammarCompiler>,
    model: Arc<Model>,
}

fn byte_model() -> &'static ByteModel {
    static MODEL: OnceLock<ByteModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
        let vocab_size = tokenizer.vocab_size();
        let limits = GrammarLimits::default();
        let grammars = GrammarCompiler::new(tokenizer.clone(), vocab_size, &[IM_END], limits);
        ByteModel {
            grammars: Arc::new(grammars.unwrap()),
            model: Arc::new(network(vocab_size, 3)),
            tokenizer,
        }
    })
}

/// Compiles a form for the namespace of the tests, so that sessions with it open at once.
fn compiled(grammars: &GrammarCompiler, form: &OutputForm) {
    let _ = grammars.compile_for(TenantId::default(), NamespaceId(1), form);
}

fn network(vocab_size: u32, seed: u64) -> Model {
    let mut config = tiny_config();
    config["vocab_size"] = json!(vocab_size);
    config["max_position_embeddings"] = json!(400);
    load(&config, &tensors(&config, Dtype::F32, seed)).unwrap()
}

/// An engine whose drafter has other weights, or the same.
fn engine(drafter_seed: Option<u64>) -> TestEngine {
    engine_with(drafter_seed, byte_model().grammars.clone())
}

fn engine_with(drafter_seed: Option<u64>, grammars: Arc<GrammarCompiler>) -> TestEngine {
    let bytes = byte_model();
    let drafter = drafter_seed.map(|seed| -> Box<dyn DraftNetwork> {
        let model = network(bytes.tokenizer.vocab_size(), seed);
        Box::new(DraftModelNetwork::new(model, 1))
    });
    let config = EngineConfig::default();
    let core = EngineCore::new(bytes.model.clone(), drafter, &config);
    TestEngine {
        core: core.with_grammars(Some(grammars)),
        now: std::time::Instant::now(),
    }
}

/// A request whose answer must have a form.
struct Answer {
    kind: Kind,
    sampling: Sampling,
    prompt: Vec<TokenId>,
    /// The output of plain decoding.
    truth: Vec<TokenId>,
    ended: bool,
    text: Vec<TokenId>,
    session: u128,
    open: bool,
    /// The tokens that the engine has, which are a prefix of `text`.
    sent: usize,
    /// Length of the output after which the engine is restarted, until it was.
    restart_at: Option<usize>,
}

impl Answer {
    fn new(kind: Kind, random: &mut Random, temperature: f32, session: u128) -> Self {
        let prompt: Vec<TokenId> = (0..1 + random.below(20))
            .map(|_| random.below(200) as TokenId)
            .collect();
        let sampling = Sampling {
            temperature,
            seed: random.next(),
            stop_token_ids: vec![IM_END],
            form: Some(Box::new(kind.form.clone())),
            logit_bias: kind.biases(),
            ..Sampling::default()
        };
        let mut answer = Answer {
            kind,
            sampling,
            text: prompt.clone(),
            prompt,
            truth: Vec::new(),
            ended: false,
            session,
            open: false,
            sent: 0,
            restart_at: None,
        };
        answer.decode_plainly();
        let inner = answer.truth.len() - 1;
        answer.restart_at = (inner > 0).then(|| 1 + random.below(inner));
        answer
    }

    fn decode_plainly(&mut self) {
        let mut plain = engine(None);
        let mut output = plain.step(opening(1, &self.sampling, &self.prompt));
        loop {
            self.truth.extend(&output.emitted);
            self.ended = output.stopped;
            if self.ended || self.truth.len() >= OUTPUT_MAX {
                break;
            }
            output = plain.step(item(1, self.prompt.len() + self.truth.len(), &[]));
        }
    }

    /// Checks an output that ended by itself.
    fn validate(&self) {
        self.kind.validate(&self.truth[..self.truth.len() - 1]);
    }

    fn matcher(&self) -> Matcher {
        let form = self.sampling.form.as_deref().unwrap();
        let mut matcher = byte_model().grammars.compile(form).unwrap().matcher();
        matcher.advance(&self.text[self.prompt.len()..]).unwrap();
        matcher
    }

    fn done(&self) -> usize {
        self.text.len() - self.prompt.len()
    }

    fn is_done(&self) -> bool {
        self.done() >= self.truth.len()
    }

    /// A part of the true continuation with noise after it, tokens that the form forces, or noise in a tree.
    fn draft(&self, random: &mut Random) -> Draft {
        let noise = |random: &mut Random| random.below(263) as TokenId;
        match random.below(3) {
            0 => {
                let left = &self.truth[self.done()..];
                let mut tokens = left[..random.below(8).min(left.len())].to_vec();
                tokens.push(noise(random));
                chain(&tokens)
            }
            1 => chain(&self.matcher().forced(12).unwrap()),
            _ => {
                let mut draft = Draft::default();
                for node in 0..random.below(12) as u32 {
                    draft.tokens.push(noise(random));
                    let parent = random.below(node as usize + 1) as u32;
                    draft.parents.push(parent.checked_sub(1));
                }
                let mut merged = Draft::default();
                merged.merge(&draft);
                merged
            }
        }
    }

    /// The next item: a piece of the text, or all of it, with any kind of draft or none.
    fn item(&mut self, random: &mut Random) -> StepItem {
        if random.below(8) == 0 {
            // The caller goes back.
            let kept = self.text.len() - random.below(5).min(self.done());
            self.text.truncate(kept);
            self.sent = self.sent.min(kept);
        }
        let owed = self.text.len() - self.sent;
        let is_piece = owed > 1 && random.below(3) == 0;
        let count = if is_piece {
            1 + random.below(owed - 1)
        } else {
            owed
        };
        let tokens = &self.text[self.sent..self.sent + count];
        let mut item = match self.open {
            true => item(self.session, self.sent, tokens),
            false => opening_for_drafts(self.session, &self.sampling, tokens),
        };
        if let Some(spec) = &mut item.open {
            spec.prompt_len = self.prompt.len() as u32;
        }
        self.open = true;
        item.sample = !is_piece;
        item.max_emit = 1 + random.below(12) as u32;
        if let Some(at) = self.restart_at {
            item.max_emit = item.max_emit.min((at - self.done()) as u32);
        }
        if !is_piece {
            item.draft = (random.below(3) > 0).then(|| self.draft(random));
            if random.below(3) == 0 {
                item.self_draft = Some(SelfDraft {
                    depth: 1 + random.below(6) as u32,
                    top_k: 1 + random.below(8) as u32,
                    tokens_max: random.below(20) as u32,
                    path_prob_min: 0.0,
                    sampled: false,
                });
            }
        }
        item
    }
}

/// Counts of work that the test needs to be meaningful.
#[derive(Debug, Default)]
struct Work {
    schemas: usize,
    answers: usize,
    ended: usize,
    /// Answers by schemas that did not end in time.
    endless: usize,
    accepted: usize,
    self_drafted: u32,
    /// Answers that went on in a new session.
    chunks: usize,
    /// Answers in the middle of which the engine was restarted.
    restarts: usize,
}

/// Decodes two answers for each of some forms in one batch, at temperature 0 and at 1: with all kinds of drafts, in
/// chunks, and with a restart of the engine in the middle of each.
fn check(seed: u64, forms: usize) -> Work {
    let mut random = Random(seed);
    let mut work = Work::default();
    let mut answers: Vec<Answer> = Vec::new();
    for _ in 0..forms {
        let kind = Kind::random(&mut random);
        work.schemas += usize::from(kind.is_schema());
        compiled(&byte_model().grammars, &kind.form);
        for temperature in [0.0, 1.0] {
            let session = answers.len() as u128;
            answers.push(Answer::new(kind.clone(), &mut random, temperature, session));
        }
    }
    work.answers = answers.len();
    for answer in answers.iter().filter(|answer| answer.ended) {
        answer.validate();
        work.ended += 1;
    }
    let endless = |answer: &&Answer| answer.kind.is_schema() && !answer.ended;
    work.endless = answers.iter().filter(endless).count();
    let mut sessions = 1000;
    let start = |random: &mut Random| {
        let mut engine = engine(Some([3, 4][random.below(2)]));
        engine.core.set_mask_threads(random.below(3));
        engine
    };
    let mut engine = start(&mut random);
    let mut steps = 0;
    while answers.iter().any(|answer| !answer.is_done()) {
        steps += 1;
        assert!(steps < 3000, "seed {seed}: no end");
        let is_due = |answer: &Answer| answer.restart_at == Some(answer.done());
        if answers.iter().any(is_due) {
            engine = start(&mut random);
            for answer in &mut answers {
                (answer.open, answer.sent) = (false, 0);
                if is_due(answer) {
                    answer.restart_at = None;
                    work.restarts += 1;
                }
            }
        }
        let mut items = Vec::new();
        let mut asked = HashMap::new();
        for (at, answer) in answers.iter_mut().enumerate() {
            if answer.is_done() || random.below(4) == 0 {
                continue;
            }
            if answer.open && random.below(15) == 0 {
                engine.core.close(&CloseRequest {
                    sessions: vec![EngineSessionId(answer.session)],
                    keep_kv: random.below(2) > 0,
                    parks: false,
                });
                sessions += 1;
                (answer.session, answer.open, answer.sent) = (sessions, false, 0);
                work.chunks += 1;
            }
            if steps % 7 == 0 {
                engine
                    .core
                    .park(&[EngineSessionId(answer.session)], engine.now);
            }
            let item = answer.item(&mut random);
            asked.insert(items.len(), (at, item.sample));
            items.push(item);
        }
        let report = engine.core.step(StepRequest { items }, engine.now).unwrap();
        for (place, result) in report.results.into_iter().enumerate() {
            let (at, sampled) = asked[&place];
            let answer = &mut answers[at];
            let output = result.unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
            answer.sent = output.text_len as usize;
            if !sampled {
                continue;
            }
            let left = &answer.truth[answer.done()..];
            let count = output.emitted.len().min(left.len());
            assert_eq!(
                output.emitted[..count],
                left[..count],
                "seed {seed}, {:?}",
                answer.kind
            );
            assert_eq!(
                output.stopped,
                answer.ended && count == left.len(),
                "seed {seed}"
            );
            work.accepted += output.accepted_nodes.len();
            work.self_drafted += output.self_drafted;
            answer.text.extend(&output.emitted);
            if answer.text.len() > answer.prompt.len() + answer.truth.len() {
                answer
                    .text
                    .truncate(answer.prompt.len() + answer.truth.len());
            }
        }
    }
    work
}

/// It takes 8 s of a core.
#[test]
fn outputs_have_their_form_and_are_those_without_drafts() {
    let mut work = Work::default();
    for seed in 0..80 {
        let own = check(seed, 4);
        work.schemas += own.schemas;
        work.answers += own.answers;
        work.ended += own.ended;
        work.endless += own.endless;
        work.accepted += own.accepted;
        work.self_drafted += own.self_drafted;
        work.chunks += own.chunks;
        work.restarts += own.restarts;
    }
    // Every answer by a schema was judged by the validator, at both temperatures.
    assert!(work.schemas >= 200 && work.endless == 0, "{work:?}");
    assert!(work.ended * 50 > work.answers * 49, "{work:?}");
    // No answer here is a single token, so there was a restart in the middle of each.
    assert_eq!(work.restarts, work.answers, "{work:?}");
    assert!(
        work.accepted > 12_000 && work.self_drafted > 8_000 && work.chunks > 400,
        "{work:?}"
    );
}

#[test]
fn a_form_that_cannot_be_compiled_is_the_fault_of_its_item() {
    let sampling = |schema: &str| {
        let form = OutputForm::new(TextForm::JsonSchema(schema.to_owned()));
        compiled(&byte_model().grammars, &form);
        Sampling {
            form: Some(Box::new(form)),
            ..Sampling::default()
        }
    };
    let mut engine = engine(None);
    let results = engine.steps(vec![
        opening(1, &sampling(r#"{"items":{"not":{}}}"#), &[40, 41]),
        opening(2, &sampling(r#"{"const":1}"#), &[40, 41]),
    ]);
    let error = results[0].as_ref().unwrap_err();
    assert!(error.message.contains("/items/not"), "{error:?}");
    let emitted = &results[1].as_ref().unwrap().emitted;
    assert_eq!(byte_model().tokenizer.decode(emitted), "1");
    // An output that does not have the form cannot be continued under it.
    let mut item = opening(3, &sampling(r#"{"const":1}"#), &[40, 41, 60]);
    if let Some(spec) = &mut item.open {
        spec.prompt_len = 2;
    }
    let error = engine.try_step(item).unwrap_err();
    assert_eq!(error.code.as_deref(), Some("output_form"));
}

#[test]
fn the_form_counts_where_other_parameters_leave_no_token() {
    let form = OutputForm::new(TextForm::Choice(vec!["ab".to_owned()]));
    compiled(&byte_model().grammars, &form);
    let token = |text: &str| byte_model().tokenizer.encode(text).unwrap()[0];
    let sampling = Sampling {
        form: Some(Box::new(form)),
        stop_token_ids: vec![IM_END],
        min_tokens: 9,
        bad_tokens: vec![vec![token("a")]],
        logit_bias: vec![(token("b"), f32::NEG_INFINITY)],
        ..Sampling::default()
    };
    let output = engine(None).decode(1, &sampling, &[40, 41], 3);
    assert_eq!(output, [token("a"), token("b"), IM_END]);
}

#[test]
fn a_session_joins_a_later_step_when_its_form_is_compiled() {
    let form = OutputForm::new(TextForm::Choice(vec!["a text of this test".to_owned()]));
    let sampling = Sampling {
        form: Some(Box::new(form.clone())),
        ..Sampling::default()
    };
    let mut engine = engine(None);
    let results = engine.steps(vec![
        opening(1, &sampling, &[40, 41]),
        opening(2, &Sampling::default(), &[40, 41]),
    ]);
    let error = results[0].as_ref().unwrap_err();
    assert_eq!(error.code.as_deref(), Some("engine_form_compiling"));
    assert_eq!(error.kind, refrain_protocol::ErrorKind::Overloaded);
    assert!(results[1].is_ok());
    compiled(&byte_model().grammars, &form);
    assert!(engine.try_step(opening(1, &sampling, &[40, 41])).is_ok());
}
