//! GGUF files, in which llama.cpp keeps a model: the part at the beginning, without the weights.
//!
//! This crate reads the format itself, in `metadata.rs`. The libraries for it map the whole file, or refuse the names
//! of architectures with a hyphen, such as `gpt-oss`.
//!
//! | file | content |
//! |---|---|
//! | `metadata.rs` | The keys and values at the beginning of a file. |
//! | `vocabulary.rs` | The tokens, their merges, and which are special or end an answer. |
//! | `pre_tokenizers.rs` | The patterns that split text, by their names in files. |
//! | `tokenizer_json.rs` | The tokenizer in the layout of `tokenizer.json`. |

#[cfg(test)]
mod llama_cpp_tests;
mod metadata;
mod pre_tokenizers;
#[cfg(test)]
mod tests;
mod tokenizer_json;
mod vocabulary;
#[cfg(test)]
mod writer;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde_json::{Map, Value, json};

use self::metadata::Metadata;
use self::tokenizer_json::convert;
use crate::model_files::TEMPLATE_BYTES_MAX;
use crate::{ModelFiles, TokenizationError};

/// Maximum number of layers. The largest models have some hundred.
const LAYERS_MAX: u32 = 4096;

/// The names of special tokens in templates, with those in the keys of a file. The spelling of one is the format's.
const TOKEN_NAMES: [(&str, &str); 6] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("sep_token", "seperator"),
    ("pad_token", "padding"),
    ("mask_token", "mask"),
];

/// The shape of a model in a GGUF file, from which its memory can be computed before it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufHeader {
    /// The name of the architecture, such as `llama` or `qwen3moe`.
    pub architecture: String,
    /// The longest context that the model was trained for, tokens.
    pub context_length: Option<u32>,
    /// Number of layers.
    pub layers: u32,
    /// Length of the vector of a token.
    pub embedding_length: u32,
    /// Number of heads of keys and values in each layer, 0 in layers without attention.
    pub kv_heads: Vec<u32>,
    /// Length of the key of a head.
    pub key_length: u32,
    /// Length of the value of a head.
    pub value_length: u32,
    /// Number of tokens in the vocabulary, with its padding.
    pub vocab_size: u32,
    /// Number of files that the model is split into.
    pub shards: u32,
    /// Size of all its files, bytes. The weights take about as much memory.
    pub file_bytes: u64,
}

impl GgufHeader {
    /// Reads the header of a file. If the model is split, it is the first of its files, beside the others.
    ///
    /// # Errors
    /// The file or another of the model cannot be read or is damaged, or it does not describe a model.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        let path = path.as_ref();
        let header = open(path).and_then(|(metadata, bytes)| Self::read(path, &metadata, bytes));
        header.map_err(|reason| unusable(path, reason))
    }

    /// Number of values that the cache of keys and values has for each token of context. Some architectures need
    /// fewer, because they compress them or forget old tokens.
    pub fn cache_values_per_token(&self) -> u64 {
        let heads: u64 = self.kv_heads.iter().copied().map(u64::from).sum();
        heads.saturating_mul(u64::from(self.key_length) + u64::from(self.value_length))
    }

    fn read(path: &Path, metadata: &Metadata, bytes: u64) -> Result<Self, String> {
        let architecture = metadata.text("general.architecture");
        let architecture =
            architecture.ok_or("it has no general.architecture; name a model's first file")?;
        let key = |name: &str| format!("{architecture}.{name}");
        let count = |name: &str| metadata.count(&key(name));
        let required = |name: &str| count(name).ok_or_else(|| format!("it has no {}", key(name)));
        let layers = required("block_count")?;
        if layers > LAYERS_MAX {
            return Err(format!("{layers} layers are more than {LAYERS_MAX}"));
        }
        // One number is that of every layer.
        let per_layer = |name: &str| -> Option<Vec<u32>> {
            let to_count = |heads: &Value| heads.as_u64()?.try_into().ok();
            metadata
                .list(&key(name), to_count)
                .or_else(|| Some(vec![count(name)?; layers as usize]))
        };
        let heads = per_layer("attention.head_count").unwrap_or_default();
        let first = heads.iter().copied().find(|heads| *heads > 0);
        let embedding_length = required("embedding_length")?;
        let usual = first.map_or(0, |heads| embedding_length / heads);
        let tokens = metadata.list("tokenizer.ggml.tokens", |_| Some(()));
        let tokens = tokens.map_or(0, |tokens| tokens.len());
        let (shards, file_bytes) = shards(path, metadata, bytes)?;
        Ok(GgufHeader {
            context_length: count("context_length"),
            layers,
            embedding_length,
            kv_heads: per_layer("attention.head_count_kv").unwrap_or(heads),
            key_length: count("attention.key_length").unwrap_or(usual),
            value_length: count("attention.value_length").unwrap_or(usual),
            vocab_size: count("vocab_size").unwrap_or(u32::try_from(tokens).unwrap_or(u32::MAX)),
            shards,
            file_bytes,
            architecture: architecture.to_owned(),
        })
    }
}

