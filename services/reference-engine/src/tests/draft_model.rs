//! A draft model beside its target.

use refrain_protocol::engine::{
    CloseRequest, DrafterKind, Sampling, SelfDraft, StepOutput, StepRequest,
};
use refrain_protocol::{EngineSessionId, TokenId};
use refrain_service_kit::telemetry::Metrics;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{
    Bench, Random, VOCAB, bench, bench_drafting, item, load, opening, tensors, tiny, tiny_config,
    write_model,
};
use crate::config::{EngineConfig, WeightFormat};
use crate::draft_model::{self, DraftModel};
use crate::drafter::{DraftRows, Network};
use crate::files::{SHIPPED_MODEL, shipped_model};
use crate::handle::EngineHandle;
use crate::weights::Model;

/// A random model, smaller than its target, that has nothing in common with it but the vocabulary.
pub(super) fn stranger() -> Box<dyn Network> {
    let mut config = tiny_config();
    for (key, value) in [
        ("hidden_size", 28),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
    ] {
        config[key] = json!(value);
    }
    drafter(&config, 5)
}

/// The target itself.
fn twin() -> Box<dyn Network> {
    drafter(&tiny_config(), 11)
}

fn drafter(config: &Value, seed: u64) -> Box<dyn Network> {
    let model = load(config, &tensors(config, Dtype::F32, seed)).unwrap();
    Box::new(DraftModel::new(model, 1))
}

/// The first layers of the shipped model.
pub(super) fn shipped_layers(layers: usize) -> Box<dyn Network> {
    let mut files = shipped_model();
    let mut config: Value = serde_json::from_slice(&files.config_json).unwrap();
    config["num_hidden_layers"] = json!(layers);
    files.config_json = serde_json::to_vec(&config).unwrap().into();
    let model = Model::load(&files, WeightFormat::F32).unwrap();
    Box::new(DraftModel::new(model, 1))
}

/// A step of one item, and the rows that the drafter computed for it.
fn stepped(bench: &mut Bench, wanted: SelfDraft, len: usize) -> (StepOutput, DraftRows) {
    let request = StepRequest {
        items: vec![drafting(1, len, wanted)],
    };
    let mut stepped = bench.core.step(request, bench.now).unwrap();
    (stepped.results.remove(0).unwrap(), stepped.draft_rows)
}

#[test]
fn a_model_that_thinks_as_its_target_is_always_right() {
    let prompt = Random(8).tokens(40);
    let drawn = SelfDraft {
        sampled: true,
        ..wanted(4, 1, 4)
    };
    for (temperature, wanted) in [(0.0, wanted(4, 1, 4)), (1.2, drawn)] {
        let sampling = Sampling {
            temperature,
            seed: 4,
            ..Sampling::default()
        };
        let mut plain = bench(EngineConfig::default());
        let truth = plain.decode(1, &sampling, &prompt, 60);
        let mut bench = bench_drafting(twin(), EngineConfig::default());
        let mut output = bench
            .step(opening_for_drafts(1, &sampling, &prompt))
            .emitted;
        while output.len() < 60 {
            let (next, _) = stepped(&mut bench, wanted, prompt.len() + output.len());
            assert_eq!((next.self_drafted, next.accepted_nodes.len()), (4, 4));
            output.extend(next.emitted);
        }
        if temperature == 0.0 {
            assert_eq!(output[..60], truth[..]);
        }
    }
}

#[test]
fn it_reads_what_is_new_and_nothing_twice() {
    let mut bench = bench_drafting(stranger(), EngineConfig::default());
    let prompt = Random(8).tokens(40);
    let mut len = prompt.len();
    let greedy = Sampling::default();
    len += bench
        .step(opening_for_drafts(1, &greedy, &prompt))
        .emitted
        .len();
    let (output, rows) = stepped(&mut bench, wanted(3, 1, 3), len);
    assert_eq!((rows.follow, rows.guess), (41, 2));
    len += output.emitted.len();
    let (next, rows) = stepped(&mut bench, wanted(3, 2, 6), len);
    assert_eq!(rows.follow, output.emitted.len());
    // Steps that it had no part in.
    len += next.emitted.len();
    let mut missed = next.emitted.len();
    for _ in 0..5 {
        let count = bench.step(item(1, len, &[])).emitted.len();
        (len, missed) = (len + count, missed + count);
    }
    let (output, rows) = stepped(&mut bench, wanted(3, 1, 3), len);
    assert_eq!(rows.follow, missed);
    // What was cut is read again as far as it is other text, and the last token in any case.
    len = len + output.emitted.len() - 4;
    let (_, rows) = stepped(&mut bench, wanted(1, 1, 1), len);
    assert_eq!(rows.follow, 1);
}

#[test]
fn a_session_elsewhere_begins_where_the_lost_one_was() {
    let mut bench = bench_drafting(stranger(), EngineConfig::default());
    let mut text = Random(8).tokens(80);
    let greedy = Sampling::default();
    text.extend(bench.step(opening_for_drafts(1, &greedy, &text)).emitted);
    stepped(&mut bench, wanted(2, 1, 2), text.len());
    bench.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1)],
        keep_kv: true,
    });
    text.extend(bench.step(opening_for_drafts(1, &greedy, &text)).emitted);
    let (_, rows) = stepped(&mut bench, wanted(2, 1, 2), text.len());
    assert!(rows.follow <= 3, "{rows:?}");
    // Of one that is gone for good everything is read anew, in as many steps as it takes.
    let config = EngineConfig {
        max_step_tokens: 50,
        max_draft_tokens: 8,
        ..EngineConfig::default()
    };
    let mut bench = bench_drafting(stranger(), config);
    let mut opening = opening_for_drafts(1, &greedy, &text[..40]);
    opening.sample = false;
    bench.step(opening);
    let mut len = 40 + bench.step(item(1, 40, &text[40..])).emitted.len() + text.len() - 40;
    let mut follows = Vec::new();
    for _ in 0..2 {
        let (output, rows) = stepped(&mut bench, wanted(2, 1, 2), len);
        follows.push((rows.follow, output.self_drafted));
        len += output.emitted.len();
    }
    assert_eq!(follows, [(50, 0), (text.len() + 2 - 50, 2)]);
}

