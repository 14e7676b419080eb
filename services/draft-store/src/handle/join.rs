//! Calls of other replicas that join: `refrain_rpc::ReplicaPeer` on the handle.

use async_trait::async_trait;
use refrain_protocol::join::{
    JoinDocuments, JoinDocumentsRequest, JoinList, JoinListRequest, JoinOffer, JoinOfferRequest,
    JoinPiece, JoinPieceRequest, ReplicaState,
};
use refrain_protocol::shard::StoreDirectory;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::ReplicaPeer;

use crate::directory::count_quarantines;
use crate::handle::{DraftStoreHandle, REPLY_TOKENS_MAX};
use crate::reading::join;

/// Most bytes of a piece of a file, whatever the caller asks for.
const PIECE_BYTES_MAX: u32 = 8 << 20;

fn no_peer(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(5_000)
}

#[async_trait]
impl ReplicaPeer for DraftStoreHandle {
    async fn replica_state(&self) -> Result<ReplicaState, ApiError> {
        let _running = self.enter()?;
        let dir = self.inner.config.data_dir.clone();
        self.read_blocking(move |shared| {
            let quarantines = count_quarantines(&dir);
            let open = shared.read()?;
            let replication = &open.catalog.replication;
            Ok(ReplicaState {
                generation: open.catalog.generation(),
                sequence: replication.sequence(),
                erased_sequence: replication.seen(),
                quarantines,
            })
        })
        .await
    }

    async fn directory(&self) -> Result<StoreDirectory, ApiError> {
        let inner = &*self.inner;
        let feed = inner.config.feed.as_ref().zip(inner.feed.as_ref());
        let Some((config, status)) = feed else {
            let message = "this draft store has no feed, so it has no other replicas";
            return Err(ApiError::new(ErrorKind::NotFound, message));
        };
        let mut own = status.entry(config);
        own.is_ready &= self.readiness().is_ok();
        Ok(status.directory.list(own, config.shards))
    }

    async fn join_offer(&self, request: JoinOfferRequest) -> Result<JoinOffer, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let shard = inner.config.feed.as_ref().map(|feed| feed.shard);
        if shard != Some(request.shard) {
            return Err(no_peer("this draft store is no replica of that shard"));
        }
        let state = inner.feed.as_ref().map(|feed| feed.state());
        if !state.is_some_and(|state| state.caught_up) {
            return Err(no_peer("this replica has not caught up itself"));
        }
        let offer = self.read_blocking(join::offer).await?;
        offer.ok_or_else(|| {
            no_peer("this replica follows no stream yet, or is about to erase documents")
        })
    }

    async fn join_list(&self, request: JoinListRequest) -> Result<JoinList, ApiError> {
        let _running = self.enter()?;
        self.read_blocking(move |shared| join::list(shared, &request))
            .await
    }

    async fn join_piece(&self, request: JoinPieceRequest) -> Result<JoinPiece, ApiError> {
        let _running = self.enter()?;
        let bytes_max = request.bytes_max.min(PIECE_BYTES_MAX) as usize;
        let piece = self
            .read_blocking(move |shared| join::piece(shared, &request, bytes_max))
            .await?;
        self.inner
            .metrics
            .sent_segment_bytes
            .inc_by(piece.bytes.len() as u64);
        Ok(piece)
    }

    async fn join_documents(
        &self,
        mut request: JoinDocumentsRequest,
    ) -> Result<JoinDocuments, ApiError> {
        let _running = self.enter()?;
        // `covered` tells the caller to ask for the rest.
        let most = self.inner.config.tuning.updates_max;
        request.documents.truncate(most);
        let tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX) as usize;
        let read = move |shared: &_| join::documents(shared, &request, tokens_max);
        let (reply, damaged) = self.read_blocking(read).await?;
        self.report(damaged);
        Ok(reply)
    }
}
