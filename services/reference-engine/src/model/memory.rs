//! The memory that a model takes, told before it is loaded.

use serde::Deserialize;

use super::architecture::Architecture;
use super::error::ModelError;
use super::files::{ModelFiles, WeightSource};
use crate::kernels::WeightFormat;

/// The memory that a model takes, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelMemory {
    /// Its weights, once it is loaded.
    pub weights_bytes: u64,
    /// The files, which are in memory beside the weights while it is loaded.
    pub files_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes_per_token: u64,
    /// Longest text, tokens.
    pub max_context: u32,
}

/// The keys of `config.json` that name the type of the weights.
#[derive(Deserialize)]
struct TypeJson {
    torch_dtype: Option<String>,
    dtype: Option<String>,
}

impl ModelFiles {
    /// The memory that the model takes in a format.
    ///
    /// # Errors
    /// Fails for a network of another kind, and for a file of weights that is missing.
    pub fn memory(&self, format: WeightFormat) -> Result<ModelMemory, ModelError> {
        let a = Architecture::from_json(&self.config_json, None)?;
        let named: TypeJson = serde_json::from_slice(&self.config_json)?;
        let is_bf16 = named.torch_dtype.or(named.dtype).as_deref() == Some("bfloat16");
        let weight_bytes = match format {
            WeightFormat::Bf16 if is_bf16 => 2,
            _ => size_of::<f32>(),
        };
        let (query, key_value) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let attention = a.hidden_size * (2 * query + 2 * key_value);
        let layer = attention + 3 * a.hidden_size * a.intermediate_size;
        let embedding = a.vocab_size * a.hidden_size;
        let weights = (a.layers * layer + embedding) * weight_bytes;
        let files_bytes = match &self.weights {
            WeightSource::Packed { low, high } => low.len() + high.len(),
            WeightSource::Files(paths) => paths
                .iter()
                .map(|path| match std::fs::metadata(path) {
                    Ok(metadata) => Ok(metadata.len() as usize),
                    Err(error) => Err(ModelError::Read {
                        path: path.display().to_string(),
                        reason: error.to_string(),
                    }),
                })
                .sum::<Result<usize, ModelError>>()?,
        };
        Ok(ModelMemory {
            // A row of the embedding is read by itself, so it has a copy as f32.
            weights_bytes: (weights + embedding * size_of::<f32>()) as u64,
            files_bytes: files_bytes as u64,
            kv_bytes_per_token: (2 * a.layers * key_value * size_of::<f32>()) as u64,
            max_context: u32::try_from(a.max_context).unwrap_or(u32::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Model, shipped_model};

    #[test]
    fn the_memory_of_the_shipped_model_is_what_it_takes() {
        let files = shipped_model();
        for format in [WeightFormat::F32, WeightFormat::Bf16] {
            let told = files.memory(format).unwrap();
            let taken = Model::load(&files, format).unwrap().weight_bytes() as f64;
            let share = told.weights_bytes as f64 / taken;
            assert!(
                (0.95..=1.05).contains(&share),
                "{format:?}: {told:?}, {taken}"
            );
            assert_eq!(told.kv_bytes_per_token, 2 * 6 * 2 * 64 * 4);
        }
    }
}
