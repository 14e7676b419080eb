//! Tests of draft models.

use refrain_protocol::engine::{
    CloseRequest, DrafterKind, Sampling, SelfDraft, StepOutput, StepRequest,
};
use refrain_protocol::{EngineSessionId, TokenId};
use refrain_service_kit::telemetry::Metrics;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{
    Random, TestEngine, VOCAB, engine, engine_with_drafter, item, load, opening, tensors,
    tiny_config, write_model,
};
use crate::config::EngineConfig;
use crate::drafter::draft_model::{self, DraftModelNetwork};
use crate::drafter::{DraftNetwork, DraftRows};
use crate::kernels::WeightFormat;
use crate::model::Model;
use crate::model::{SHIPPED_MODEL, shipped_model};
use crate::service::EngineHandle;

/// Returns a random model that is smaller than the target and shares only the vocabulary with it.
pub(super) fn stranger() -> Box<dyn DraftNetwork> {
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

/// Returns a draft model with the target's own weights.
fn twin() -> Box<dyn DraftNetwork> {
    drafter(&tiny_config(), 11)
}

fn drafter(config: &Value, seed: u64) -> Box<dyn DraftNetwork> {
    let model = load(config, &tensors(config, Dtype::F32, seed)).unwrap();
    Box::new(DraftModelNetwork::new(model, 1))
}

/// Returns the first layers of the compiled-in model.
pub(super) fn shipped_layers(layers: usize) -> Box<dyn DraftNetwork> {
    let mut files = shipped_model();
    let mut config: Value = serde_json::from_slice(&files.config_json).unwrap();
    config["num_hidden_layers"] = json!(layers);
    files.config_json = serde_json::to_vec(&config).unwrap();
    let model = Model::load(&files, WeightFormat::F32).unwrap();
    Box::new(DraftModelNetwork::new(model, 1))
}

/// Runs a step of one item, and returns its output and the rows that the drafter computed.
fn stepped(engine: &mut TestEngine, wanted: SelfDraft, len: usize) -> (StepOutput, DraftRows) {
    let request = StepRequest {
        items: vec![drafting(1, len, wanted)],
    };
    let mut stepped = engine.core.step(request, engine.now).unwrap();
    (stepped.results.remove(0).unwrap(), stepped.draft_rows)
}

#[test]
fn drafts_of_the_targets_own_weights_are_always_accepted() {
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
        let mut plain = engine(EngineConfig::default());
        let truth = plain.decode(1, &sampling, &prompt, 60);
        let mut engine = engine_with_drafter(twin(), EngineConfig::default());
        let mut output = engine
            .step(opening_for_drafts(1, &sampling, &prompt))
            .emitted;
        while output.len() < 60 {
            let (next, _) = stepped(&mut engine, wanted, prompt.len() + output.len());
            assert_eq!((next.self_drafted, next.accepted_nodes.len()), (4, 4));
            output.extend(next.emitted);
        }
        if temperature == 0.0 {
            assert_eq!(output[..60], truth[..]);
        }
    }
}

#[test]
fn it_reads_only_new_tokens() {
    let mut engine = engine_with_drafter(stranger(), EngineConfig::default());
    let prompt = Random(8).tokens(40);
    let mut len = prompt.len();
    let greedy = Sampling::default();
    len += engine
        .step(opening_for_drafts(1, &greedy, &prompt))
        .emitted
        .len();
    let (output, rows) = stepped(&mut engine, wanted(3, 1, 3), len);
    assert_eq!((rows.text, rows.draft), (41, 2));
    len += output.emitted.len();
    let (next, rows) = stepped(&mut engine, wanted(3, 2, 6), len);
    assert_eq!(rows.text, output.emitted.len());
    // Plain steps, in which it does not draft.
    len += next.emitted.len();
    let mut missed = next.emitted.len();
    for _ in 0..5 {
        let count = engine.step(item(1, len, &[])).emitted.len();
        (len, missed) = (len + count, missed + count);
    }
    let (output, rows) = stepped(&mut engine, wanted(3, 1, 3), len);
    assert_eq!(rows.text, missed);
    // After a cut, it reads tokens that are new, and the last token in any case.
    len = len + output.emitted.len() - 4;
    let (_, rows) = stepped(&mut engine, wanted(1, 1, 1), len);
    assert_eq!(rows.text, 1);
}

