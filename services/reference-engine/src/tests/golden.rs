//! Tests against the outputs of others: of the compiled-in model's training code, and of transformers for small
//! random networks of each kind.

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::engine::{Sampling, StepItem, StepRequest};
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::Value;

use crate::config::EngineConfig;
use crate::engine::EngineCore;
use crate::kernels::WeightFormat;
use crate::model::Model;
use crate::model::shipped_model;
use crate::network::Branch;
use crate::network::ModelForward;
use crate::network::{BlockCount, KvCache, KvShape};

use super::support::{chain, item, load, opening, tensors};
use super::weight_files::FileTensor;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    /// Token ids of the prompt.
    ids: Vec<u32>,
    /// Logits of the first token ids after the prompt.
    first_logits: Vec<f32>,
    argmax: u32,
    /// Token ids of the greedy output.
    next_ids: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let golden: Golden = serde_json::from_str(include_str!("../../model/golden.json")).unwrap();
    assert!(!golden.cases.is_empty());
    golden.cases
}

fn model(format: WeightFormat) -> Arc<Model> {
    Arc::new(Model::load(&shipped_model(), format).unwrap())
}

#[test]
fn logits_are_those_of_the_training_code() {
    let mut bits = Vec::new();
    for format in [WeightFormat::F32, WeightFormat::Bf16] {
        let model = model(format);
        let mut forward = ModelForward::new(&model, &[], 1);
        for case in cases() {
            let mut kv = KvCache::new(KvShape::of(&model.architecture), BlockCount::default());
            kv.grow(case.ids.len());
            let branch = Branch {
                wants_logits: true,
                ..Branch::new(&mut kv, 0, &case.ids)
            };
            let pass = forward.run(&model, &mut [branch]);
            let logits = pass.logits(0, None);
            for (token, (ours, theirs)) in logits.iter().zip(&case.first_logits).enumerate() {
                assert!(
                    (ours - theirs).abs() < 2e-3,
                    "{}: logit {token} is {ours}, not {theirs}",
                    case.name
                );
            }
            let best = (0..logits.len())
                .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
                .unwrap();
            assert_eq!(best as u32, case.argmax, "{}", case.name);
            bits.push(
                logits
                    .iter()
                    .map(|logit| logit.to_bits())
                    .collect::<Vec<_>>(),
            );
        }
    }
    let (f32s, bf16s) = bits.split_at(bits.len() / 2);
    assert!(f32s == bf16s, "the way weights are stored changes bits");
}

#[test]
fn greedy_output_is_that_of_the_training_code_with_and_without_drafts() {
    let mut core = EngineCore::new(model(WeightFormat::F32), None, &EngineConfig::default());
    let now = Instant::now();
    let greedy = Sampling::default();
    for (index, case) in cases().into_iter().enumerate() {
        let count = case.next_ids.len();
        let mut step = |item: StepItem| {
            core.step(StepRequest { items: vec![item] }, now)
                .unwrap()
                .results
                .remove(0)
                .unwrap()
        };
        let plain = 2 * index as u128;
        let mut output = step(opening(plain, &greedy, &case.ids)).emitted;
        while output.len() < count {
            output.extend(step(item(plain, case.ids.len() + output.len(), &[])).emitted);
        }
        assert_eq!(output, case.next_ids, "{}", case.name);
        let drafted = StepItem {
            draft: Some(chain(&case.next_ids)),
            max_emit: count as u32,
            ..opening(plain + 1, &greedy, &case.ids)
        };
        assert_eq!(step(drafted).emitted, case.next_ids, "{}", case.name);
    }
}

/// The logits of small random networks after a prompt, by transformers.
#[derive(Deserialize)]
struct Kinds {
    seed: u64,
    cases: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    name: String,
    config: Value,
    ids: Vec<u32>,
    logits: Vec<f32>,
}

#[test]
fn networks_of_each_kind_compute_what_transformers_does() {
    let Kinds { seed, cases } = serde_json::from_str(include_str!("golden_kinds.json")).unwrap();
    assert!(cases.len() >= 6);
    for case in cases {
        let model = load(&case.config, &tensors(&case.config, Dtype::F32, seed)).unwrap();
        let mut kv = KvCache::new(KvShape::of(&model.architecture), BlockCount::default());
        kv.grow(case.ids.len());
        let branch = Branch {
            wants_logits: true,
            ..Branch::new(&mut kv, 0, &case.ids)
        };
        let mut forward = ModelForward::new(&model, &[], 1);
        let pass = forward.run(&model, &mut [branch]);
        let logits = pass.logits(0, None);
        assert_eq!(logits.len(), case.logits.len());
        let widest = logits.iter().map(|logit| logit.abs()).fold(0.0, f32::max);
        assert!(widest > 0.5, "{}: the logits are all small", case.name);
        for (token, (ours, theirs)) in logits.iter().zip(&case.logits).enumerate() {
            assert!(
                (ours - theirs).abs() < 2e-4 * widest.max(1.0),
                "{}: logit {token} is {ours}, not {theirs}",
                case.name
            );
        }
    }
}

#[test]
fn every_weight_of_a_kind_counts() {
    let Kinds { seed, cases } = serde_json::from_str(include_str!("golden_kinds.json")).unwrap();
    for case in cases {
        let config = &case.config;
        let all = tensors(config, Dtype::F32, seed);
        let hash = load(config, &all).unwrap().fingerprint();
        for (name, tensor) in &all {
            let mut without = all.clone();
            without.remove(name);
            let fault = load(config, &without).unwrap_err().to_string();
            assert!(fault.contains(name.as_str()), "{}: {fault}", case.name);
            let mut values = tensor.values();
            values[0] += 1.0;
            let changed = FileTensor::floats(Dtype::F32, tensor.shape(), &values);
            let mut other = all.clone();
            other.insert(name.clone(), changed);
            let other = load(config, &other).unwrap().fingerprint();
            assert_ne!(other, hash, "{}: {name} is in no hash", case.name);
        }
    }
}
