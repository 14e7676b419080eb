//! The tokenizer of a log's texts: a file, that of a server, or one that needs no vocabulary.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use refrain_suffix_index::Token;
use refrain_tokenization::Tokenizer;
use serde::Serialize;

use super::remote_tokenizer::RemoteTokenizer;
use crate::approximate_tokenizer::ApproximateTokenizer;

/// The variable with the key for a tokenizer that is a URL. A report repeats the command, so no option has it.
const KEY_VARIABLE: &str = "REFRAIN_API_KEY";

/// Which tokenizer turns the texts of a log into tokens.
#[derive(Args, Clone, Debug, Default, Serialize)]
pub struct TokenizerOptions {
    /// Tokenizer for logs that hold text: a tokenizer.json, the folder of a model, or the URL of a running gateway or
    /// vLLM, with a key in REFRAIN_API_KEY [default: an approximate one].
    #[arg(long, value_name = "FILE|FOLDER|URL")]
    pub tokenizer: Option<PathBuf>,
    /// Model whose tokenizer it is, where --tokenizer is a URL [default: the server's only model].
    #[arg(long, value_name = "MODEL", requires = "tokenizer")]
    pub tokenizer_model: Option<String>,
}

impl TokenizerOptions {
    /// # Errors
    /// A file that cannot be read or is no tokenizer, or a server that has none.
    pub(crate) fn load(&self) -> anyhow::Result<LogTokenizer> {
        let Some(source) = &self.tokenizer else {
            return Ok(LogTokenizer::default());
        };
        let url = source.to_str().filter(|source| source.contains("://"));
        url.map_or_else(
            || LogTokenizer::read(source),
            |url| {
                let key = std::env::var(KEY_VARIABLE).ok();
                let server = RemoteTokenizer::connect(url, key, self.tokenizer_model.clone())?;
                Ok(LogTokenizer::Remote(Arc::new(server)))
            },
        )
    }
}

/// Turns text into tokens.
#[derive(Clone)]
pub(crate) enum LogTokenizer {
    /// The model's own tokenizer.
    Own(Arc<Tokenizer>),
    /// The model's own tokenizer, in a server.
    Remote(Arc<RemoteTokenizer>),
    /// One that needs no vocabulary.
    Approximate(Arc<ApproximateTokenizer>),
}

impl Default for LogTokenizer {
    fn default() -> Self {
        LogTokenizer::Approximate(Arc::default())
    }
}

impl LogTokenizer {
    /// The tokenizer in this file, or in the folder of a model.
    fn read(path: &Path) -> anyhow::Result<Self> {
        let path = match path.is_dir() {
            true => &path.join("tokenizer.json"),
            false => path,
        };
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let tokenizer =
            Tokenizer::from_bytes(&bytes).with_context(|| path.display().to_string())?;
        Ok(LogTokenizer::Own(Arc::new(tokenizer)))
    }

    /// The tokens of each text. A text for which it is said that it begins a sequence has the tokens that begin one.
    pub(super) fn encode_all(&self, texts: &[(&str, bool)]) -> anyhow::Result<Vec<Vec<Token>>> {
        match self {
            LogTokenizer::Own(tokenizer) => {
                let texts = texts.iter().map(|(text, is_beginning)| match is_beginning {
                    true => tokenizer.encode_sequence(text),
                    false => tokenizer.encode(text),
                });
                Ok(texts.collect::<Result<_, _>>()?)
            }
            LogTokenizer::Remote(server) => server.encode_all(texts),
            LogTokenizer::Approximate(tokenizer) => {
                let texts = texts.iter().map(|(text, _)| tokenizer.encode(text));
                Ok(texts.collect())
            }
        }
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// A server that does not answer.
    pub(crate) fn decode(&self, tokens: &[Token]) -> anyhow::Result<String> {
        match self {
            LogTokenizer::Own(tokenizer) => Ok(tokenizer.decode(tokens)),
            LogTokenizer::Remote(server) => server.decode(tokens),
            LogTokenizer::Approximate(tokenizer) => Ok(tokenizer.decode(tokens)),
        }
    }
}
