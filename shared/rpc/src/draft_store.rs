//! The draft store's interface.

use async_trait::async_trait;
use refrain_protocol::chances::{ChancesReply, ChancesRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, FetchGroupsReply, FetchGroupsRequest, FollowReply, FollowRequest,
    GroupUpdate, RegisterGroupRequest, StoreStats, TouchRequest,
};
use refrain_protocol::lookup::{LookupReply, LookupRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;
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

    /// What of a namespace is sealed, and what is not.
    ///
    /// # Errors
    /// `NotFound` of a store that hands no segments out: follow it from the beginning.
    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        drop(request);
        Err(no_segments())
    }

    /// Bytes of a segment.
    ///
    /// # Errors
    /// `NotFound` when the segment is not there (any more), or another namespace's.
    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        drop(request);
        Err(no_segments())
    }

    /// Documents as they are now; those that are not there are left out.
    ///
    /// # Errors
    /// `NotFound` of a store that hands no segments out.
    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        drop(request);
        Err(no_segments())
    }

    /// Drafts from what is sealed, for all requests of a step.
    ///
    /// # Errors
    /// `Overloaded` when as many calls are under way as may be, `NotFound` of a store that does not draft.
    async fn lookup(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        drop(request);
        let message = "this draft store does not draft";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }

    /// Adds what was observed of drafts in a namespace to what is known there, durably, and says what that is. A call that
    /// is repeated counts twice.
    ///
    /// # Errors
    /// `InvalidRequest` for bytes that are no observations, `Overloaded` when one namespace more would be too many,
    /// `NotFound` of a store that keeps no chances.
    async fn chances(&self, request: ChancesRequest) -> Result<ChancesReply, ApiError> {
        drop(request);
        let message = "this draft store does not keep what drafts are worth";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }
}

fn no_segments() -> ApiError {
    ApiError::new(
        ErrorKind::NotFound,
        "this draft store hands no segments out",
    )
}

fn no_groups() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "this draft store has no groups")
}

/// [`DraftStore`] over HTTP: `POST /internal/v1/{append,follow,touch,groups/register,groups/fetch,segments,
/// segments/piece,documents,lookup,chances}` in bincode, `GET /internal/v1/stats` in JSON.
pub struct HttpDraftStore {
    client: MeshClient,
}

impl HttpDraftStore {
    /// A client of the store behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpDraftStore { client }
    }

    /// A call with the client's usual deadline.
    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &Q,
    ) -> Result<A, ApiError> {
        let path = format!("/internal/v1/{path}");
        post(&self.client, &path, request, self.client.timeout()).await
    }
}

#[async_trait]
impl DraftStore for HttpDraftStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        self.call("append", &request).await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let timeout = self.client.timeout() + Duration::from_millis(u64::from(request.wait_ms));
        post(&self.client, "/internal/v1/follow", &request, timeout).await
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        self.call("touch", &request).await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/internal/v1/stats").await
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.call("groups/register", &request).await
    }

    async fn fetch_cst(&self, request: FetchGroupsRequest) -> Result<FetchGroupsReply, ApiError> {
        self.call("groups/fetch", &request).await
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.call("segments", &request).await
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.call("segments/piece", &request).await
    }

    async fn lookup(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        self.call("lookup", &request).await
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.call("documents", &request).await
    }

    async fn chances(&self, request: ChancesRequest) -> Result<ChancesReply, ApiError> {
        self.call("chances", &request).await
    }
}
