//! The interface of processes that adopt engines.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, AdopterReport, ReleaseRequest};
use refrain_service_kit::http::MeshClient;

/// Adopts engines that register, and runs a worker for each.
#[async_trait]
pub trait EngineAdopter: Send + Sync {
    /// Adopts an engine. A repeat returns the same engine.
    ///
    /// # Errors
    /// `Forbidden` for a host that is not allowed, `Overloaded` at the limit of engines, `InvalidRequest` for an
    /// engine that cannot serve the model, and `Unavailable` or `Timeout` for one that does not answer.
    async fn adopt(&self, request: AdoptRequest) -> Result<AdoptedEngine, ApiError>;

    /// Gives an engine up. When this returns, nothing runs on it, and its worker has left the scheduler.
    ///
    /// # Errors
    /// `NotFound` for an engine that was not adopted here.
    async fn release(&self, request: ReleaseRequest) -> Result<AdoptedEngine, ApiError>;

    /// The engines that were adopted.
    ///
    /// # Errors
    /// The process cannot be reached.
    async fn report(&self) -> Result<AdopterReport, ApiError>;
}

/// [`EngineAdopter`] over HTTP.
pub struct HttpEngineAdopter {
    client: MeshClient,
}

/// Longest time of an adoption: an engine answers some short calls, and its steps may be measured.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest time of a release: running chunks have their grace.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(300);

impl HttpEngineAdopter {
    /// Creates a client of the process at the base URL of `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpEngineAdopter { client }
    }
}

#[async_trait]
impl EngineAdopter for HttpEngineAdopter {
    async fn adopt(&self, request: AdoptRequest) -> Result<AdoptedEngine, ApiError> {
        let path = "/internal/v1/engines/adopt";
        let timeout = Some(ADOPT_TIMEOUT);
        self.client.post_json(path, &request, timeout).await
    }

    async fn release(&self, request: ReleaseRequest) -> Result<AdoptedEngine, ApiError> {
        let path = "/internal/v1/engines/release";
        let timeout = Some(RELEASE_TIMEOUT);
        self.client.post_json(path, &request, timeout).await
    }

    async fn report(&self) -> Result<AdopterReport, ApiError> {
        self.client.get_json("/internal/v1/engines").await
    }
}
