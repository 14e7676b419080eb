//! The check of an engine that registers, and the connection to it.

use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::EngineAddress;
use refrain_service_kit::http::MeshClient;

use crate::config::{AdoptionConfig, EngineConfig, EngineKind};
use crate::engine::{
    ExpectedModel, FoundEngine, HttpEngine, WorkerEngine, connect_third_party, find_engine,
};

/// How engines are connected.
pub(super) struct Connector {
    pub(super) adoption: AdoptionConfig,
    pub(super) engine: EngineConfig,
    /// The model that every engine has to serve.
    pub(super) expected: ExpectedModel,
    /// The client of engines with the contract of this project.
    pub(super) client: MeshClient,
}

/// An engine that was checked.
pub(super) struct Connected {
    pub(super) engine: WorkerEngine,
    /// The version of its weights; 0 where it does not say.
    pub(super) weight_version: u64,
}

impl Connector {
    /// Connects to an engine, and checks its kind, its model and its tokenizer.
    ///
    /// # Errors
    /// `InvalidRequest` for an engine that cannot serve the model. Otherwise it does not answer.
    pub(super) async fn connect(&self, at: &EngineAddress) -> Result<Connected, ApiError> {
        let mut config = self.engine.clone();
        let mut found = FoundEngine {
            kind: None,
            weight_version: None,
        };
        if self.adoption.finds_kind || config.kind == EngineKind::Sglang {
            found = find_engine(&config, &at.url).await?;
        }
        if self.adoption.finds_kind {
            config.kind = found.kind.ok_or_else(|| unknown_kind(at))?;
        }
        let engine = match config.kind {
            EngineKind::Refrain => self.connect_own(at).await?,
            _ => connect_third_party(&config, &at.url, self.expected.clone()).await?,
        };
        Ok(Connected {
            engine,
            weight_version: found.weight_version.unwrap_or(0),
        })
    }

    /// Connects to an engine with the contract of this project.
    async fn connect_own(&self, at: &EngineAddress) -> Result<WorkerEngine, ApiError> {
        let connected = HttpEngine::connect(self.client.at(&at.url)).await;
        let engine = connected.map_err(|error| match error.kind {
            ErrorKind::NotFound | ErrorKind::MethodNotAllowed => {
                let message = "has no engine with the contract of the reference engine";
                cannot_serve(format!("{} {message}", at.url))
            }
            ErrorKind::Unauthorized | ErrorKind::Forbidden => {
                cannot_serve(format!("{} belongs to another mesh", at.url))
            }
            _ => error,
        })?;
        let engine = engine.with_tokenizer(self.expected.tokenizer.clone());
        let engine = WorkerEngine::Verifying(Arc::new(engine));
        let served = engine.served();
        let expected = &self.expected;
        if served.model != expected.model {
            let message = format!(
                "the engine at {} serves the model {}, not {}",
                at.url, served.model, expected.model
            );
            return Err(cannot_serve(message));
        }
        if served.tokenizer != expected.tokenizer.identity() {
            let message = format!(
                "the engine at {} has another tokenizer than worker.engine.files",
                at.url
            );
            return Err(cannot_serve(message));
        }
        Ok(engine)
    }
}

fn unknown_kind(at: &EngineAddress) -> ApiError {
    cannot_serve(format!(
        "what listens at {} is neither SGLang nor vLLM; for another kind of engine, set worker.engine.kind and \
         worker.adoption.finds_kind = false",
        at.url
    ))
}

fn cannot_serve(message: String) -> ApiError {
    ApiError::new(ErrorKind::InvalidRequest, message).with_code("engine_refused")
}
