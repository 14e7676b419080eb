//! The interface of a draft store for other replicas of its shard.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::join::{
    JoinDocuments, JoinDocumentsRequest, JoinList, JoinListRequest, JoinOffer, JoinOfferRequest,
    JoinPiece, JoinPieceRequest, ReplicaState,
};
use refrain_protocol::shard::StoreDirectory;
use refrain_service_kit::http::MeshClient;

use crate::codec::post;

/// The calls of one replica to another. The mesh secret authorises the calls.
#[async_trait]
pub trait ReplicaPeer: Send + Sync {
    /// Reads the progress of this replica.
    async fn replica_state(&self) -> Result<ReplicaState, ApiError>;

    /// Lists the replicas of all shards that this one has heard of.
    ///
    /// # Errors
    /// `NotFound` from a store without a feed.
    async fn directory(&self) -> Result<StoreDirectory, ApiError>;

    /// Says what this replica can hand over.
    ///
    /// # Errors
    /// `Unavailable` while it is no replica of this shard, or has not caught up itself.
    async fn join_offer(&self, request: JoinOfferRequest) -> Result<JoinOffer, ApiError>;

    /// Lists documents of a namespace, and the files that have the others.
    async fn join_list(&self, request: JoinListRequest) -> Result<JoinList, ApiError>;

    /// Reads a piece of a segment's file.
    ///
    /// # Errors
    /// `NotFound` if the segment was merged or rewritten since it was listed.
    async fn join_piece(&self, request: JoinPieceRequest) -> Result<JoinPiece, ApiError>;

    /// Reads documents in their present state.
    async fn join_documents(
        &self,
        request: JoinDocumentsRequest,
    ) -> Result<JoinDocuments, ApiError>;
}

/// Timeout of one call. A page of a list of millions of documents takes a while.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// [`ReplicaPeer`] over HTTP: `GET /internal/v1/{replica,directory}` in JSON, and
/// `POST /internal/v1/join/{offer,list,piece,documents}` in bincode.
pub struct HttpReplicaPeer {
    client: MeshClient,
}

impl HttpReplicaPeer {
    /// Creates a client of the replica that `client` calls.
    pub fn new(client: MeshClient) -> Self {
        HttpReplicaPeer { client }
    }
}

#[async_trait]
impl ReplicaPeer for HttpReplicaPeer {
    async fn replica_state(&self) -> Result<ReplicaState, ApiError> {
        self.client.get_json("/internal/v1/replica").await
    }

    async fn directory(&self) -> Result<StoreDirectory, ApiError> {
        self.client.get_json("/internal/v1/directory").await
    }

    async fn join_offer(&self, request: JoinOfferRequest) -> Result<JoinOffer, ApiError> {
        let path = "/internal/v1/join/offer";
        post(&self.client, path, &request, self.client.timeout()).await
    }

    async fn join_list(&self, request: JoinListRequest) -> Result<JoinList, ApiError> {
        let path = "/internal/v1/join/list";
        post(&self.client, path, &request, CALL_TIMEOUT).await
    }

    async fn join_piece(&self, request: JoinPieceRequest) -> Result<JoinPiece, ApiError> {
        let path = "/internal/v1/join/piece";
        post(&self.client, path, &request, CALL_TIMEOUT).await
    }

    async fn join_documents(
        &self,
        request: JoinDocumentsRequest,
    ) -> Result<JoinDocuments, ApiError> {
        let path = "/internal/v1/join/documents";
        post(&self.client, path, &request, CALL_TIMEOUT).await
    }
}
