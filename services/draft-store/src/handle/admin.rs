//! What operators ask for.

use async_trait::async_trait;
use refrain_clients::StoreAdmin;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{CompactReply, EraseReply, EraseRequest};
use tokio::sync::oneshot;

use super::DraftStoreHandle;
use crate::directory::Rewritten;
use crate::shared::unavailable;
use crate::writer::actor::rewriting::RewriteCall;
use crate::writer::call::Call;

impl DraftStoreHandle {
    /// Has the log rewritten by a rewrite that begins after this call.
    pub(super) async fn rewrite(&self) -> Result<Rewritten, ApiError> {
        let (demand, answer) = oneshot::channel();
        self.send(Call::Rewrite(RewriteCall::Demand(demand)))?;
        answer
            .await
            .map_err(|_| unavailable().with_detail("the writer dropped the call"))?
    }
}

#[async_trait]
impl StoreAdmin for DraftStoreHandle {
    async fn compact(&self) -> Result<CompactReply, ApiError> {
        let _running = self.enter()?;
        let done = self.rewrite().await?;
        Ok(CompactReply {
            before_bytes: done.before_bytes,
            after_bytes: done.after_bytes,
        })
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        let running = self.enter()?;
        let handle = self.clone();
        // A caller who hangs up does not leave it half done.
        let erasing = tokio::spawn(async move {
            let _running = running;
            handle.erase_all(request).await
        });
        erasing.await.map_err(ApiError::internal)?
    }
}