impl ModelFiles {
    /// Reads the tokenizer, the chat template, the end tokens and the longest context of a GGUF file. If the model is
    /// split into several files, it is the first one.
    ///
    /// # Errors
    /// The file cannot be read or is damaged, or its kind of tokenizer is not supported.
    pub fn from_gguf(path: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        let path = path.as_ref();
        let files = open(path).and_then(|(metadata, _)| model_files(&metadata));
        files.map_err(|reason| unusable(path, reason))
    }
}

fn unusable(path: &Path, reason: String) -> TokenizationError {
    TokenizationError::Gguf {
        path: path.display().to_string(),
        reason,
    }
}

/// Reads the metadata of a file, and tells the size of the file in bytes.
fn open(path: &Path) -> Result<(Metadata, u64), String> {
    let failed = |error: std::io::Error| error.to_string();
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Err("it is not a regular file".into());
    }
    let file = File::open(path).map_err(failed)?;
    let metadata = Metadata::read(BufReader::new(file), found.len())?;
    Ok((metadata, found.len()))
}

/// The number of files of a model, and the size of all of them in bytes.
fn shards(path: &Path, metadata: &Metadata, bytes: u64) -> Result<(u32, u64), String> {
    let shards = metadata.count("split.count").unwrap_or(1);
    if shards <= 1 {
        return Ok((1, bytes));
    }
    let end = |shard| format!("-{shard:05}-of-{shards:05}.gguf");
    let name = path.file_name().and_then(|name| name.to_str());
    let stem = name.and_then(|name| name.strip_suffix(&end(1)));
    let first = || format!("it is one of {shards} files; name the one with {}", end(1));
    let stem = stem.ok_or_else(first)?;
    let mut sum: u64 = 0;
    for shard in 1..=shards {
        let file = format!("{stem}{}", end(shard));
        let found = std::fs::metadata(path.with_file_name(&file));
        sum = sum.saturating_add(
            found
                .map_err(|error| format!("its file {file}: {error}"))?
                .len(),
        );
    }
    Ok((shards, sum))
}

fn model_files(metadata: &Metadata) -> Result<ModelFiles, String> {
    let (tokenizer_json, vocabulary) = convert(metadata)?;
    let architecture = metadata.text("general.architecture").unwrap_or_default();
    let context = metadata.count(&format!("{architecture}.context_length"));
    let config = json!({"model_type": architecture, "max_position_embeddings": context});
    let generation = json!({"eos_token_id": vocabulary.ends});
    let names = TOKEN_NAMES.iter().filter_map(|(name, key)| {
        let (_, text) = vocabulary.named(key)?;
        Some(((*name).to_owned(), text.into()))
    });
    let names: Map<String, Value> = names.collect();
    let template = |key: &str| match metadata.text(key) {
        Some(text) if text.len() as u64 > TEMPLATE_BYTES_MAX => Err(format!(
            "its {key} has {} bytes, more than {TEMPLATE_BYTES_MAX}",
            text.len()
        )),
        text => Ok(text.map(|text| text.as_bytes().to_vec())),
    };
    let bytes = |value: &Value| value.to_string().into_bytes();
    Ok(ModelFiles {
        chat_template: template("tokenizer.chat_template")?,
        tool_chat_template: template("tokenizer.chat_template.tool_use")?,
        config_json: Some(bytes(&config)),
        generation_config_json: Some(bytes(&generation)),
        tokenizer_config_json: Some(bytes(&names.into())),
        tokenizer_json: bytes(&tokenizer_json),
    })
}
