//! A draft model: a smaller model of the same vocabulary that drafts for the target. It reads tokens alone.

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;
use refrain_tokenization::Tokenizer;

use crate::ModelError;
use crate::attention::DraftKv;
use crate::blocks::Branch;
use crate::config::WeightFormat;
use crate::drafter::{DraftOutputs, Network, TrailShape};
use crate::files::ModelFiles;
use crate::forward::Forward;
use crate::kv::KvShape;
use crate::weights::Model;

/// A draft model at work.
#[derive(Debug)]
pub(crate) struct DraftModel {
    model: Model,
    forward: Forward,
    tokens: Vec<TokenId>,
}

impl DraftModel {
    /// With products spread over `threads` threads. `model` has the target's vocabulary.
    pub(crate) fn new(model: Model, threads: usize) -> Self {
        DraftModel {
            forward: Forward::new(&model, &[], threads),
            tokens: (0..model.architecture.vocab_size as TokenId).collect(),
            model,
        }
    }

    /// Bytes that the packed matrices take.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.model.weight_bytes()
    }
}

/// Loads the model that `source` names, and checks that its tokens are those of `target` and the target's tokenizer.
///
/// # Errors
/// A model that cannot be loaded, or one whose vocabulary or tokenizer is another.
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
            "vocab_size is {found}; the target's is {wanted}, and drafts are made of the target's tokens"
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
            "its tokens are not spelled as the target's; choose a model of the same family"
        }
        (None, Some(_)) => {
            "there is none, so that nobody can tell whether its tokens are the target's; put the one that it was trained with beside its weights"
        }
        (Some(_), None) => {
            "the target has none, so that nobody can tell whether their tokens are the same; put the one that the target was trained with beside its weights"
        }
    };
    Err(ModelError::Misfit {
        file: "tokenizer.json",
        reason,
    })
}

impl Network for DraftModel {
    fn kind(&self) -> DrafterKind {
        DrafterKind::DraftModel
    }

    fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    fn captured(&self) -> &[usize] {
        &[]
    }

    fn hidden_width(&self) -> usize {
        0
    }

    fn trail_shape(&self, _target: &Model, _window: usize) -> TrailShape {
        let architecture = &self.model.architecture;
        TrailShape::reading_tokens(KvShape::of(architecture), architecture.max_context)
    }

    fn follow(
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
        self.guess(target, branches, &mut drafts, captured)
    }

    fn guess(
        &mut self,
        _target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        _hidden: &[f32],
    ) -> DraftOutputs {
        DraftOutputs {
            outputs: self.forward.guess(&self.model, branches, drafts),
            ..DraftOutputs::default()
        }
    }
}
