//! New weights for the model that an engine serves: reading them, and what they must fit.

use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::{ApiError, ErrorKind};

use crate::kernels::WeightFormat;
use crate::model::{Architecture, Model, ModelError, ModelFiles};

/// The network that new weights must fit, and whether some are being read.
pub(super) struct WeightLoading {
    architecture: Architecture,
    format: WeightFormat,
    /// Identity of the model's tokenizer, if it has one.
    tokenizer: Option<String>,
    is_busy: AtomicBool,
}

/// The turn of the one load that runs. It ends when this is dropped.
pub(super) struct LoadingTurn<'a>(&'a AtomicBool);

impl Drop for LoadingTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl WeightLoading {
    /// For weights that replace those of `model`, whose tokenizer has this identity.
    pub(super) fn new(model: &Model, format: WeightFormat, tokenizer: Option<&str>) -> Self {
        WeightLoading {
            architecture: model.architecture.clone(),
            format,
            tokenizer: tokenizer.map(str::to_owned),
            is_busy: AtomicBool::new(false),
        }
    }

    /// Takes the turn, which is free while no weights are being loaded.
    ///
    /// # Errors
    /// `Conflict` while others are.
    pub(super) fn turn(&self) -> Result<LoadingTurn<'_>, ApiError> {
        if self.is_busy.swap(true, Ordering::AcqRel) {
            let message = "other weights are being loaded; wait for their end";
            return Err(ApiError::new(ErrorKind::Conflict, message).with_code("engine_is_loading"));
        }
        Ok(LoadingTurn(&self.is_busy))
    }

    /// Reads the weights of a source, and checks that everything that depends on their shape can stay.
    ///
    /// # Errors
    /// They cannot be read, or differ in their shape or in their tokenizer.
    pub(super) fn read(&self, source: &str) -> Result<Model, ModelError> {
        let files = ModelFiles::open(source)?;
        if let (Some(own), Some(found)) = (&self.tokenizer, files.tokenizer()?)
            && *own != found.identity()
        {
            return Err(ModelError::Content {
                file: "tokenizer.json".into(),
                reason: "its tokens differ from those of the model that is served; start an engine of its own".into(),
            });
        }
        let mut model = Model::load(&files, self.format)?;
        // Callers know the end tokens from the start. A checkpoint often lacks those for generation.
        let own_ends = self.architecture.eos_token_ids.clone();
        model.architecture.eos_token_ids = own_ends;
        ModelError::unless(model.architecture == self.architecture, || {
            format!(
                "the network differs from the one that is served ({}); start an engine of its own",
                difference(&self.architecture, &model.architecture)
            )
        })?;
        Ok(model)
    }
}

/// The first key in which two networks differ.
fn difference(own: &Architecture, found: &Architecture) -> String {
    let sizes = |of: &Architecture| {
        [
            ("vocab_size", of.vocab_size),
            ("hidden_size", of.hidden_size),
            ("intermediate_size", of.intermediate_size),
            ("num_hidden_layers", of.layers),
            ("num_attention_heads", of.heads),
            ("num_key_value_heads", of.kv_heads),
            ("head_dim", of.head_dim),
            ("max_position_embeddings", of.max_context),
            ("tie_word_embeddings", usize::from(of.tied_head)),
        ]
    };
    let mut pairs = sizes(own).into_iter().zip(sizes(found));
    match pairs.find(|((_, own), (_, found))| own != found) {
        Some(((key, own), (_, found))) => format!("{key} is {found} instead of {own}"),
        None => "rms_norm_eps or the rotary positions".to_owned(),
    }
}
