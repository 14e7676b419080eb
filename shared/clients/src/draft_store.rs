//! The draft store's interface.

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FetchGroupsReply, FetchGroupsRequest, FollowReply, FollowRequest,
    GroupUpdate, RegisterGroupRequest, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::MeshClient;
use std::time::Duration;

use crate::codec::post;

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

    /// Makes a group of samples known, or renews it.
    ///
    /// # Errors
    /// `Overloaded` when as many groups are known as may be, `NotFound` of a store without groups.
    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        drop(request);
        Err(no_groups())
    }

    /// What changed in some groups since a cursor each.
    ///
    /// # Errors
    /// `NotFound` of a store without groups. A group that is not registered is told in the answer.
    async fn fetch_cst(&self, request: FetchGroupsRequest) -> Result<FetchGroupsReply, ApiError> {
        drop(request);
        Err(no_groups())
    }

    /// Stores new tokens of a sample of a group: an append of one piece, by its other name.
    async fn update_cst(&self, update: GroupUpdate) -> Result<AppendReply, ApiError> {
        self.append(update.into()).await
    }
}

fn no_groups() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "this draft store has no groups")
}

/// [`DraftStore`] over HTTP: `POST /internal/v1/{append,follow,touch,groups/register,groups/fetch}` in bincode,
/// `GET /internal/v1/stats` in JSON.
pub struct HttpDraftStore {
    client: MeshClient,
}

impl HttpDraftStore {
    /// A client of the store behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpDraftStore { client }
    }
}

#[async_trait]
impl DraftStore for HttpDraftStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        post(
            &self.client,
            "/internal/v1/append",
            &request,
            self.client.timeout(),
        )
        .await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let timeout = self.client.timeout() + Duration::from_millis(u64::from(request.wait_ms));
        post(&self.client, "/internal/v1/follow", &request, timeout).await
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        post(
            &self.client,
            "/internal/v1/touch",
            &request,
            self.client.timeout(),
        )
        .await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/internal/v1/stats").await
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        let timeout = self.client.timeout();
        post(
            &self.client,
            "/internal/v1/groups/register",
            &request,
            timeout,
        )
        .await
    }

    async fn fetch_cst(&self, request: FetchGroupsRequest) -> Result<FetchGroupsReply, ApiError> {
        let timeout = self.client.timeout();
        post(&self.client, "/internal/v1/groups/fetch", &request, timeout).await
    }
}
