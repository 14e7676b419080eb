//! Tests of loading models, and of the errors of faulty ones.

use safetensors::Dtype;
use serde_json::json;

use crate::kernels::WeightFormat;
use crate::model::Model;
use crate::model::WeightTensors;
use crate::model::{ModelFiles, WeightSource};

use super::support::{load, tensors, tiny_config, write_model};
use super::weight_files::{FileTensor, write_weights};

#[test]
fn types_and_layouts() {
    let config = tiny_config();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        load(&config, &tensors(&config, dtype, 1)).unwrap();
    }
    let mut tied = tiny_config();
    tied["tie_word_embeddings"] = json!(true);
    let model = load(&tied, &tensors(&tied, Dtype::F32, 1)).unwrap();
    assert!(model.architecture.tied_head);
}

#[test]
fn shards_are_found_by_their_index() {
    let config = tiny_config();
    let all = tensors(&config, Dtype::BF16, 1);
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config, &all);
    let truth = Model::load(
        &ModelFiles::from_dir(folder.path()).unwrap(),
        WeightFormat::F32,
    )
    .unwrap();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let (first, second): (std::collections::HashMap<_, _>, _) = all
        .into_iter()
        .partition(|(name, _)| name.contains("layers.0"));
    let mut map = serde_json::Map::new();
    for (file, part) in [("a.safetensors", &first), ("b.safetensors", &second)] {
        write_weights(&folder.path().join(file), part);
        map.extend(part.keys().map(|name| (name.clone(), json!(file))));
    }
    let index = json!({"weight_map": map});
    std::fs::write(
        folder.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let sharded = Model::load(
        &ModelFiles::from_dir(folder.path()).unwrap(),
        WeightFormat::F32,
    )
    .unwrap();
    assert_eq!(sharded.embedding, truth.embedding);
    assert_eq!(sharded.weight_bytes(), truth.weight_bytes());
}

#[test]
fn faults_name_the_tensor() {
    let config = tiny_config();
    let name = "model.layers.1.mlp.down_proj.weight";
    let mut missing = tensors(&config, Dtype::F32, 1);
    missing.remove(name);
    let error = load(&config, &missing).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("tensor {name} is missing from the model's weights")
    );
    let mut turned = tensors(&config, Dtype::F32, 1);
    turned.insert(name.into(), FileTensor::zeros(Dtype::F32, &[52, 40]));
    let error = load(&config, &turned).unwrap_err().to_string();
    assert!(
        error.contains(name) && error.contains("[52, 40]") && error.contains("[40, 52]"),
        "{error}"
    );
    let mut whole = tensors(&config, Dtype::F32, 1);
    whole.insert(name.into(), FileTensor::zeros(Dtype::I64, &[40, 52]));
    let error = load(&config, &whole).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("i64"), "{error}");
}

#[test]
fn weights_that_compute_nothing_are_refused_by_the_name_of_their_tensor() {
    let config = tiny_config();
    let norm = "model.layers.1.input_layernorm.weight";
    let down = "model.layers.1.mlp.down_proj.weight";
    let embedding = "model.embed_tokens.weight";
    for (name, at, value, fault) in [
        (norm, 39, f32::NAN, "value 39 is NaN"),
        (down, 2_079, f32::INFINITY, "value 2079 is inf"),
        (embedding, 0, f32::NEG_INFINITY, "value 0 is -inf"),
    ] {
        let mut tensors = tensors(&config, Dtype::F32, 1);
        let mut values = tensors[name].values();
        values[at] = value;
        let shape = tensors[name].shape().to_vec();
        tensors.insert(name.into(), FileTensor::floats(Dtype::F32, &shape, &values));
        let error = load(&config, &tensors).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(fault), "{error}");
    }
    for name in [down, embedding] {
        let mut tensors = tensors(&config, Dtype::F32, 1);
        let shape = tensors[name].shape().to_vec();
        tensors.insert(name.into(), FileTensor::zeros(Dtype::BF16, &shape));
        let error = load(&config, &tensors).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("zero"), "{error}");
    }
    // The first token may have no embedding, and one value is enough of a matrix.
    let mut sparse = tensors(&config, Dtype::F32, 1);
    let mut values = sparse[down].values();
    values[1..].fill(0.0);
    let shape = sparse[down].shape().to_vec();
    sparse.insert(down.into(), FileTensor::floats(Dtype::F32, &shape, &values));
    load(&config, &sparse).unwrap();
}

#[test]
fn files_that_are_no_files_are_refused() {
    let config = tiny_config();
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config, &tensors(&config, Dtype::F32, 1));
    for name in ["model.safetensors", "config.json"] {
        let path = folder.path().join(name);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let opened = ModelFiles::from_dir(folder.path());
        let read = opened.and_then(|files| Model::load(&files, WeightFormat::F32));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("regular"), "{error}");
    }
}

#[test]
fn damaged_files_are_named() {
    let config = tiny_config();
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config, &tensors(&config, Dtype::F32, 1));
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for cut in [0, 4, 100, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..cut]).unwrap();
        let error = Model::load(
            &ModelFiles::from_dir(folder.path()).unwrap(),
            WeightFormat::F32,
        )
        .unwrap_err();
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
}

/// Returns the value of a half float, computed in f64 from its sign, exponent and fraction.
fn meaning(bits: u16, exponent_bits: u32) -> f64 {
    let fraction_bits = 15 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from((bits & 0x7fff) >> fraction_bits);
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    let size = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        top if top == (1 << exponent_bits) - 1 && fraction == 0.0 => f64::INFINITY,
        top if top == (1 << exponent_bits) - 1 => f64::NAN,
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[test]
fn every_half_float_is_read_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for (dtype, exponent_bits) in [(Dtype::F16, 5), (Dtype::BF16, 8)] {
        let tensor = FileTensor::new(dtype, &[1 << 16], bytes.clone());
        write_weights(&path, &[("all".to_owned(), tensor)].into());
        let weights = WeightSource::Files(vec![path.clone()]);
        let values = WeightTensors::open(&weights, WeightFormat::F32, |tensors| {
            tensors.values("all", &[1 << 16])
        })
        .unwrap();
        for (bits, value) in (0..=u16::MAX).zip(values) {
            let (value, truth) = (f64::from(value), meaning(bits, exponent_bits));
            let same = value.to_bits() == truth.to_bits() || value.is_nan() && truth.is_nan();
            assert!(same, "{dtype} {bits:#06x} is {truth}, not {value}");
        }
    }
}
