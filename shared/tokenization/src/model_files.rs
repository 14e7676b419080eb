//! The files of a model's folder that describe its text.

use std::path::Path;

use crate::{ChatTemplate, TokenizationError, Tokenizer};

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
    pub chat_template: Option<String>,
    /// `additional_chat_templates/tool_use.jinja`: the template of chats with tools, if it is another.
    pub tool_chat_template: Option<String>,
}

/// The part of `config.json` that is needed here. Models that also read images nest it.
#[derive(serde::Deserialize)]
struct ConfigJson {
    max_position_embeddings: Option<u32>,
    text_config: Option<Box<ConfigJson>>,
}

impl ModelFiles {
    /// Reads a folder in the common layout.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file cannot be read.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        let folder = folder.as_ref();
        let required = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|error| TokenizationError::File {
                path: path.display().to_string(),
                reason: error.to_string(),
            })
        };
        let optional = |name: &str| match folder.join(name).exists() {
            true => required(name).map(Some),
            false => Ok(None),
        };
        let template = |file: &'static str| {
            let text = optional(file)?.map(String::from_utf8).transpose();
            text.map_err(|error| TokenizationError::Model {
                file,
                reason: error.to_string(),
            })
        };
        Ok(ModelFiles {
            config_json: optional("config.json")?,
            generation_config_json: optional("generation_config.json")?,
            tokenizer_json: required("tokenizer.json")?,
            tokenizer_config_json: optional("tokenizer_config.json")?,
            chat_template: template("chat_template.jinja")?,
            tool_chat_template: template("additional_chat_templates/tool_use.jinja")?,
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
    /// The template does not compile, or `tokenizer_config.json` is not valid JSON.
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
