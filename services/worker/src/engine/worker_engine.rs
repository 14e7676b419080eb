//! The engine of a worker, whichever kind it is.

use std::sync::Arc;

use refrain_protocol::ApiError;

use super::streaming::StreamingEngine;
use super::verifying::VerifyingEngine;

/// The engine of a worker.
#[derive(Clone)]
pub enum WorkerEngine {
    /// An engine that verifies drafts and is driven step by step.
    Verifying(Arc<dyn VerifyingEngine>),
    /// An engine that generates by itself.
    Streaming(Arc<dyn StreamingEngine>),
}

/// The model that an engine serves, as chunks are checked against it.
pub(crate) struct ServedModel<'a> {
    pub(crate) model: &'a str,
    pub(crate) tokenizer: &'a str,
    pub(crate) limits: EngineLimits,
}

/// The limits of an engine that concern one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineLimits {
    pub(crate) max_context: u32,
    /// 0 for an engine that takes no drafts.
    pub(crate) max_draft_tokens: u32,
    /// Whether it is told of the text that comes after the first piece.
    pub(crate) reads_ahead: bool,
}

impl WorkerEngine {
    /// Public name of the model that it serves.
    pub fn model(&self) -> &str {
        self.served().model
    }

    /// The model that the engine serves.
    pub(crate) fn served(&self) -> ServedModel<'_> {
        let mut reads_ahead = false;
        let (model, tokenizer, max_context, max_draft_tokens) = match self {
            WorkerEngine::Verifying(engine) => {
                let able = engine.capabilities();
                let drafts = able.max_draft_tokens;
                reads_ahead = able.reads_ahead;
                (&able.model, &able.tokenizer, able.max_context, drafts)
            }
            WorkerEngine::Streaming(engine) => {
                let able = engine.capabilities();
                (&able.model, &able.tokenizer, able.max_context, 0)
            }
        };
        ServedModel {
            model,
            tokenizer,
            limits: EngineLimits {
                max_context,
                max_draft_tokens,
                reads_ahead,
            },
        }
    }

    /// Its URL, if it is in another process.
    pub(crate) fn url(&self) -> Option<&str> {
        match self {
            WorkerEngine::Verifying(engine) => engine.url(),
            WorkerEngine::Streaming(engine) => engine.url(),
        }
    }

    /// Whether the engine compiles forms of outputs by the grammars of this project.
    pub(crate) fn compiles_forms(&self) -> bool {
        match self {
            WorkerEngine::Verifying(engine) => engine.capabilities().output_forms,
            WorkerEngine::Streaming(_) => false,
        }
    }

    /// Checks that the engine is reachable and still serves the same model.
    pub(crate) async fn confirm(&self) -> Result<(), ApiError> {
        match self {
            WorkerEngine::Verifying(engine) => engine.confirm().await,
            WorkerEngine::Streaming(engine) => engine.confirm().await,
        }
    }
}
