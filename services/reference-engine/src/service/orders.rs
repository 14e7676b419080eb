//! Orders of a trainer: other weights, and empty KV caches.
//!
//! New weights are read and packed beside the model's thread, so steps go on meanwhile. The thread then exchanges the
//! model between two steps. All sessions end there, since their KV caches are of the old weights: callers open them
//! again with the whole text, as after any other loss. A drafter keeps its own weights. An EAGLE-3 head that was
//! trained for the old ones drafts worse, and the output is that of the new model all the same.

use std::sync::Arc;

use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply, EngineState};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::handle::EngineHandle;
use super::model_thread::Forgotten;
use crate::model::ModelError;

impl EngineHandle {
    /// Carries out an order of a trainer. A pause needs nothing here, since steps are taken only where they are asked
    /// for; it only drops the KV caches of all sessions, if it says so.
    ///
    /// # Errors
    /// `InvalidRequest` for weights that cannot be read or are of another shape, and for a call to be passed on.
    /// `Conflict` while other weights are being loaded, and `Unavailable` after shutdown. Nothing has changed then.
    pub async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        let thread = &self.shared.model_thread;
        match order {
            EngineOrder::Report | EngineOrder::Resume => {}
            EngineOrder::Pause { clears_cache, .. } => {
                if clears_cache {
                    thread.forget(Forgotten::All).await?;
                }
            }
            EngineOrder::FlushCache => thread.forget(Forgotten::Kept).await?,
            EngineOrder::LoadWeights { directory, version } => {
                let engine = self.clone();
                // A caller that leaves does not stop a load half way.
                let load =
                    tokio::spawn(async move { engine.load_weights(directory, version).await });
                load.await.map_err(ApiError::internal)??;
            }
            EngineOrder::SetVersion { version } => thread.renew(None, Some(version)).await?,
            EngineOrder::PassOn(_) => {
                let message = "this engine has no calls of its own that could be passed on";
                return Err(ApiError::new(ErrorKind::InvalidRequest, message)
                    .with_code(code::UNSUPPORTED_BY_ENGINE));
            }
        }
        let load = self.load();
        let running = load.sessions_open.saturating_sub(load.sessions_parked);
        let state = EngineState {
            weight_version: thread.weight_version(),
            running,
            ..EngineState::default()
        };
        Ok(EngineOrderReply {
            state,
            answer: None,
        })
    }

    /// Loads the weights of a directory, and exchanges the model.
    async fn load_weights(&self, directory: String, version: Option<u64>) -> Result<(), ApiError> {
        let loading = self.shared.loading.as_ref().ok_or_else(|| {
            let message =
                "the weights of this model stay as they are; start an engine of its own for others";
            ApiError::new(ErrorKind::InvalidRequest, message).with_code(code::UNSUPPORTED_BY_ENGINE)
        })?;
        let _turn = loading.turn()?;
        let engine = self.clone();
        let source = directory.clone();
        let model = tokio::task::spawn_blocking(move || {
            let Some(loading) = &engine.shared.loading else {
                return Ok(None);
            };
            let model = loading.read(&source)?;
            if engine.block_server().is_some() {
                // The pool asks for it between two steps, and then it must be known.
                model.fingerprint();
            }
            Ok::<_, ModelError>(Some(Arc::new(model)))
        });
        let model = model.await.map_err(ApiError::internal)?.map_err(|error| {
            let message = format!("the weights in {directory} cannot be loaded: {error}");
            ApiError::invalid("directory", message).with_code("weights_not_loaded")
        })?;
        let thread = &self.shared.model_thread;
        thread.renew(model, version).await?;
        let weight_version = thread.weight_version();
        tracing::info!(directory, weight_version, "new weights are in use");
        Ok(())
    }
}
