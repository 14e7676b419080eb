//! A head's weights in memory.

use super::shape::HeadShape;
use crate::kernels::{Matrix, WeightFormat};
use crate::model::{BlockWeights, HeadFiles, Model, ModelError, WeightTensors};

/// A loaded head of one target. It never changes.
#[derive(Debug)]
pub(crate) struct Eagle3Head {
    pub(crate) shape: HeadShape,
    /// The head's own embedding, if it has one. Layout: `[token][hidden]`.
    embedding: Option<Vec<f32>>,
    /// The projection from a row's captured states to one hidden state.
    pub(crate) fc: Matrix,
    pub(crate) hidden_norm: Vec<f32>,
    pub(crate) embedding_norm: Vec<f32>,
    pub(crate) block: BlockWeights,
    pub(crate) norm: Vec<f32>,
    lm_head: Option<Matrix>,
    /// The tokens that it can guess, as ids of the target. They are distinct.
    pub(crate) tokens: Vec<u32>,
}

impl Eagle3Head {
    /// Reads and packs the weights of a head for `target`.
    ///
    /// # Errors
    /// Fails for a head of another kind or of another target, a damaged file, or a tensor that is missing or wrong.
    pub(crate) fn load(
        files: &HeadFiles,
        target: &Model,
        format: WeightFormat,
    ) -> Result<Self, ModelError> {
        HeadShape::from_json(&files.config_json, &target.architecture)
            .and_then(|shape| {
                WeightTensors::open(&files.weights, format, |tensors| {
                    Eagle3Head::read(shape, target, tensors)
                })
            })
            .map_err(|fault| fault.of_drafter(HeadFiles::KIND, &files.source))
    }

    fn read(
        shape: HeadShape,
        target: &Model,
        tensors: &WeightTensors<'_>,
    ) -> Result<Self, ModelError> {
        let a = &shape.architecture;
        let (hidden, vocab) = (a.hidden_size, a.vocab_size);
        let target_hidden = target.architecture.hidden_size;
        // Published files name the layer `midlayer`. Engines that keep layers in a list rename it.
        let place = ["midlayer", "layers.0"]
            .into_iter()
            .find(|place| tensors.has(&format!("{place}.self_attn.q_proj.weight")))
            .unwrap_or("midlayer");
        let name = |part: &str| format!("{place}.{part}");
        let has_embedding = tensors.has("embed_tokens.weight");
        ModelError::unless(has_embedding || hidden == target_hidden, || {
            format!(
                "hidden_size is {hidden} and embed_tokens.weight is missing; the target's embedding cannot replace it, \
                 because its width is {target_hidden}"
            )
        })?;
        let embedding = has_embedding
            .then(|| tensors.floats("embed_tokens.weight", &[vocab, hidden]))
            .transpose()?;
        let width = shape.captured_layers.len() * target_hidden;
        let lends_head = shape.draft_vocab == vocab && hidden == target_hidden;
        let lm_head = (!lends_head || tensors.has("lm_head.weight"))
            .then(|| tensors.matrix(&[("lm_head.weight".to_owned(), shape.draft_vocab)], hidden))
            .transpose()?;
        Ok(Eagle3Head {
            embedding,
            fc: tensors.matrix(&[("fc.weight".to_owned(), hidden)], width)?,
            hidden_norm: tensors.floats(&name("hidden_norm.weight"), &[hidden])?,
            embedding_norm: tensors.floats(&name("input_layernorm.weight"), &[hidden])?,
            block: BlockWeights::read(a, 2 * hidden, tensors, name)?,
            norm: tensors.floats("norm.weight", &[hidden])?,
            lm_head,
            tokens: guessed_tokens(&shape, tensors)?,
            shape,
        })
    }

    /// Returns the embedding. Layout: `[token][hidden]`.
    pub(crate) fn embedding<'a>(&'a self, target: &'a Model) -> &'a [f32] {
        self.embedding.as_ref().unwrap_or(&target.embedding)
    }

    /// Returns the projection from an output to a logit for each token that it can guess.
    pub(crate) fn lm_head<'a>(&'a self, target: &'a Model) -> &'a Matrix {
        self.lm_head.as_ref().unwrap_or(&target.head)
    }

    /// Returns the size of the head's own weights in bytes.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.fc.bytes()
            + self.block.bytes()
            + self.lm_head.as_ref().map_or(0, Matrix::bytes)
            + self.embedding.as_ref().map_or(0, |floats| floats.len() * 4)
    }
}

/// Reads the tokens that a head can guess from `d2t`. Its entries are offsets: draft token i is the target's token
/// `i + d2t[i]`.
fn guessed_tokens(shape: &HeadShape, tensors: &WeightTensors<'_>) -> Result<Vec<u32>, ModelError> {
    let vocab = shape.architecture.vocab_size;
    // `draft_id_to_target_id` is the name that vLLM's loader gives the tensor.
    let name = match tensors.has("draft_id_to_target_id") {
        true => "draft_id_to_target_id",
        false => "d2t",
    };
    if !tensors.has(name) && shape.draft_vocab == vocab {
        return Ok((0..vocab as u32).collect());
    }
    let mut guessed = vec![false; vocab];
    let mut tokens = Vec::with_capacity(shape.draft_vocab);
    let offsets = tensors.integers(name, shape.draft_vocab)?;
    for (id, offset) in offsets.into_iter().enumerate() {
        let token = offset
            .checked_add(id as i64)
            .and_then(|token| usize::try_from(token).ok())
            .filter(|token| *token < vocab);
        let Some(token) = token else {
            return Err(ModelError::Tensor(format!(
                "{name}: draft token {id} has offset {offset}, which points outside the vocabulary of {vocab} tokens"
            )));
        };
        if std::mem::replace(&mut guessed[token], true) {
            return Err(ModelError::Tensor(format!(
                "{name}: draft token {id} maps to token {token}, as an earlier one does"
            )));
        }
        tokens.push(token as u32);
    }
    if tensors.has("t2d") {
        let flags = tensors.flags("t2d", vocab)?;
        if let Some(token) = (0..vocab).find(|token| flags[*token] != guessed[*token]) {
            return Err(ModelError::Tensor(format!(
                "t2d: token {token} is {}, but {name} makes it {}",
                flags[token], guessed[token]
            )));
        }
    }
    Ok(tokens)
}
