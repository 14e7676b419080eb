//! The interface of the draft store.

use async_trait::async_trait;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, StoreStats, TouchRequest, UnknownDocumentsReply,
    UnknownDocumentsRequest,
};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::pull::{PullReply, PullRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::tenants::{TenantChange, TenantChangeReply, TenantsReply, TenantsRequest};
use refrain_protocol::{ApiError, NamespaceId};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::post;
use crate::usage_store::{HttpUsageStore, UsageReplica};

/// The durable store of outputs.
///
/// An HTTP store of another version may lack a route. It answers `NotFound` then, and callers go on without it.
#[async_trait]
pub trait DraftStore: Send + Sync {
    /// Stores pieces of documents, which are durable once this returns.
    ///
    /// # Errors
    /// `Overloaded` when the writer's queue is full, `Unavailable` when the disk refuses.
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError>;

    /// Reads the changes of namespaces and groups, each since a cursor, and waits for some if the request says so.
    /// (`fetch_cst` of the Seer paper.) All namespaces of a call have to be of one [shard](Self::shard_of).
    ///
    /// A scope that cannot be read is refused in the reply, beside the news of the others.
    ///
    /// # Errors
    /// `Overloaded` when too many calls wait, `TooLarge` for too many scopes.
    async fn pull(&self, request: PullRequest) -> Result<PullReply, ApiError>;

    /// The shard that has a namespace. It is 0 for a store that has no others, and until the shards are known.
    fn shard_of(&self, _namespace: NamespaceId) -> u32 {
        0
    }

    /// Marks documents as used now.
    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError>;

    /// Reads the size of the store in numbers.
    async fn stats(&self) -> Result<StoreStats, ApiError>;

    /// Registers a group of samples, or renews its registration (`register_group` of the Seer paper). A document is
    /// written to a group by [`append`](Self::append).
    ///
    /// # Errors
    /// `Overloaded` when the store has as many groups as it may.
    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError>;

    /// Reads the lengths of the newest complete outputs to a prompt.
    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError>;

    /// Lists the sealed segments of a namespace, and its documents that are in no segment.
    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError>;

    /// Reads bytes of a segment.
    ///
    /// # Errors
    /// `NotFound` when the namespace has no such segment, or has none any more.
    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError>;

    /// Reads documents in their present state. Documents that do not exist are left out.
    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError>;

    /// Tells which documents the store does not have.
    async fn unknown_documents(
        &self,
        request: UnknownDocumentsRequest,
    ) -> Result<UnknownDocumentsReply, ApiError>;

    /// Asks for the acceptance statistics of a namespace, or replaces them durably. The last call that saves wins.
    ///
    /// # Errors
    /// `Conflict` with the code `statistics_erased` for a table that was erased, `InvalidRequest` for bytes that are
    /// no statistics, `Overloaded` when one more namespace would be too many.
    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError>;

    /// Reads the tenants that gateways keep in the store.
    ///
    /// # Errors
    /// `InvalidRequest` from a store with a feed, which keeps no tenants.
    async fn tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError>;

    /// Adds, replaces or removes a tenant durably.
    ///
    /// # Errors
    /// `Conflict` with the code `tenant_changed` if the tenant has another version than the change expects,
    /// `TooLarge` if there is no room, and as [`tenants`](Self::tenants).
    async fn change_tenant(&self, change: TenantChange) -> Result<TenantChangeReply, ApiError>;

    /// The replicas that are known now and keep usage, each as a store of its own.
    fn usage_replicas(&self) -> Vec<UsageReplica>;
}

/// [`DraftStore`] over HTTP: `POST /internal/v1/{append,pull,touch,groups/register,output-lengths,segments,
/// segments/piece,documents,documents/unknown,acceptance-stats,tenants,tenants/change}` in bincode, and
/// `GET /internal/v1/stats` in JSON.
pub struct HttpDraftStore {
    client: MeshClient,
}

impl HttpDraftStore {
    /// Creates a client of the store that `client` calls.
    pub fn new(client: MeshClient) -> Self {
        HttpDraftStore { client }
    }

    /// Makes a call with the client's usual timeout.
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

    async fn pull(&self, request: PullRequest) -> Result<PullReply, ApiError> {
        let timeout = self.client.timeout() + Duration::from_millis(u64::from(request.wait_ms));
        post(&self.client, "/internal/v1/pull", &request, timeout).await
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        self.call("touch", &request).await
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.call("groups/register", &request).await
    }

    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError> {
        self.call("output-lengths", &request).await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        self.client.get_json("/internal/v1/stats").await
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.call("segments", &request).await
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.call("segments/piece", &request).await
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.call("documents", &request).await
    }

    async fn unknown_documents(
        &self,
        request: UnknownDocumentsRequest,
    ) -> Result<UnknownDocumentsReply, ApiError> {
        self.call("documents/unknown", &request).await
    }

    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        self.call("acceptance-stats", &request).await
    }

    async fn tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError> {
        self.call("tenants", &request).await
    }

    async fn change_tenant(&self, change: TenantChange) -> Result<TenantChangeReply, ApiError> {
        self.call("tenants/change", &change).await
    }

    fn usage_replicas(&self) -> Vec<UsageReplica> {
        vec![UsageReplica {
            name: "draft store".to_owned(),
            store: Arc::new(HttpUsageStore::new(self.client.clone())),
        }]
    }
}
