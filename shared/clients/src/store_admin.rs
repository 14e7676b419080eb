//! The draft store's interface for operators.

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{CompactReply, EraseReply, EraseRequest};
use refrain_service_kit::http::MeshClient;

/// What operators may do to a draft store. Callers are those who hold the mesh's secret, and name tenants
/// plainly.
#[async_trait]
pub trait StoreAdmin: Send + Sync {
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
}

/// [`StoreAdmin`] over HTTP: `POST /admin/v1/{compact,erase}` in JSON.
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
    async fn compact(&self) -> Result<CompactReply, ApiError> {
        // No deadline: it takes as long as the log is large.
        self.client.post_json("/admin/v1/compact", &(), None).await
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        self.client
            .post_json("/admin/v1/erase", &request, None)
            .await
    }
}
