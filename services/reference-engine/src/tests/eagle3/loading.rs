//! Tests of loading heads that other tools wrote, and of the errors of faulty ones.

use std::collections::HashMap;

use safetensors::Dtype;
use serde_json::{Value, json};

use super::{DRAFT_VOCAB, Reading, guessed, head_config, head_tensors, load_head, offsets};
use crate::drafter::eagle3::Eagle3Head;
use crate::model::{HeadFiles, SHIPPED_MODEL};
use crate::tests::support::{Random, VOCAB, tiny, write_model};
use crate::tests::weight_files::FileTensor;

/// Returns a head's logits after a text.
fn logits(head: Eagle3Head) -> Vec<f32> {
    let text = Random(2).tokens(20);
    Reading::new(tiny(), head.into(), &text).follow(&text, 0, 64)
}

fn fault(config: &Value, tensors: &HashMap<String, FileTensor>) -> String {
    let error = load_head(config, tensors).unwrap_err().to_string();
    assert!(error.starts_with("EAGLE-3 head "), "{error}");
    error
}

fn vocab_flags(tokens: &[usize]) -> FileTensor {
    let flags: Vec<u8> = (0..VOCAB as usize)
        .map(|token| u8::from(tokens.contains(&token)))
        .collect();
    FileTensor::new(Dtype::BOOL, &[VOCAB as usize], flags)
}

