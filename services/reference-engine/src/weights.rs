//! A model in memory: its files read through candle, checked against the architecture, and packed.

use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Device};

use crate::ModelError;
use crate::architecture::Architecture;
use crate::config::WeightFormat;
use crate::files::{ModelFiles, Weights, read};
use crate::matrix::Matrix;

/// One block. Products that share their input are one matrix.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    /// Queries, keys and values above one another.
    pub(crate) query_key_value: Matrix,
    pub(crate) attention_out: Matrix,
    pub(crate) mlp_norm: Vec<f32>,
    /// Gate above up.
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// A loaded model. Shared by reference; never changes.
#[derive(Debug)]
pub struct Model {
    /// Its shape.
    pub architecture: Architecture,
    /// `[token][hidden]`. Kept beside a tied head, which lies in panels: reading one token out of those would
    /// touch a cache line per weight.
    pub(crate) embedding: Vec<f32>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Matrix,
}

impl Model {
    /// Reads and packs the weights.
    ///
    /// # Errors
    /// A network of another kind, a file that is damaged, or a tensor that is missing or of another shape
    /// or type.
    pub fn load(files: &ModelFiles, format: WeightFormat) -> Result<Self, ModelError> {
        let architecture =
            Architecture::from_json(&files.config_json, files.generation_config_json.as_deref())?;
        let shards = match &files.weights {
            Weights::Embedded(bytes) => vec![(
                "the model that is compiled in".to_owned(),
                std::borrow::Cow::Borrowed(*bytes),
            )],
            Weights::Files(paths) => paths
                .iter()
                .map(|path| Ok((path.display().to_string(), read(path)?.into())))
                .collect::<Result<_, ModelError>>()?,
        };
        let opened = shards
            .iter()
            .map(|(file, bytes)| {
                SliceSafetensors::new(bytes)
                    .map(|tensors| (file.as_str(), tensors))
                    .map_err(|error| ModelError::Weights {
                        file: file.clone(),
                        reason: error.to_string(),
                    })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Reader {
            shards: &opened,
            format,
        }
        .model(architecture)
    }

    /// Bytes that the packed matrices take.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|layer| {
            [
                &layer.query_key_value,
                &layer.attention_out,
                &layer.gate_up,
                &layer.down,
            ]
        });
        layers.chain([&self.head]).map(Matrix::bytes).sum::<usize>() + self.embedding.len() * 4
    }
}

struct Reader<'a> {
    shards: &'a [(&'a str, SliceSafetensors<'a>)],
    format: WeightFormat,
}

impl Reader<'_> {
    fn model(&self, architecture: Architecture) -> Result<Model, ModelError> {
        let a = &architecture;
        let (hidden, inner) = (a.hidden_size, a.intermediate_size);
        let (query, key_value) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let embedding = self.tensor("model.embed_tokens.weight", &[a.vocab_size, hidden])?;
        let layers = (0..a.layers)
            .map(|layer| {
                let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
                let norm = |part: &str| self.tensor(&name(part), &[hidden]);
                let matrix = |parts: &[(&str, usize)], depth: usize| {
                    let parts = parts
                        .iter()
                        .map(|(part, rows)| self.tensor(&name(part), &[*rows, depth]))
                        .collect::<Result<Vec<_>, _>>()?;
                    Ok::<_, ModelError>(Matrix::pack(&parts, depth, self.format))
                };
                Ok(Layer {
                    attention_norm: norm("input_layernorm")?,
                    query_key_value: matrix(
                        &[
                            ("self_attn.q_proj", query),
                            ("self_attn.k_proj", key_value),
                            ("self_attn.v_proj", key_value),
                        ],
                        hidden,
                    )?,
                    attention_out: matrix(&[("self_attn.o_proj", hidden)], query)?,
                    mlp_norm: norm("post_attention_layernorm")?,
                    gate_up: matrix(&[("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden)?,
                    down: matrix(&[("mlp.down_proj", hidden)], inner)?,
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let norm = self.tensor("model.norm.weight", &[hidden])?;
        let head = if a.tied_head {
            Matrix::pack(std::slice::from_ref(&embedding), hidden, self.format)
        } else {
            Matrix::pack(
                &[self.tensor("lm_head.weight", &[a.vocab_size, hidden])?],
                hidden,
                self.format,
            )
        };
        Ok(Model {
            architecture,
            embedding,
            layers,
            norm,
            head,
        })
    }

    /// A tensor of a known shape, as f32 in row-major order.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let Some((file, shard)) = self
            .shards
            .iter()
            .find(|(_, shard)| shard.get(name).is_ok())
        else {
            return Err(ModelError::MissingTensor {
                name: name.to_owned(),
            });
        };
        let fault = |error: candle_core::Error| ModelError::Weights {
            file: (*file).to_owned(),
            reason: error.to_string(),
        };
        let tensor = shard.load(name, &Device::Cpu).map_err(fault)?;
        if tensor.dims() != shape {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: tensor.dims().to_vec(),
            });
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(ModelError::Type {
                name: name.to_owned(),
                found: tensor.dtype().as_str().to_owned(),
            });
        }
        tensor
            .to_dtype(DType::F32)
            .and_then(|tensor| tensor.flatten_all())
            .and_then(|tensor| tensor.to_vec1())
            .map_err(fault)
    }
}
