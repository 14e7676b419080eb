//! A draft model: a smaller model of the same vocabulary that drafts for the target. It reads only tokens.

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;
use refrain_tokenization::Tokenizer;

use super::draft_network::{DraftNetwork, DraftOutputs};
use super::session_state::DrafterStateShape;
use crate::kernels::WeightFormat;
use crate::model::{Model, ModelError, ModelFiles};
use crate::network::{Branch, DraftKv, KvShape, ModelForward};

/// A draft model, as a network that drafts.
#[derive(Debug)]
pub(crate) struct DraftModelNetwork {
    model: Model,
    forward: ModelForward,
    tokens: Vec<TokenId>,
}

impl DraftModelNetwork {
    /// Creates a network that splits products over `threads` threads. `model` must have the target's vocabulary.
    pub(crate) fn new(model: Model, threads: usize) -> Self {
        DraftModelNetwork {
            forward: ModelForward::new(&model, &[], threads),
            tokens: (0..model.architecture.vocab_size as TokenId).collect(),
            model,
        }
    }

    /// Returns the size of the weights in bytes.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.model.weight_bytes()
    }
}

/// Loads the model that `source` names, and checks that its tokens are those of `target` and of the target's
/// tokenizer.
///
/// # Errors
/// Fails for a model that cannot be loaded, and for one with another vocabulary or tokenizer.
pub(crate) fn load(
    source: &str,
    target: &Model,
    tokenizer: Option<&Tokenizer>,
    format: WeightFormat,
) -> Result<Model, ModelError> {
    let fault = |fault| ModelError::DraftModel {
        name: source.to_owned(),
        fault: Box::new(fault),
    };
    let files = ModelFiles::open(source).map_err(fault)?;
    check_tokenizer(&files, tokenizer).map_err(fault)?;
    let model = Model::load(&files, format).map_err(fault)?;
    let (found, wanted) = (
        model.architecture.vocab_size,
        target.architecture.vocab_size,
    );
    if found != wanted {
        return Err(fault(ModelError::Config(format!(
            "vocab_size is {found}, but the target's is {wanted}; choose a draft model with the target's vocabulary"
        ))));
    }
    Ok(model)
}

fn check_tokenizer(files: &ModelFiles, target: Option<&Tokenizer>) -> Result<(), ModelError> {
    let own = match &files.tokenization {
        Some(tokenization) => Some(tokenization.tokenizer()?),
        None => None,
    };
    let reason = match (&own, target) {
        (None, None) => return Ok(()),
        (Some(own), Some(target)) if own.identity() == target.identity() => return Ok(()),
        (Some(_), Some(_)) => {
            "its tokens differ from the target's; choose a draft model of the same family"
        }
        (None, Some(_)) => {
            "the file is missing, so the draft model's tokens cannot be compared with the target's; put the tokenizer that \
             it was trained with beside its weights"
        }
        (Some(_), None) => {
            "the target has no such file, so its tokens cannot be compared with the draft model's; put the tokenizer that \
             the target was trained with beside its weights"
        }
    };
    Err(ModelError::TokenizerMismatch { reason })
}

impl DraftNetwork for DraftModelNetwork {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    fn captured_layers(&self) -> &[usize] {
        &[]
    }

    fn hidden_width(&self) -> usize {
        0
    }

    fn state_shape(&self, _target: &Model, _window: usize) -> DrafterStateShape {
        let architecture = &self.model.architecture;
        DrafterStateShape::reading_tokens(KvShape::of(architecture), architecture.max_context)
    }

    fn read_text(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs {
        let mut no_drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(branch.kv.shape(), 0))
            .collect();
        let mut drafts: Vec<&mut DraftKv> = no_drafts.iter_mut().collect();
        self.extend_drafts(target, branches, &mut drafts, captured)
    }

    fn extend_drafts(
        &mut self,
        _target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        _hidden: &[f32],
    ) -> DraftOutputs {
        DraftOutputs {
            logits: self.forward.extend_drafts(&self.model, branches, drafts),
            ..DraftOutputs::default()
        }
    }
}
