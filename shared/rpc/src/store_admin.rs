//! The draft store's interface for operators.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_service_kit::http::MeshClient;

use crate::codec::post;

/// What operators may do to a draft store. Callers are those who hold the mesh's secret, and name tenants
/// plainly.
#[async_trait]
pub trait StoreAdmin: Send + Sync {
    /// The store in numbers.
    async fn store_stats(&self) -> Result<StoreStats, ApiError>;

    /// Stores documents; durable once answered. Those that were erased come back by this.
    ///
    /// # Errors
    /// As [`crate::DraftStore::append`].
    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError>;

    /// A page of a tenant's documents. Documents that cannot be read are left out; see
    /// [`StoreAdmin::verify`].
    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError>;

    /// Reads and checks every record.
    async fn verify(&self) -> Result<VerifyReply, ApiError>;

    /// Copies the log into a fresh one, which gives its unused space back.
    ///
    /// # Errors
    /// `Unavailable` when the disk refuses: the old log still counts.
    async fn compact(&self) -> Result<CompactReply, ApiError>;

    /// Erases documents; answered when nothing of them is on disk any more. Repeats are harmless.
    ///
    /// # Errors
    /// `InvalidRequest` when the request does not say what. After any other it may be done in part: ask again.
    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError>;

    /// Has the store believe what it stopped at: see [`ConfirmRequest`]. Repeats are harmless.
    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError>;
}

/// Deadline of what takes as long as the log is large: an operator waits for it, and may give it up earlier.
const WHOLE_LOG_TIMEOUT: Duration = Duration::from_secs(3_600);

/// [`StoreAdmin`] over HTTP: `GET /admin/v1/stats` and `POST /admin/v1/{verify,compact,erase,confirm}` in JSON, `POST
/// /admin/v1/{import,export}` in bincode.
pub struct HttpStoreAdmin {
    client: MeshClient,
}

impl HttpStoreAdmin {
    /// A client of the store behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpStoreAdmin { client }
    }
}

#[async_trait]
impl StoreAdmin for HttpStoreAdmin {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/admin/v1/stats").await
    }

    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError> {
        post(
            &self.client,
            "/admin/v1/import",
            &request,
            self.client.timeout(),
        )
        .await
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        post(
            &self.client,
            "/admin/v1/export",
            &request,
            self.client.timeout(),
        )
        .await
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        self.client
            .post_json("/admin/v1/verify", &(), Some(WHOLE_LOG_TIMEOUT))
            .await
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        self.client
            .post_json("/admin/v1/compact", &(), Some(WHOLE_LOG_TIMEOUT))
            .await
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        self.client
            .post_json("/admin/v1/erase", &request, Some(WHOLE_LOG_TIMEOUT))
            .await
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        let timeout = Some(self.client.timeout());
        self.client
            .post_json("/admin/v1/confirm", &request, timeout)
            .await
    }
}
