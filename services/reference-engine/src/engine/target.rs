//! The model whose tokens an engine emits: of this crate, or of a backend.

use std::sync::Arc;

use refrain_protocol::TokenId;

use crate::backend::{Backend, BackendModel};
use crate::model::Model;
use crate::network::{Branch, ForwardPass, KvShape, ModelForward, backend_pass};

/// A loaded model that an engine is to serve.
pub(crate) enum LoadedModel {
    /// This crate computes it.
    Own(Arc<Model>),
    Backend(Box<BackendModel>),
}

impl From<Arc<Model>> for LoadedModel {
    fn from(model: Arc<Model>) -> Self {
        LoadedModel::Own(model)
    }
}

impl LoadedModel {
    /// The model, if this crate computes it.
    pub(crate) fn own(&self) -> Option<&Arc<Model>> {
        match self {
            LoadedModel::Own(model) => Some(model),
            LoadedModel::Backend(_) => None,
        }
    }

    pub(crate) fn vocab_size(&self) -> u32 {
        match self {
            LoadedModel::Own(model) => {
                u32::try_from(model.architecture.vocab_size).unwrap_or(u32::MAX)
            }
            LoadedModel::Backend(model) => model.vocab_size,
        }
    }

    pub(super) fn max_context(&self) -> u32 {
        match self {
            LoadedModel::Own(model) => {
                u32::try_from(model.architecture.max_context).unwrap_or(u32::MAX)
            }
            LoadedModel::Backend(model) => model.max_context,
        }
    }

    /// The tokens that end an output.
    pub(crate) fn eos_token_ids(&self) -> &[TokenId] {
        match self {
            LoadedModel::Own(model) => &model.architecture.eos_token_ids,
            LoadedModel::Backend(model) => &model.eos_token_ids,
        }
    }

    /// The layout of its KV blocks, which hold nothing if a backend has the keys and values.
    pub(crate) fn kv_shape(&self) -> KvShape {
        self.own()
            .map_or_else(KvShape::default, |model| KvShape::of(&model.architecture))
    }
}

/// A model, and what computes it.
#[derive(Debug)]
pub(super) enum Target {
    Own {
        model: Arc<Model>,
        forward: Box<ModelForward>,
    },
    Backend {
        backend: Arc<dyn Backend>,
        vocab_size: usize,
    },
}

impl Target {
    /// Has a model computed with `threads` threads. This crate's own captures the outputs of `captured_layers`.
    pub(super) fn new(model: LoadedModel, captured_layers: &[usize], threads: usize) -> Self {
        match model {
            LoadedModel::Own(model) => Target::Own {
                forward: Box::new(ModelForward::new(&model, captured_layers, threads)),
                model,
            },
            LoadedModel::Backend(model) => Target::Backend {
                vocab_size: model.vocab_size as usize,
                backend: model.backend,
            },
        }
    }

    /// The model, if this crate computes it.
    pub(super) fn own(&self) -> Option<&Arc<Model>> {
        match self {
            Target::Own { model, .. } => Some(model),
            Target::Backend { .. } => None,
        }
    }

    /// The backend that computes it, if one does.
    pub(super) fn backend(&self) -> Option<&Arc<dyn Backend>> {
        match self {
            Target::Own { .. } => None,
            Target::Backend { backend, .. } => Some(backend),
        }
    }

    /// Goes on with another model of the same architecture. That of a backend stays.
    pub(super) fn replace(&mut self, new: Arc<Model>) {
        if let Target::Own { model, .. } = self {
            *model = new;
        }
    }

    /// Computes all branches. Every token must be below the vocabulary's size.
    ///
    /// # Errors
    /// That of a backend. The sequences of the branches cannot be used any longer.
    pub(super) fn run(&mut self, branches: &mut [Branch<'_>]) -> Result<ForwardPass, String> {
        match self {
            Target::Own { model, forward } => Ok(forward.run(model, branches)),
            Target::Backend {
                backend,
                vocab_size,
            } => backend_pass(backend.as_ref(), *vocab_size, branches),
        }
    }
}
