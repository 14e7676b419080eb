//! A draft model: a smaller model of the same vocabulary that drafts for the target. It reads only tokens.

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;
use refrain_tokenization::Tokenizer;

use super::draft_network::{DraftNetwork, DraftOutputs, NetworkProfile, RowStates};
use crate::kernels::WeightFormat;
use crate::model::{Model, ModelError, ModelFiles};
use crate::network::{Branch, DraftKv, KvShape, ModelForward};

/// A draft model, as a network that drafts.
#[derive(Debug)]
pub(crate) struct DraftModelNetwork {
    model: Model,
    forward: ModelForward,
}

impl DraftModelNetwork {
    /// Creates a network that splits products over `threads` threads. `model` must have the target's vocabulary.
    pub(crate) fn new(model: Model, threads: usize) -> Self {
        DraftModelNetwork {
            forward: ModelForward::new(&model, &[], threads),
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
    let load = || {
        let files = ModelFiles::open(source)?;
        check_tokenizer(files.tokenizer()?.as_ref(), tokenizer)?;
        let model = Model::load(&files, format)?;
        let (found, wanted) = (
            model.architecture.vocab_size,
            target.architecture.vocab_size,
        );
        ModelError::unless(found == wanted, || {
            format!(
                "vocab_size is {found}, but the target's is {wanted}; choose a draft model with the target's vocabulary"
            )
        })?;
        Ok(model)
    };
    load().map_err(|fault: ModelError| fault.of_drafter("draft model", source))
}

fn check_tokenizer(own: Option<&Tokenizer>, target: Option<&Tokenizer>) -> Result<(), ModelError> {
    let reason = match (own, target) {
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
    Err(ModelError::Content {
        file: "tokenizer.json".into(),
        reason: reason.into(),
    })
}

impl DraftNetwork for DraftModelNetwork {
    fn profile(&self) -> NetworkProfile {
        let architecture = &self.model.architecture;
        NetworkProfile {
            kind: DrafterKind::DraftModel,
            tokens: (0..architecture.vocab_size as TokenId).collect(),
            captured_layers: Vec::new(),
            hidden_width: 0,
            kv: KvShape::of(architecture),
            context_max: architecture.max_context,
        }
    }

    fn compute(
        &mut self,
        _target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
        _states: RowStates<'_>,
    ) -> DraftOutputs {
        DraftOutputs {
            logits: self.forward.extend_drafts(&self.model, branches, drafts),
            ..DraftOutputs::default()
        }
    }
}
