//! A model's weights in memory, checked against the architecture and packed for the kernels.

use std::sync::OnceLock;

use super::architecture::Architecture;
use super::error::ModelError;
use super::files::ModelFiles;
use super::tensors::WeightTensors;
use crate::kernels::{Matrix, WeightFormat};

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) block: BlockWeights,
}

/// A decoder layer without its first norm, in which an EAGLE-3 head differs from a model. Products of the same input
/// are one matrix.
#[derive(Debug)]
pub(crate) struct BlockWeights {
    /// The projections to queries, keys and values, stacked in this order.
    pub(crate) query_key_value: Matrix,
    /// Added to that product, if there is one.
    pub(crate) query_key_value_bias: Option<Vec<f32>>,
    /// The norms of each head of the queries and of the keys, if there are such.
    pub(crate) head_norms: Option<[Vec<f32>; 2]>,
    pub(crate) attention_out: Matrix,
    pub(crate) mlp_norm: Vec<f32>,
    /// The gate projection, stacked on the up projection.
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// A loaded model. It never changes.
#[derive(Debug)]
pub(crate) struct Model {
    /// The shape of the network.
    pub(crate) architecture: Architecture,
    /// Layout: `[token][hidden]`. A tied head has a packed copy of its own, because reading one token out of panels
    /// would touch a cache line per weight.
    pub(crate) embedding: Vec<f32>,
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Matrix,
    /// The hash of all of the above, once somebody has asked for it.
    pub(super) fingerprint: OnceLock<u128>,
}

impl Model {
    /// Reads and packs the weights.
    ///
    /// # Errors
    /// Fails for an unsupported network, a damaged file, or a tensor that is missing or of another shape or type.
    pub(crate) fn load(files: &ModelFiles, format: WeightFormat) -> Result<Self, ModelError> {
        let architecture =
            Architecture::from_json(&files.config_json, files.generation_config_json.as_deref())?;
        WeightTensors::open(&files.weights, format, |tensors| {
            Model::read(architecture, tensors)
        })
    }

    fn read(architecture: Architecture, tensors: &WeightTensors<'_>) -> Result<Self, ModelError> {
        let a = &architecture;
        let hidden = a.hidden_size;
        let embedding = tensors.floats("model.embed_tokens.weight", &[a.vocab_size, hidden])?;
        let layers = (0..a.layers)
            .map(|layer| {
                let name = |part: &str| format!("model.layers.{layer}.{part}");
                Ok(DecoderLayer {
                    attention_norm: tensors.floats(&name("input_layernorm.weight"), &[hidden])?,
                    block: BlockWeights::read(a, hidden, tensors, name)?,
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let norm = tensors.floats("model.norm.weight", &[hidden])?;
        let head = if a.tied_head {
            tensors.pack(std::slice::from_ref(&embedding), hidden)
        } else {
            tensors.matrix(&[("lm_head.weight".to_owned(), a.vocab_size)], hidden)?
        };
        Ok(Model {
            architecture,
            embedding,
            layers,
            norm,
            head,
            fingerprint: OnceLock::new(),
        })
    }

    /// Returns the size of the weights in bytes.
    pub(crate) fn weight_bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(|layer| layer.block.bytes()).sum();
        layers + self.head.bytes() + self.embedding.len() * 4
    }
}

impl BlockWeights {
    /// Reads a layer's tensors. `name` turns the name of a tensor in the layer into its full name, and `width` is the
    /// width of the rows that attention reads.
    pub(crate) fn read(
        a: &Architecture,
        width: usize,
        tensors: &WeightTensors<'_>,
        name: impl Fn(&str) -> String,
    ) -> Result<Self, ModelError> {
        let (hidden, inner) = (a.hidden_size, a.intermediate_size);
        let (query, key_value) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let matrix = |parts: &[(&str, usize)], depth: usize| {
            let parts: Vec<_> = parts
                .iter()
                .map(|(part, rows)| (name(&format!("{part}.weight")), *rows))
                .collect();
            tensors.matrix(&parts, depth)
        };
        let projections = [
            ("self_attn.q_proj", query),
            ("self_attn.k_proj", key_value),
            ("self_attn.v_proj", key_value),
        ];
        let query_key_value_bias = match a.qkv_bias {
            true => {
                let parts = projections.map(|(part, rows)| (format!("{part}.bias"), rows));
                let read = |(part, rows): &(String, usize)| tensors.floats(&name(part), &[*rows]);
                Some(
                    parts
                        .iter()
                        .map(read)
                        .collect::<Result<Vec<_>, _>>()?
                        .concat(),
                )
            }
            false => None,
        };
        let head_norm =
            |part: &str| tensors.floats(&name(&format!("self_attn.{part}.weight")), &[a.head_dim]);
        let head_norms = match a.head_norms {
            true => Some([head_norm("q_norm")?, head_norm("k_norm")?]),
            false => None,
        };
        Ok(BlockWeights {
            query_key_value: matrix(&projections, width)?,
            query_key_value_bias,
            head_norms,
            attention_out: matrix(&[("self_attn.o_proj", hidden)], query)?,
            mlp_norm: tensors.floats(&name("post_attention_layernorm.weight"), &[hidden])?,
            gate_up: matrix(&[("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden)?,
            down: matrix(&[("mlp.down_proj", hidden)], inner)?,
        })
    }

    /// Returns the size of the weights in bytes.
    pub(crate) fn bytes(&self) -> usize {
        [
            &self.query_key_value,
            &self.attention_out,
            &self.gate_up,
            &self.down,
        ]
        .map(Matrix::bytes)
        .iter()
        .sum()
    }
}
