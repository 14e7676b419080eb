//! What operators ask for.

use async_trait::async_trait;
use refrain_clients::StoreAdmin;
use refrain_protocol::ApiError;
use refrain_protocol::admin::CompactReply;
use tokio::sync::oneshot;

use super::DraftStoreHandle;
use crate::directory::Rewritten;
use crate::shared::unavailable;
use crate::writer::actor::rewriting::RewriteCall;
use crate::writer::call::Call;

impl DraftStoreHandle {
    /// Has the log rewritten by a rewrite that begins after this call.
    async fn rewrite(&self) -> Result<Rewritten, ApiError> {
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
}
