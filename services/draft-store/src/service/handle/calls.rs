//! The calls of other services: `refrain_rpc::DraftStore` on the handle.

use std::collections::HashSet;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::lookup::{LookupReply, LookupRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_rpc::DraftStore;

use crate::metrics::Limit;
use crate::record::DocumentKey;
use crate::service::handle::DraftStoreHandle;
use crate::writer::messages::WriterMessage;
use crate::writer::requests::{Append, UpdateAuthor};

#[async_trait]
impl DraftStore for DraftStoreHandle {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        self.check(&request.namespace.namespace, &request.updates)?;
        self.store(Append {
            namespace,
            names: request.namespace.namespace,
            updates: request.updates,
            author: UpdateAuthor::Worker,
        })
        .await
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        self.follow_namespace(request).await
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let most = self.inner.config.tuning.updates_max;
        self.check_count(request.documents.len(), most, "documents", Limit::Updates)?;
        let unique: HashSet<DocumentKey> = request
            .documents
            .iter()
            .map(|document| DocumentKey::new(namespace, *document))
            .collect();
        self.send(WriterMessage::Touch(unique.into_iter().collect()))
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(self.inner.shared.stats())
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.list_segments(request).await
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.read_piece(request).await
    }

    async fn lookup(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        self.look_up(request).await
    }

    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        self.exchange_statistics(request).await
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.read_documents(request).await
    }
}
