//! Where a model's bytes come from: a folder in Hugging Face's layout, or this binary.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ModelError;

/// Source name of the model that is compiled in.
pub const SHIPPED_MODEL: &str = "builtin:refrain-tiny";

/// [`HeadFiles::open`]: the head that belongs to the model, if there is one.
pub(crate) const HEAD_AUTO: &str = "auto";
/// [`HeadFiles::open`]: no head.
pub(crate) const HEAD_OFF: &str = "off";

/// A model's files, weights left where they are until they are loaded.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// The name that clients use for it unless configuration says another.
    pub name: String,
    /// `config.json`.
    pub config_json: Cow<'static, [u8]>,
    /// `generation_config.json`.
    pub generation_config_json: Option<Cow<'static, [u8]>>,
    /// Tokenizer and chat template; `None` without `tokenizer.json`.
    pub tokenization: Option<refrain_tokenization::ModelFiles>,
    pub(crate) weights: Weights,
}

#[derive(Clone, Debug)]
pub(crate) enum Weights {
    Embedded(&'static [u8]),
    /// Shards, each read whole and dropped again.
    Files(Vec<PathBuf>),
}

/// Of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The model that is compiled into this crate.
pub fn shipped_model() -> ModelFiles {
    ModelFiles {
        name: "refrain-tiny".into(),
        config_json: Cow::Borrowed(include_bytes!("../model/config.json")),
        generation_config_json: Some(Cow::Borrowed(include_bytes!(
            "../model/generation_config.json"
        ))),
        tokenization: Some(refrain_tokenization::ModelFiles {
            config_json: Some(include_bytes!("../model/config.json").to_vec()),
            generation_config_json: None,
            tokenizer_json: include_bytes!("../model/tokenizer.json").to_vec(),
            tokenizer_config_json: Some(include_bytes!("../model/tokenizer_config.json").to_vec()),
            chat_template: Some(include_str!("../model/chat_template.jinja").to_owned()),
        }),
        weights: Weights::Embedded(include_bytes!("../model/model.safetensors")),
    }
}

impl ModelFiles {
    /// The model that `source` names: [`SHIPPED_MODEL`] or a folder.
    ///
    /// # Errors
    /// An unknown `builtin:` name, or a file that is missing or unreadable.
    pub fn open(source: &str) -> Result<Self, ModelError> {
        match source.strip_prefix("builtin:") {
            Some("refrain-tiny") => Ok(shipped_model()),
            Some(_) => Err(ModelError::File {
                path: source.to_owned(),
                reason: format!("no such model is compiled in; there is {SHIPPED_MODEL}"),
            }),
            None => ModelFiles::from_dir(source),
        }
    }

    /// Reads a folder with `config.json`, `model.safetensors` (or an index and its shards) and, if texts
    /// are to be tokenized, `tokenizer.json`.
    ///
    /// # Errors
    /// A file that is missing or unreadable.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Self, ModelError> {
        let folder = folder.as_ref();
        let generation = folder.join("generation_config.json");
        let tokenization = match folder.join("tokenizer.json").exists() {
            true => Some(refrain_tokenization::ModelFiles::from_dir(folder)?),
            false => None,
        };
        Ok(ModelFiles {
            name: folder.file_name().map_or_else(
                || "model".into(),
                |name| name.to_string_lossy().into_owned(),
            ),
            config_json: Cow::Owned(read(&folder.join("config.json"))?),
            generation_config_json: match generation.exists() {
                true => Some(Cow::Owned(read(&generation)?)),
                false => None,
            },
            tokenization,
            weights: Weights::Files(shards(folder)?),
        })
    }
}

/// An EAGLE-3 head's files.
#[derive(Clone, Debug)]
pub(crate) struct HeadFiles {
    /// Folder, or the name of the model that is compiled in.
    pub(crate) source: String,
    pub(crate) config_json: Cow<'static, [u8]>,
    pub(crate) weights: Weights,
}

/// The head of the model that is compiled into this crate.
pub(crate) fn shipped_head() -> HeadFiles {
    HeadFiles {
        source: SHIPPED_MODEL.to_owned(),
        config_json: Cow::Borrowed(include_bytes!("../model/eagle3/config.json")),
        weights: Weights::Embedded(include_bytes!("../model/eagle3/model.safetensors")),
    }
}

impl HeadFiles {
    /// The head that `setting` names for the model of source `model`: a folder, [`HEAD_AUTO`] or [`HEAD_OFF`].
    ///
    /// # Errors
    /// A file that is missing or unreadable.
    pub(crate) fn open(setting: &str, model: &str) -> Result<Option<Self>, ModelError> {
        match setting {
            HEAD_OFF => Ok(None),
            HEAD_AUTO if model == SHIPPED_MODEL => Ok(Some(shipped_head())),
            HEAD_AUTO => {
                let folder = Path::new(model).join("eagle3");
                match folder.is_dir() {
                    true => HeadFiles::from_dir(&folder).map(Some),
                    false => Ok(None),
                }
            }
            folder => HeadFiles::from_dir(Path::new(folder)).map(Some),
        }
    }

    /// Reads a folder with `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// A file that is missing or unreadable.
    pub(crate) fn from_dir(folder: &Path) -> Result<Self, ModelError> {
        let source = folder.display().to_string();
        let fault = |fault| ModelError::Head {
            head: source.clone(),
            fault: Box::new(fault),
        };
        let pickled = folder.join("pytorch_model.bin");
        if pickled.exists() && !folder.join("model.safetensors").exists() {
            return Err(fault(ModelError::File {
                path: pickled.display().to_string(),
                reason: "pickled weights are not read, since they can run code; convert them once with                          Python: from safetensors.torch import save_file; import torch;                          save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
                    .into(),
            }));
        }
        Ok(HeadFiles {
            config_json: Cow::Owned(read(&folder.join("config.json")).map_err(fault)?),
            weights: Weights::Files(shards(folder).map_err(fault)?),
            source,
        })
    }
}

/// Reads a file whole.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    std::fs::read(path).map_err(|error| ModelError::File {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

/// The weight files of a folder.
fn shards(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Err(ModelError::File {
            path: single.display().to_string(),
            reason: "neither it nor model.safetensors.index.json exists".into(),
        });
    }
    let fault = |reason: String| ModelError::Weights {
        file: index.display().to_string(),
        reason,
    };
    let parsed: ShardIndex =
        serde_json::from_slice(&read(&index)?).map_err(|error| fault(error.to_string()))?;
    let mut names: Vec<&String> = parsed.weight_map.values().collect();
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(fault("weight_map names no file".into()));
    }
    // A shard's name is a plain file name: an index never reaches outside its folder.
    if let Some(name) = names.iter().find(|name| {
        Path::new(name)
            .file_name()
            .is_none_or(|file| file != name.as_str())
    }) {
        return Err(fault(format!(
            "weight_map names {name:?}, which is no file name"
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
    fn an_index_stays_inside_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let index = folder.path().join("model.safetensors.index.json");
        std::fs::write(&index, r#"{"weight_map": {"a": "../x"}}"#).unwrap();
        assert!(fault(folder.path().to_str().unwrap()).contains("no file name"));
        std::fs::write(&index, r#"{"weight_map": {"a": "2", "b": "1", "c": "2"}}"#).unwrap();
        let files = ModelFiles::from_dir(folder.path()).unwrap();
        let Weights::Files(paths) = files.weights else {
            panic!("weights of a folder are files")
        };
        assert_eq!(paths, [folder.path().join("1"), folder.path().join("2")]);
    }
}
