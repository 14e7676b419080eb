//! A model in memory: its tensors, checked against the architecture, and packed.

use crate::ModelError;
use crate::architecture::Architecture;
use crate::config::WeightFormat;
use crate::files::ModelFiles;
use crate::matrix::Matrix;
use crate::tensors::Tensors;

/// One block.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) body: Body,
}

/// A block behind the norm of what its attention reads. Products that share their input are one matrix.
#[derive(Debug)]
pub(crate) struct Body {
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
        Tensors::open(&files.weights, format, |tensors| {
            Model::read(architecture, tensors)
        })
    }

    fn read(architecture: Architecture, tensors: &Tensors<'_>) -> Result<Self, ModelError> {
        let a = &architecture;
        let hidden = a.hidden_size;
        let embedding = tensors.floats("model.embed_tokens.weight", &[a.vocab_size, hidden])?;
        let layers = (0..a.layers)
            .map(|layer| {
                let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
                Ok(Layer {
                    attention_norm: tensors.floats(&name("input_layernorm"), &[hidden])?,
                    body: Body::read(a, hidden, tensors, name)?,
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
        })
    }

    /// Bytes that the packed matrices take.
    pub fn weight_bytes(&self) -> usize {
        let layers: usize = self.layers.iter().map(|layer| layer.body.bytes()).sum();
        layers + self.head.bytes() + self.embedding.len() * 4
    }
}

impl Body {
    /// Reads a layer's tensors, `name` making a part's name of it. `width` is what attention reads.
    pub(crate) fn read(
        a: &Architecture,
        width: usize,
        tensors: &Tensors<'_>,
        name: impl Fn(&str) -> String,
    ) -> Result<Self, ModelError> {
        let (hidden, inner) = (a.hidden_size, a.intermediate_size);
        let (query, key_value) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let matrix = |parts: &[(&str, usize)], depth: usize| {
            let parts: Vec<_> = parts
                .iter()
                .map(|(part, rows)| (name(part), *rows))
                .collect();
            tensors.matrix(&parts, depth)
        };
        Ok(Body {
            query_key_value: matrix(
                &[
                    ("self_attn.q_proj", query),
                    ("self_attn.k_proj", key_value),
                    ("self_attn.v_proj", key_value),
                ],
                width,
            )?,
            attention_out: matrix(&[("self_attn.o_proj", hidden)], query)?,
            mlp_norm: tensors.floats(&name("post_attention_layernorm"), &[hidden])?,
            gate_up: matrix(&[("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden)?,
            down: matrix(&[("mlp.down_proj", hidden)], inner)?,
        })
    }

    /// Bytes that the packed matrices take.
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
