//! Finds a model's files: in a folder of Hugging Face's layout, or compiled into this binary.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use miniz_oxide::inflate::decompress_to_vec;
use refrain_tokenization::{CONFIG_BYTES_MAX, TokenizationError, Tokenizer, read_model_file};
use serde::Deserialize;

use super::error::ModelError;

/// Source name of the compiled-in model.
pub const SHIPPED_MODEL: &str = "builtin:refrain-tiny";

/// Largest file of weights, bytes. Models are sharded into files of some gigabytes, and all are in memory at once.
const WEIGHTS_BYTES_MAX: u64 = 1 << 40;

/// Setting of [`HeadFiles::open`] that chooses the head beside the model, if there is one.
pub(crate) const HEAD_AUTO: &str = "auto";
/// Setting of [`HeadFiles::open`] for no head.
pub(crate) const HEAD_OFF: &str = "off";

/// A model's files. The weights are not read until the model is loaded.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// The name that clients use for the model, unless the configuration sets another.
    pub(crate) name: String,
    pub(crate) config_json: Vec<u8>,
    pub(crate) generation_config_json: Option<Vec<u8>>,
    /// The tokenizer and the chat template. `None` if there is no `tokenizer.json`.
    pub tokenization: Option<refrain_tokenization::ModelFiles>,
    pub(crate) weights: WeightSource,
}

#[derive(Clone, Debug)]
pub(crate) enum WeightSource {
    /// Compiled-in weights, packed by `build.rs`: the bytes at even offsets, and the deflated bytes at odd offsets.
    Packed {
        low: &'static [u8],
        high: &'static [u8],
    },
    /// The paths of the shards. Their bytes are dropped once the model is loaded.
    Files(Vec<PathBuf>),
}

/// The content of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The compiled-in weights of the given name.
macro_rules! packed_weights {
    ($name:literal) => {
        WeightSource::Packed {
            low: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".low")),
            high: include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".high")),
        }
    };
}

/// Returns the files of the compiled-in model.
pub(crate) fn shipped_model() -> ModelFiles {
    ModelFiles {
        name: "refrain-tiny".into(),
        config_json: include_bytes!("../../model/config.json").to_vec(),
        generation_config_json: Some(include_bytes!("../../model/generation_config.json").to_vec()),
        tokenization: Some(refrain_tokenization::ModelFiles {
            config_json: Some(include_bytes!("../../model/config.json").to_vec()),
            generation_config_json: None,
            tokenizer_json: include_bytes!("../../model/tokenizer.json").to_vec(),
            tokenizer_config_json: Some(
                include_bytes!("../../model/tokenizer_config.json").to_vec(),
            ),
            chat_template: Some(include_bytes!("../../model/chat_template.jinja").to_vec()),
            tool_chat_template: None,
        }),
        weights: packed_weights!("model"),
    }
}

impl ModelFiles {
    /// Opens the model that `source` names, which is [`SHIPPED_MODEL`] or a folder.
    ///
    /// # Errors
    /// Fails for an unknown `builtin:` name, or a file that is missing or unreadable.
    pub fn open(source: &str) -> Result<Self, ModelError> {
        match source.strip_prefix("builtin:") {
            Some("refrain-tiny") => Ok(shipped_model()),
            Some(_) => Err(ModelError::Read {
                path: source.to_owned(),
                reason: format!("no such model is compiled in; use {SHIPPED_MODEL} or a folder"),
            }),
            None => ModelFiles::from_dir(source),
        }
    }

    /// Opens a folder that has `config.json` and `model.safetensors` (or an index and its shards). To tokenize text,
    /// it needs `tokenizer.json` too.
    ///
    /// # Errors
    /// Fails for a file that is missing or unreadable.
    pub(crate) fn from_dir(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let folder = folder.as_ref();
        let name = folder.file_name().unwrap_or("model".as_ref());
        let generation = folder.join("generation_config.json");
        let generation = generation
            .exists()
            .then(|| read(&generation, CONFIG_BYTES_MAX));
        let has_tokenizer = folder.join("tokenizer.json").exists();
        Ok(ModelFiles {
            name: name.to_string_lossy().into_owned(),
            config_json: read(&folder.join("config.json"), CONFIG_BYTES_MAX)?,
            generation_config_json: generation.transpose()?,
            tokenization: has_tokenizer
                .then(|| refrain_tokenization::ModelFiles::from_dir(folder))
                .transpose()?,
            weights: WeightSource::Files(shards(folder)?),
        })
    }

    /// Returns the tokenizer, if there is one.
    ///
    /// # Errors
    /// Fails if `tokenizer.json` cannot be used.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>, TokenizationError> {
        let files = self.tokenization.as_ref();
        files
            .map(refrain_tokenization::ModelFiles::tokenizer)
            .transpose()
    }
}

/// The files of an EAGLE-3 head.
#[derive(Clone, Debug)]
pub(crate) struct HeadFiles {
    /// The folder of the head, or the name of the compiled-in model.
    pub(crate) source: String,
    pub(crate) config_json: Vec<u8>,
    pub(crate) weights: WeightSource,
}

/// Returns the files of the compiled-in model's head.
pub(crate) fn shipped_head() -> HeadFiles {
    HeadFiles {
        source: SHIPPED_MODEL.to_owned(),
        config_json: include_bytes!("../../model/eagle3/config.json").to_vec(),
        weights: packed_weights!("eagle3"),
    }
}

impl HeadFiles {
    /// How faults of a head begin, before the name of its source.
    pub(crate) const KIND: &str = "EAGLE-3 head";

