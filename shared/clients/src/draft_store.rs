//! The draft store's interface.

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

use crate::codec::{BINCODE_CONTENT_TYPE, decode_bincode, encode_bincode};

/// The durable memory of outputs.
#[async_trait]
pub trait DraftStore: Send + Sync {
    /// Stores pieces of documents; durable once answered.
    ///
    /// # Errors
    /// `Overloaded` when the writer's queue is full, `Unavailable` when the disk refuses.
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError>;

    /// What changed in a namespace since a cursor, waiting for something if asked to.
    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError>;

    /// Marks documents as used now.
    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError>;

    /// The store in numbers.
    async fn stats(&self) -> Result<StoreStats, ApiError>;
}

/// [`DraftStore`] over HTTP: `POST /internal/v1/{append,follow,touch}` in bincode, `GET /internal/v1/stats`
/// in JSON.
pub struct HttpDraftStore {
    client: MeshClient,
}

impl HttpDraftStore {
    /// A client of the store behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpDraftStore { client }
    }

    async fn post<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &Q,
        timeout: Duration,
    ) -> Result<A, ApiError> {
        let body = encode_bincode(request)?;
        let answer = self
            .client
            .post_bytes(path, BINCODE_CONTENT_TYPE, body, timeout)
            .await?;
        decode_bincode(&answer)
    }
}

#[async_trait]
impl DraftStore for HttpDraftStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        self.post("/internal/v1/append", &request, self.client.timeout())
            .await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let timeout = self.client.timeout() + Duration::from_millis(u64::from(request.wait_ms));
        self.post("/internal/v1/follow", &request, timeout).await
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        self.post("/internal/v1/touch", &request, self.client.timeout())
            .await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/internal/v1/stats").await
    }
}
