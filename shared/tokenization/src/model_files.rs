//! The files of a model's folder that describe its text.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::chat_template::{TEMPLATE_FILE, TOOL_TEMPLATE_FILE};
use crate::{ChatTemplate, TokenizationError, Tokenizer};

/// Largest `config.json`, `generation_config.json` or index of weight files, bytes.
pub const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// Largest `tokenizer.json` or `tokenizer_config.json`, bytes. Those of the largest vocabularies have some ten
/// megabytes.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Largest chat template, bytes.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 4 << 20;

/// Reads a file of a model, if it is a regular file of at most `bytes_max` bytes. A device would have no end, and a
/// pipe no beginning.
///
/// # Errors
/// The reason why the file cannot be read.
pub fn read_model_file(path: &Path, bytes_max: u64) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| error.to_string();
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err("it is not a regular file".into());
    }
    let len = metadata.len();
    if len > bytes_max {
        return Err(format!("it has {len} bytes, more than {bytes_max}"));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(len).map(|len| bytes.try_reserve_exact(len));
    if !matches!(room, Ok(Ok(()))) {
        return Err(format!("there is no memory for its {len} bytes"));
    }
    let file = File::open(path).map_err(failed)?;
    file.take(len).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// The files of a model's folder without the weights. They are plain bytes, so that they can also be compiled in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// `config.json`: the shape of the network.
    pub config_json: Option<Vec<u8>>,
    /// `generation_config.json`: defaults for generation, such as the end tokens.
    pub generation_config_json: Option<Vec<u8>>,
    /// `tokenizer.json`.
    pub tokenizer_json: Vec<u8>,
    /// `tokenizer_config.json`: the names of the special tokens, and sometimes the chat template.
    pub tokenizer_config_json: Option<Vec<u8>>,
    /// `chat_template.jinja`. It takes precedence over the template in `tokenizer_config.json`.
    pub chat_template: Option<Vec<u8>>,
    /// `additional_chat_templates/tool_use.jinja`: the template of chats with tools, if it is another.
    pub tool_chat_template: Option<Vec<u8>>,
}

/// The part of `config.json` that is needed here. Models that also read images nest it.
#[derive(serde::Deserialize)]
struct ConfigJson {
    max_position_embeddings: Option<u32>,
    text_config: Option<Box<ConfigJson>>,
}

impl ModelFiles {
    /// Reads a folder in the common layout, or a file whose name ends with `.gguf`.
    ///
    /// # Errors
    /// As [`ModelFiles::from_dir`] and [`ModelFiles::from_gguf`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        let path = path.as_ref();
        let extension = path.extension().unwrap_or_default();
        match extension.eq_ignore_ascii_case("gguf") && !path.is_dir() {
            true => ModelFiles::from_gguf(path),
            false => ModelFiles::from_dir(path),
        }
    }

    /// Reads a folder in the common layout.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file cannot be read or is far too large.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        let folder = folder.as_ref();
        let required = |name: &str, bytes_max| {
            let path = folder.join(name);
            read_model_file(&path, bytes_max).map_err(|reason| TokenizationError::File {
                path: path.display().to_string(),
                reason,
            })
        };
        let optional = |name: &str, bytes_max| match folder.join(name).exists() {
            true => required(name, bytes_max).map(Some),
            false => Ok(None),
        };
        Ok(ModelFiles {
            config_json: optional("config.json", CONFIG_BYTES_MAX)?,
            generation_config_json: optional("generation_config.json", CONFIG_BYTES_MAX)?,
            tokenizer_json: required("tokenizer.json", TOKENIZER_BYTES_MAX)?,
            tokenizer_config_json: optional("tokenizer_config.json", TOKENIZER_BYTES_MAX)?,
            chat_template: optional(TEMPLATE_FILE, TEMPLATE_BYTES_MAX)?,
            tool_chat_template: optional(TOOL_TEMPLATE_FILE, TEMPLATE_BYTES_MAX)?,
        })
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// `tokenizer.json` cannot be used.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizationError> {
        Tokenizer::from_bytes(&self.tokenizer_json)
    }

    /// The chat template, if the model has one.
    ///
    /// # Errors
    /// The template is no UTF-8 or does not compile, or `tokenizer_config.json` is not valid JSON.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, TokenizationError> {
        ChatTemplate::from_files(
            self.chat_template.as_deref(),
            self.tool_chat_template.as_deref(),
            self.tokenizer_config_json.as_deref(),
        )
    }

    /// The longest context of the network, if `config.json` has it, tokens.
    pub fn max_context(&self) -> Option<u32> {
        let config: ConfigJson = serde_json::from_slice(self.config_json.as_deref()?).ok()?;
        config
            .max_position_embeddings
            .or_else(|| config.text_config?.max_position_embeddings)
    }
}

#[cfg(test)]
mod shipped_model_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_tokenizer_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let error = ModelFiles::from_dir(folder.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn only_regular_files_of_a_sensible_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let reason = |name: &str| read_model_file(&path(name), 10).unwrap_err();
        std::fs::write(path("small"), [7; 10]).unwrap();
        assert_eq!(read_model_file(&path("small"), 10), Ok(vec![7; 10]));
        std::os::unix::fs::symlink(path("small"), path("link")).unwrap();
        assert_eq!(read_model_file(&path("link"), 10), Ok(vec![7; 10]));
        std::fs::write(path("large"), [7; 11]).unwrap();
        assert!(reason("large").contains("11 bytes"));
        std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
        assert!(reason("device").contains("regular"));
        std::fs::create_dir(path("folder")).unwrap();
        assert!(reason("folder").contains("regular"));
        // A file with a hole has more bytes than there is memory.
        File::create(path("hole"))
            .unwrap()
            .set_len(1 << 43)
            .unwrap();
        let hole = read_model_file(&path("hole"), u64::MAX);
        assert!(hole.is_err(), "read {} bytes", hole.unwrap().len());
    }

    #[test]
    fn a_template_that_is_no_text_costs_the_template_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), b"{}").unwrap();
        std::fs::write(folder.path().join(TEMPLATE_FILE), b"a\xff").unwrap();
        let files = ModelFiles::from_dir(folder.path()).unwrap();
        let error = files.chat_template().unwrap_err().to_string();
        assert!(error.contains(TEMPLATE_FILE), "{error}");
    }

    #[test]
    fn optional_files_are_optional_and_the_context_is_found() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), b"{}").unwrap();
        let mut files = ModelFiles::from_dir(folder.path()).unwrap();
        assert_eq!(files.tokenizer_config_json, None);
        assert_eq!(files.max_context(), None);
        files.config_json = Some(br#"{"max_position_embeddings": 4096}"#.to_vec());
        assert_eq!(files.max_context(), Some(4096));
        files.config_json = Some(br#"{"text_config": {"max_position_embeddings": 7}}"#.to_vec());
        assert_eq!(files.max_context(), Some(7));
    }
}
