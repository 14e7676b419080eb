//! Models that load, and what is said of those that do not.

use candle_core::{DType, Device, Tensor};
use serde_json::json;

use crate::ModelError;
use crate::config::WeightFormat;
use crate::files::ModelFiles;
use crate::weights::Model;

use super::support::{load, tensors, tiny_config, write_model};

#[test]
fn types_and_layouts() {
    let config = tiny_config();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        load(&config, &tensors(&config, dtype, 1)).unwrap();
    }
    let mut tied = tiny_config();
    tied["tie_word_embeddings"] = json!(true);
    let model = load(&tied, &tensors(&tied, DType::F32, 1)).unwrap();
    assert!(model.architecture.tied_head);
}

#[test]
fn shards_are_found_by_their_index() {
    let config = tiny_config();
    let all = tensors(&config, DType::BF16, 1);
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
        candle_core::safetensors::save(part, folder.path().join(file)).unwrap();
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
    let mut missing = tensors(&config, DType::F32, 1);
    missing.remove(name);
    let error = load(&config, &missing).unwrap_err();
    assert!(
        matches!(&error, ModelError::MissingTensor { name: found } if found == name),
        "{error}"
    );
    let mut turned = tensors(&config, DType::F32, 1);
    turned.insert(name.into(), turned[name].t().unwrap().contiguous().unwrap());
    let error = load(&config, &turned).unwrap_err().to_string();
    assert!(
        error.contains(name) && error.contains("[52, 40]") && error.contains("[40, 52]"),
        "{error}"
    );
    let mut whole = tensors(&config, DType::F32, 1);
    whole.insert(
        name.into(),
        Tensor::zeros((40, 52), DType::I64, &Device::Cpu).unwrap(),
    );
    let error = load(&config, &whole).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("i64"), "{error}");
}

#[test]
fn damaged_files_are_named() {
    let config = tiny_config();
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &config, &tensors(&config, DType::F32, 1));
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