#[test]
fn names_of_other_loaders_and_older_keys() {
    let config = head_config();
    let tensors = head_tensors(&config, 1);
    let truth = logits(load_head(&config, &tensors).unwrap());
    let renamed: HashMap<String, FileTensor> = tensors
        .iter()
        .map(|(name, tensor)| {
            let name = name.replace("midlayer.", "layers.0.");
            (name.replace("d2t", "draft_id_to_target_id"), tensor.clone())
        })
        .collect();
    assert_eq!(logits(load_head(&config, &renamed).unwrap()), truth);
    let mut flat = config.clone();
    flat["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 1]);
    flat["architectures"] = json!(["LlamaForCausalLM"]);
    flat["eagle_config"] = json!({});
    flat["eos_token_id"] = json!([99_999]);
    flat.as_object_mut().unwrap().remove("target_hidden_size");
    assert_eq!(logits(load_head(&flat, &tensors).unwrap()), truth);
    let mut flagged = tensors;
    flagged.insert("t2d".into(), vocab_flags(&guessed(DRAFT_VOCAB)));
    assert_eq!(logits(load_head(&config, &flagged).unwrap()), truth);
}

#[test]
fn the_whole_vocabulary_needs_neither_d2t_nor_a_size() {
    let mut config = head_config();
    config["draft_vocab_size"] = json!(VOCAB);
    let mut tensors = head_tensors(&config, 1);
    tensors.remove("d2t");
    config.as_object_mut().unwrap().remove("draft_vocab_size");
    let head = load_head(&config, &tensors).unwrap();
    assert_eq!(head.tokens, (0..VOCAB).collect::<Vec<_>>());
    // Without a matrix of its own it uses the target's, which has the same shape.
    let own = logits(head);
    tensors.remove("lm_head.weight");
    let head = load_head(&config, &tensors).unwrap();
    assert!(head.weight_bytes() < 4 * 60_000);
    let lent = logits(head);
    assert_eq!(lent.len(), VOCAB as usize);
    assert_ne!(lent, own);
}

#[test]
fn another_width_with_an_embedding_of_its_own() {
    let mut config = head_config();
    config["hidden_size"] = json!(24);
    config["num_key_value_heads"] = json!(4);
    config.as_object_mut().unwrap().remove("head_dim");
    let mut sized = config.clone();
    sized["head_dim"] = json!(6);
    let mut tensors = head_tensors(&sized, 1);
    assert!(fault(&config, &tensors).contains("hidden_size is 24"));
    let values: Vec<f32> = (0..VOCAB * 24).map(|i| (i as f32).sin()).collect();
    let embedding = FileTensor::floats(Dtype::F32, &[VOCAB as usize, 24], &values);
    tensors.insert("embed_tokens.weight".into(), embedding);
    let head = load_head(&config, &tensors).unwrap();
    assert_eq!(head.shape.architecture.head_dim, 6);
    assert_eq!(logits(head).len(), DRAFT_VOCAB);
    // A head with a smaller vocabulary does not fit this target.
    config["vocab_size"] = json!(50);
    assert!(fault(&config, &tensors).contains("vocab_size is 50; the target's is 61"));
}

#[test]
fn the_default_layers_are_used_if_none_are_named() {
    let config = head_config();
    let mut target = tiny().architecture.clone();
    let mut unnamed = config;
    unnamed["eagle_config"] = json!({});
    let bytes = serde_json::to_vec(&unnamed).unwrap();
    let captured = |target: &crate::model::Architecture| {
        crate::drafter::eagle3::HeadShape::from_json(&bytes, target)
            .map(|shape| shape.captured_layers)
    };
    target.layers = 24;
    assert_eq!(captured(&target).unwrap(), [1, 11, 20]);
    target.layers = 6;
    assert_eq!(captured(&target).unwrap(), [1, 2, 2]);
    target.layers = 4;
    let error = captured(&target).unwrap_err().to_string();
    assert!(error.contains("too few"), "{error}");
}

#[test]
fn keys_that_do_not_fit_are_named() {
    let cases = [
        ("fc_norm", json!(true), "fc_norm is true"),
        ("norm_output", json!(true), "norm_output is true"),
        (
            "use_aux_hidden_state",
            json!(false),
            "use_aux_hidden_state is false",
        ),
        ("num_hidden_layers", json!(2), "num_hidden_layers is 2"),
        ("attention_bias", json!(true), "attention_bias"),
        ("model_type", json!("qwen3"), "LlamaForCausalLMEagle3"),
        (
            "target_hidden_size",
            json!(64),
            "target_hidden_size is 64; the target's is 40",
        ),
        ("draft_vocab_size", json!(62), "draft_vocab_size is 62"),
        ("draft_vocab_size", json!(0), "draft_vocab_size is 0"),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!([0, 1, 2]),
            "names layer 2",
        ),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!([]),
            "names no layer",
        ),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!([-1]),
            "config.json",
        ),
        ("hidden_size", json!("40"), "config.json"),
        ("num_key_value_heads", json!(3), "num_key_value_heads 3"),
    ];
    let tensors = head_tensors(&head_config(), 1);
    for (key, value, words) in cases {
        let mut config = head_config();
        config[key] = value;
        let error = fault(&config, &tensors);
        assert!(error.contains(words), "{key}: {error}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let config = head_config();
    let whole = head_tensors(&config, 1);
    let with = |name: &str, tensor: Option<FileTensor>| {
        let mut tensors = whole.clone();
        match tensor {
            Some(tensor) => tensors.insert(name.to_owned(), tensor),
            None => tensors.remove(name),
        };
        fault(&config, &tensors)
    };
    for name in whole.keys() {
        let error = with(name, None);
        let named = name == "midlayer.self_attn.q_proj.weight" || error.contains(name.as_str());
        assert!(named && error.contains("missing"), "{name}: {error}");
        let error = with(name, Some(FileTensor::zeros(Dtype::F32, &[3, 5])));
        assert!(
            error.contains(name.as_str()) && error.contains("[3, 5]"),
            "{name}: {error}"
        );
    }
    let error = with("fc.weight", Some(FileTensor::zeros(Dtype::F32, &[40, 80])));
    assert!(
        error.contains("[40, 80]") && error.contains("[40, 120]"),
        "{error}"
    );
    let error = with("d2t", Some(FileTensor::zeros(Dtype::F32, &[DRAFT_VOCAB])));
    assert!(error.contains("d2t") && error.contains("i64"), "{error}");
    let mut tokens = guessed(DRAFT_VOCAB);
    tokens[7] = VOCAB as usize;
    let error = with("d2t", Some(offsets(&tokens)));
    assert!(
        error.contains("draft token 7") && error.contains("outside the vocabulary"),
        "{error}"
    );
    tokens[7] = tokens[30];
    let error = with("d2t", Some(offsets(&tokens)));
    assert!(
        error.contains("draft token 30") && error.contains("as an earlier one does"),
        "{error}"
    );
    let other = vocab_flags(&guessed(DRAFT_VOCAB)[1..]);
    let error = with("t2d", Some(other));
    assert!(error.contains("t2d: token 3 is false"), "{error}");
}

#[test]
fn files_are_found_by_setting() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().to_str().unwrap();
    let open = |setting: &str, model: &str| HeadFiles::open(setting, model);
    assert!(open("auto", model).unwrap().is_none());
    assert!(open("off", SHIPPED_MODEL).unwrap().is_none());
    assert_eq!(
        open("auto", SHIPPED_MODEL).unwrap().unwrap().source,
        SHIPPED_MODEL
    );
    let beside = folder.path().join("eagle3");
    std::fs::create_dir(&beside).unwrap();
    let error = open("auto", model).unwrap_err().to_string();
    assert!(
        error.contains("eagle3") && error.contains("config.json"),
        "{error}"
    );
    std::fs::write(beside.join("pytorch_model.bin"), "").unwrap();
    let error = open("auto", model).unwrap_err().to_string();
    assert!(
        error.contains("pytorch_model.bin") && error.contains("save_file"),
        "{error}"
    );
    let config = head_config();
    write_model(&beside, &config, &head_tensors(&config, 1));
    for setting in ["auto", beside.to_str().unwrap()] {
        let files = open(setting, model).unwrap().unwrap();
        Eagle3Head::load(&files, &tiny(), crate::kernels::WeightFormat::F32).unwrap();
    }
    assert!(open("off", model).unwrap().is_none());
}