    /// Opens the head for the model of source `model`. `setting` is a folder, [`HEAD_AUTO`] or [`HEAD_OFF`].
    ///
    /// # Errors
    /// Fails for a file that is missing or unreadable.
    pub(crate) fn open(setting: &str, model: &str) -> Result<Option<Self>, ModelError> {
        match setting {
            HEAD_OFF => Ok(None),
            HEAD_AUTO if model == SHIPPED_MODEL => Ok(Some(shipped_head())),
            HEAD_AUTO => {
                let folder = Path::new(model).join("eagle3");
                folder
                    .is_dir()
                    .then(|| HeadFiles::from_dir(&folder))
                    .transpose()
            }
            folder => HeadFiles::from_dir(Path::new(folder)).map(Some),
        }
    }

    /// Opens a folder that has `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// Fails for a file that is missing or unreadable.
    pub(crate) fn from_dir(folder: &Path) -> Result<Self, ModelError> {
        let source = folder.display().to_string();
        let fault = |fault: ModelError| fault.of_drafter(HeadFiles::KIND, &source);
        let pickled = folder.join("pytorch_model.bin");
        if pickled.exists() && !folder.join("model.safetensors").exists() {
            return Err(fault(ModelError::Read {
                path: pickled.display().to_string(),
                reason: "pickled weights are not read, because unpickling can run code; convert them once with Python: \
                         from safetensors.torch import save_file; import torch; \
                         save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
                    .into(),
            }));
        }
        Ok(HeadFiles {
            config_json: read(&folder.join("config.json"), CONFIG_BYTES_MAX).map_err(fault)?,
            weights: WeightSource::Files(shards(folder).map_err(fault)?),
            source,
        })
    }
}

impl WeightSource {
    /// Returns the bytes of each weight file, with a name for messages.
    ///
    /// # Errors
    /// Fails for a file that is unreadable.
    pub(crate) fn read(&self) -> Result<Vec<(String, Vec<u8>)>, ModelError> {
        match self {
            WeightSource::Files(paths) => paths
                .iter()
                .map(|path| Ok((path.display().to_string(), read(path, WEIGHTS_BYTES_MAX)?)))
                .collect(),
            WeightSource::Packed { low, high } => {
                let name = "compiled-in weights".to_owned();
                match decompress_to_vec(high) {
                    Ok(high) => Ok(vec![(name, interleave(low, &high))]),
                    Err(error) => Err(ModelError::Content {
                        file: name,
                        reason: error.to_string(),
                    }),
                }
            }
        }
    }
}

/// Joins the bytes at even offsets and those at odd offsets.
fn interleave(low: &[u8], high: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(low.len() + high.len());
    for (low, high) in low.iter().zip(high) {
        bytes.extend([low, high]);
    }
    bytes.extend(&low[high.len().min(low.len())..]);
    bytes
}

/// Reads a file of at most `bytes_max` bytes.
fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ModelError> {
    read_model_file(path, bytes_max).map_err(|reason| ModelError::Read {
        path: path.display().to_string(),
        reason,
    })
}

/// Returns the paths of a folder's weight files.
fn shards(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Err(ModelError::Read {
            path: single.display().to_string(),
            reason: "neither this file nor model.safetensors.index.json exists".into(),
        });
    }
    let fault = |reason: String| ModelError::Content {
        file: index.display().to_string(),
        reason,
    };
    let parsed: ShardIndex = serde_json::from_slice(&read(&index, CONFIG_BYTES_MAX)?)
        .map_err(|error| fault(error.to_string()))?;
    let mut names: Vec<&String> = parsed.weight_map.values().collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(fault("weight_map is empty".into()));
    }
    // A shard's name must be a plain file name, so that an index never reaches outside its folder.
    if let Some(name) = names.iter().find(|name| {
        Path::new(name)
            .file_name()
            .is_none_or(|file| file != name.as_str())
    }) {
        return Err(fault(format!(
            "weight_map has {name:?}, which is not a plain file name"
        )));
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(source: &str) -> String {
        ModelFiles::open(source).unwrap_err().to_string()
    }

    #[test]
    fn missing_files_are_named() {
        assert!(fault("builtin:other").contains(SHIPPED_MODEL));
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().to_str().unwrap();
        assert!(fault(source).contains("config.json"));
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert!(fault(source).contains("model.safetensors.index.json"));
    }

    #[test]
    fn compiled_in_weights_are_those_of_the_files() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model");
        for (packed, file) in [
            (shipped_model().weights, folder.join("model.safetensors")),
            (
                shipped_head().weights,
                folder.join("eagle3/model.safetensors"),
            ),
        ] {
            let (_, bytes) = packed.read().unwrap().remove(0);
            assert!(
                bytes == read(&file, WEIGHTS_BYTES_MAX).unwrap(),
                "{} differs",
                file.display()
            );
        }
        assert_eq!(interleave(&[1, 3, 5], &[2, 4]), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn an_index_stays_inside_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let index = folder.path().join("model.safetensors.index.json");
        std::fs::write(&index, r#"{"weight_map": {"a": "../x"}}"#).unwrap();
        assert!(fault(folder.path().to_str().unwrap()).contains("not a plain file name"));
        std::fs::write(&index, r#"{"weight_map": {"a": "2", "b": "1", "c": "2"}}"#).unwrap();
        let files = ModelFiles::from_dir(folder.path()).unwrap();
        let WeightSource::Files(paths) = files.weights else {
            panic!("weights of a folder are files")
        };
        assert_eq!(paths, [folder.path().join("1"), folder.path().join("2")]);
    }
}
