//! A draft model: a smaller model of the same vocabulary that drafts for the target. It reads only tokens.

use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;
use refrain_tokenization::Tokenizer;

use super::draft_network::{DraftNetwork, DraftOutputs, NetworkProfile, RowStates, TOP_K_MAX};
use crate::backend::{Backend, BackendModel};
use crate::config::EngineConfig;
use crate::kernels::WeightFormat;
use crate::model::{Model, ModelError, ModelFiles};
use crate::network::{Branch, DraftKv, KvShape, ModelForward, backend_logits};

/// How faults of a draft model begin, before the name of its source.
const KIND: &str = "draft model";

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

/// Loads the model that `source` names, and checks that its tokens are those of the target, whose vocabulary has
/// `vocab_size` tokens, and of the target's tokenizer.
///
/// # Errors
/// Fails for a model that cannot be loaded, and for one with another vocabulary or tokenizer.
pub(crate) fn load(
    source: &str,
    vocab_size: u32,
    tokenizer: Option<&Tokenizer>,
    format: WeightFormat,
) -> Result<Model, ModelError> {
    let load = || {
        let files = ModelFiles::open(source)?;
        check_tokenizer(files.tokenizer()?.as_ref(), tokenizer)?;
        let model = Model::load(&files, format)?;
        check_vocabulary(model.architecture.vocab_size as u32, vocab_size)?;
        Ok(model)
    };
    load().map_err(|fault: ModelError| fault.of_drafter(KIND, source))
}

fn check_vocabulary(found: u32, wanted: u32) -> Result<(), ModelError> {
    ModelError::unless(found == wanted, || {
        format!(
            "vocab_size is {found}, but the target's is {wanted}; choose a draft model with the target's vocabulary"
        )
    })
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
            top_k_max: TOP_K_MAX,
            kv: KvShape::of(architecture),
            backend: None,
            context_max: architecture.max_context,
        }
    }

    fn compute(
        &mut self,
        _target: Option<&Model>,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
        _states: RowStates<'_>,
    ) -> Result<DraftOutputs, String> {
        Ok(DraftOutputs {
            logits: self.forward.extend_drafts(&self.model, branches, drafts),
            ..DraftOutputs::default()
        })
    }
}

/// A draft model that a backend computes.
#[derive(Debug)]
struct BackendDraftNetwork {
    backend: Arc<dyn Backend>,
    vocab_size: u32,
    context_max: usize,
}

/// The network of the draft model that `config` names and that a backend computes. Its tokens must be those of the
/// target, as for [`load`].
///
/// # Errors
/// Another vocabulary or tokenizer.
pub(crate) fn backend_network(
    config: &EngineConfig,
    model: BackendModel,
    vocab_size: u32,
    tokenizer: Option<&Tokenizer>,
) -> Result<Box<dyn DraftNetwork>, ModelError> {
    let check = || {
        check_tokenizer(Some(&model.files.tokenizer()?), tokenizer)?;
        check_vocabulary(model.vocab_size, vocab_size)
    };
    let source = config.draft_model.as_deref().unwrap_or_default();
    check().map_err(|fault: ModelError| fault.of_drafter(KIND, source))?;
    Ok(Box::new(BackendDraftNetwork {
        backend: model.backend,
        vocab_size,
        context_max: model.max_context as usize,
    }))
}

impl DraftNetwork for BackendDraftNetwork {
    fn profile(&self) -> NetworkProfile {
        NetworkProfile {
            kind: DrafterKind::DraftModel,
            tokens: (0..self.vocab_size).collect(),
            captured_layers: Vec::new(),
            hidden_width: 0,
            // Each branch of a draft would take a sequence.
            top_k_max: 1,
            kv: KvShape::default(),
            backend: Some(self.backend.clone()),
            context_max: self.context_max,
        }
    }

    fn compute(
        &mut self,
        _target: Option<&Model>,
        branches: &mut [Branch<'_>],
        _drafts: &mut [DraftKv],
        _states: RowStates<'_>,
    ) -> Result<DraftOutputs, String> {
        Ok(DraftOutputs {
            logits: backend_logits(self.backend.as_ref(), self.vocab_size as usize, branches)?,
            ..DraftOutputs::default()
        })
    }
}
