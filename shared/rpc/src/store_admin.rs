//! The interface of the draft store for operators.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::codec::post;

/// The calls of operators to a draft store. The mesh secret authorises them, and they name tenants in plain text.
#[async_trait]
pub trait StoreAdmin: Send + Sync {
    /// Reads the size of the store.
    async fn store_stats(&self) -> Result<StoreStats, ApiError>;

    /// Stores documents, which are durable once this returns. Documents that were erased before come back.
    ///
    /// # Errors
    /// As with [`crate::DraftStore::append`].
    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError>;

    /// Reads a page of a tenant's documents. Documents that cannot be read are left out; [`StoreAdmin::verify`] finds
    /// them.
    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError>;

    /// Reads and checks all records.
    async fn verify(&self) -> Result<VerifyReply, ApiError>;

    /// Copies the log into a new one, which frees unused space.
    ///
    /// # Errors
    /// `Unavailable` if the disk refuses. The old log stays in use.
    async fn compact(&self) -> Result<CompactReply, ApiError>;

    /// Erases documents, and returns when nothing of them is on disk any more. Repeats are harmless.
    ///
    /// # Errors
    /// `InvalidRequest` if the request has no condition. After other errors a part may be erased: call again.
    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError>;

    /// Confirms a state at which the store has stopped (see [`ConfirmRequest`]). Repeats are harmless.
    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError>;
}

/// Timeout of calls that read or write the whole log. The operator who waits for one can give it up earlier.
const WHOLE_LOG_TIMEOUT: Duration = Duration::from_secs(3_600);

/// [`StoreAdmin`] over HTTP: `GET /admin/v1/stats` and `POST /admin/v1/{verify,compact,erase,confirm}` in JSON, `POST
/// /admin/v1/{import,export}` in bincode.
pub struct HttpStoreAdmin {
    client: MeshClient,
}

impl HttpStoreAdmin {
    /// Creates a client of the store that `client` calls.
    pub fn new(client: MeshClient) -> Self {
        HttpStoreAdmin { client }
    }

    async fn over_whole_log<Q: Serialize, A: DeserializeOwned>(
        &self,
        call: &str,
        request: &Q,
    ) -> Result<A, ApiError> {
        let path = format!("/admin/v1/{call}");
        let timeout = Some(WHOLE_LOG_TIMEOUT);
        self.client.post_json(&path, request, timeout).await
    }
}

#[async_trait]
impl StoreAdmin for HttpStoreAdmin {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/admin/v1/stats").await
    }

    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError> {
        let timeout = self.client.timeout();
        post(&self.client, "/admin/v1/import", &request, timeout).await
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        let timeout = self.client.timeout();
        post(&self.client, "/admin/v1/export", &request, timeout).await
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        self.over_whole_log("verify", &()).await
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        self.over_whole_log("compact", &()).await
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        self.over_whole_log("erase", &request).await
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        let path = "/admin/v1/confirm";
        self.client.post_json(path, &request, None).await
    }
}