#[test]
fn a_reopened_session_reuses_the_drafters_cache() {
    let mut engine = engine_with_drafter(stranger(), EngineConfig::default());
    let mut text = Random(8).tokens(80);
    let greedy = Sampling::default();
    text.extend(engine.step(opening_for_drafts(1, &greedy, &text)).emitted);
    stepped(&mut engine, wanted(2, 1, 2), text.len());
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1)],
        keep_kv: true,
        parks: false,
    });
    text.extend(engine.step(opening_for_drafts(1, &greedy, &text)).emitted);
    let (_, rows) = stepped(&mut engine, wanted(2, 1, 2), text.len());
    assert!(rows.text <= 3, "{rows:?}");
    // Without a kept session the whole text is read, in several steps if necessary.
    let config = EngineConfig {
        max_step_tokens: 50,
        max_draft_tokens: 8,
        ..EngineConfig::default()
    };
    let mut engine = engine_with_drafter(stranger(), config);
    let mut opening = opening_for_drafts(1, &greedy, &text[..40]);
    opening.sample = false;
    engine.step(opening);
    let mut len = 40 + engine.step(item(1, 40, &text[40..])).emitted.len() + text.len() - 40;
    let mut follows = Vec::new();
    for _ in 0..2 {
        let (output, rows) = stepped(&mut engine, wanted(2, 1, 2), len);
        follows.push((rows.text, output.self_drafted));
        len += output.emitted.len();
    }
    assert_eq!(follows, [(50, 0), (text.len() + 2 - 50, 2)]);
}

#[test]
fn its_cache_is_counted_and_yields_to_targets() {
    let text = Random(3).tokens(40);
    let greedy = Sampling::default();
    let run = |kv_tokens_max: u64| {
        let config = EngineConfig {
            kv_tokens_max,
            ..EngineConfig::default()
        };
        let mut engine = engine_with_drafter(twin(), config);
        engine.step(opening_for_drafts(1, &greedy, &text));
        let before = engine.core.sessions().kv_tokens().0;
        let (output, _) = stepped(&mut engine, wanted(2, 1, 2), 41);
        let used = engine.core.sessions().kv_tokens().0;
        (engine, output.self_drafted, before, used)
    };
    // A block of the twin is as large as one of the target, and 41 tokens take two blocks of each.
    let (mut engine, drafted, before, used) = run(128);
    assert_eq!((drafted, before, used), (2, 64, 128));
    // A target that needs the room takes it from the drafter.
    engine.step(opening(2, &greedy, &Random(4).tokens(40)));
    assert_eq!(engine.core.sessions().counts(), (2, 0));
    assert_eq!(engine.core.sessions().kv_tokens().0, 128);
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(1), EngineSessionId(2)],
        keep_kv: false,
        parks: false,
    });
    assert_eq!(engine.core.sessions().kv_tokens().0, 0);
    let (_, drafted, _, used) = run(96);
    assert_eq!((drafted, used), (0, 64));
}

#[test]
fn texts_beyond_its_context_are_decoded_without_drafts() {
    let mut config = tiny_config();
    config["max_position_embeddings"] = json!(50);
    let mut engine = engine_with_drafter(drafter(&config, 11), EngineConfig::default());
    let text = Random(3).tokens(48);
    engine.step(opening_for_drafts(1, &Sampling::default(), &text));
    let drafted =
        |engine: &mut TestEngine, len| stepped(engine, wanted(1, 1, 1), len).0.self_drafted;
    assert_eq!(drafted(&mut engine, 49), 1);
    assert_eq!(drafted(&mut engine, 51), 0);
}

#[test]
fn draft_models_that_do_not_fit_are_refused() {
    let fault = |source: &str, tokenizer| {
        let loaded = draft_model::load(source, VOCAB, tokenizer, WeightFormat::F32);
        let error = loaded.map(|_| ()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("draft model {source}: ")),
            "{error}"
        );
        error
    };
    assert!(fault("no/such/folder", None).contains("no/such/folder/config.json"));
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().to_str().unwrap();
    let mut config = tiny_config();
    config["vocab_size"] = json!(VOCAB + 1);
    write_model(folder.path(), &config, &tensors(&config, Dtype::F32, 1));
    let error = fault(source, None);
    assert!(
        error.contains("vocab_size is 62, but the target's is 61"),
        "{error}"
    );
    // A tokenizer is missing on either side, or has other tokens.
    let shipped = shipped_model().tokenization.unwrap();
    let tokenizer = shipped.tokenizer().unwrap();
    let error = fault(source, Some(&tokenizer));
    assert!(
        error.contains("tokenizer.json: the file is missing"),
        "{error}"
    );
    let error = fault(SHIPPED_MODEL, None);
    assert!(error.contains("the target has no such file"), "{error}");
    let mut other: Value = serde_json::from_slice(&shipped.tokenizer_json).unwrap();
    for added in other["added_tokens"].as_array_mut().unwrap() {
        added["special"] = json!(!added["special"].as_bool().unwrap());
    }
    std::fs::write(folder.path().join("tokenizer.json"), other.to_string()).unwrap();
    let error = fault(source, Some(&tokenizer));
    assert!(
        error.contains("its tokens differ from the target's"),
        "{error}"
    );
}

#[tokio::test]
async fn an_engine_reports_its_draft_model() {
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