#[test]
fn its_cache_counts_and_gives_way() {
    let text = Random(3).tokens(40);
    let greedy = Sampling::default();
    let run = |kv_tokens_max: u64| {
        let config = EngineConfig {
            kv_tokens_max,
            ..EngineConfig::default()
        };
        let mut bench = bench_drafting(twin(), config);
        bench.step(opening_for_drafts(1, &greedy, &text));
        let before = bench.core.sessions().kv_tokens().0;
        let (output, _) = stepped(&mut bench, wanted(2, 1, 2), 41);
        let used = bench.core.sessions().kv_tokens().0;
        (bench, output.self_drafted, before, used)
    };
    // A block of the twin is as large as one of the target, and 41 tokens take two of either.
    let (mut bench, drafted, before, used) = run(128);
    assert_eq!((drafted, before, used), (2, 64, 128));
    // A target that needs the room gets it.
    bench.step(opening(2, &greedy, &Random(4).tokens(40)));
    assert_eq!(bench.core.sessions().counts(), (2, 0));
    assert_eq!(bench.core.sessions().kv_tokens().0, 128);
    bench.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1), EngineSessionId(2)],
        keep_kv: false,
    });
    assert_eq!(bench.core.sessions().kv_tokens().0, 0);
    let (_, drafted, _, used) = run(96);
    assert_eq!((drafted, used), (0, 64));
}

#[test]
fn what_is_too_long_for_it_is_decoded_without() {
    let mut config = tiny_config();
    config["max_position_embeddings"] = json!(50);
    let mut bench = bench_drafting(drafter(&config, 11), EngineConfig::default());
    let text = Random(3).tokens(48);
    bench.step(opening_for_drafts(1, &Sampling::default(), &text));
    let drafted = |bench: &mut Bench, len| stepped(bench, wanted(1, 1, 1), len).0.self_drafted;
    assert_eq!(drafted(&mut bench, 49), 1);
    assert_eq!(drafted(&mut bench, 51), 0);
}

#[test]
fn one_that_does_not_fit_is_refused_by_name() {
    let target = tiny();
    let fault = |source: &str, target: &Model, tokenizer| {
        let loaded = draft_model::load(source, target, tokenizer, WeightFormat::F32);
        let error = loaded.map(|_| ()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("draft model {source}: ")),
            "{error}"
        );
        error
    };
    assert!(fault("no/such/folder", &target, None).contains("no/such/folder/config.json"));
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().to_str().unwrap();
    let mut config = tiny_config();
    config["vocab_size"] = json!(VOCAB + 1);
    write_model(folder.path(), &config, &tensors(&config, Dtype::F32, 1));
    let error = fault(source, &target, None);
    assert!(
        error.contains("vocab_size is 62; the target's is 61"),
        "{error}"
    );
    // Tokenizers: only one has one, and one of other tokens.
    let shipped = shipped_model().tokenization.unwrap();
    let tokenizer = shipped.tokenizer().unwrap();
    let error = fault(source, &target, Some(&tokenizer));
    assert!(error.contains("tokenizer.json: there is none"), "{error}");
    let error = fault(SHIPPED_MODEL, &target, None);
    assert!(error.contains("the target has none"), "{error}");
    let mut other: Value = serde_json::from_slice(&shipped.tokenizer_json).unwrap();
    for added in other["added_tokens"].as_array_mut().unwrap() {
        added["special"] = json!(!added["special"].as_bool().unwrap());
    }
    std::fs::write(folder.path().join("tokenizer.json"), other.to_string()).unwrap();
    let error = fault(source, &target, Some(&tokenizer));
    assert!(error.contains("not spelled as the target's"), "{error}");
}

#[tokio::test]
async fn an_engine_says_that_a_model_drafts() {
    let config = EngineConfig {
        draft_model: Some(SHIPPED_MODEL.into()),
        ..EngineConfig::default()
    };
    let metrics = Metrics::new().unwrap();
    let engine = EngineHandle::start(&config, &metrics).unwrap();
    let drafter = engine.capabilities().drafter.unwrap();
    assert_eq!(drafter.kind, DrafterKind::DraftModel);
    let greedy = Sampling::default();
    let text: Vec<TokenId> = (100..120).collect();
    for item in [
        opening_for_drafts(1, &greedy, &text),
        drafting(1, 21, wanted(3, 1, 3)),
    ] {
        let request = StepRequest { items: vec![item] };
        let mut response = engine.step(request).await.unwrap();
        response.results.remove(0).unwrap();
    }
    let said = String::from_utf8(metrics.render()).unwrap();
    let drafted = "refrain_engine_self_drafted_tokens_total{source=\"draft_model\"} 3";
    assert!(said.contains(drafted), "{said}");
}
