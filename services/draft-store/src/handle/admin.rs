//! Calls of operators.

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_rpc::StoreAdmin;

use crate::catalog::ExportLimits;
use crate::directory::count_quarantines;
use crate::handle::{DraftStoreHandle, REPLY_TOKENS_MAX};
use crate::log::RewriteReport;
use crate::reading::{export, verify};
use crate::shared_store::SharedStore;
use crate::writer::requests::{Append, UpdateAuthor};

impl DraftStoreHandle {
    /// Runs a read on a blocking thread, as one of the reads that may run at once.
    pub(super) async fn read_blocking<T: Send + 'static>(
        &self,
        read: impl FnOnce(&SharedStore) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.inner.reads.clone().acquire_owned().await;
        let permit = permit.map_err(|_| ApiError::internal("the read semaphore is closed"))?;
        let shared = self.inner.shared.clone();
        let read = tokio::task::spawn_blocking(move || {
            let answer = read(&shared);
            drop(permit);
            answer
        });
        read.await.map_err(ApiError::internal)?
    }

    /// Rewrites the log. The rewrite begins after this call.
    pub(super) async fn rewrite(&self) -> Result<RewriteReport, ApiError> {
        self.ask_later(|writer, ctx, reply| writer.request_rewrite(reply, ctx))
            .await
    }

    fn segment_bytes(&self) -> Result<u64, ApiError> {
        let open = self.inner.shared.read()?;
        Ok(open.catalog.segments().bytes())
    }

    /// Rewrites the segments that hold anything removed before this call. With `seals`, also seals the documents that
    /// have ended.
    pub(super) async fn purge(&self, seals: bool) -> Result<(), ApiError> {
        self.ask_later(move |writer, ctx, reply| writer.request_purge(seals, reply, ctx))
            .await
    }
}

#[async_trait]
impl StoreAdmin for DraftStoreHandle {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        Ok(self.inner.shared.stats())
    }

    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError> {
        let _running = self.enter()?;
        self.check(&request.namespace, &request.updates)?;
        self.check_shard(request.namespace.id())?;
        let replicates = self.replicates(None)?;
        let append = Append {
            namespace: request.namespace.id(),
            names: request.namespace,
            updates: request.updates,
            waited_ms: 0,
            author: UpdateAuthor::Operator {
                is_static: request.is_static,
            },
        };
        self.store(append, replicates).await
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        let _running = self.enter()?;
        let tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX);
        let limits = ExportLimits::from(&self.inner.config);
        let metrics = self.inner.metrics.clone();
        self.read_blocking(move |shared| {
            let page = export::page(shared, &request, tokens_max as usize, limits);
            page.map_err(|refused| {
                refused
                    .limit
                    .into_iter()
                    .for_each(|limit| metrics.reject(limit));
                *refused.error
            })
        })
        .await
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        let _running = self.enter()?;
        let dir = self.inner.config.data_dir.clone();
        self.read_blocking(move |shared| {
            let mut reply = verify::verify(shared)?;
            reply.quarantines = count_quarantines(&dir);
            Ok(reply)
        })
        .await
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        let _running = self.enter()?;
        let segments_before_bytes = self.segment_bytes()?;
        self.purge(true).await?;
        let done = self.rewrite().await?;
        Ok(CompactReply {
            before_bytes: done.before_bytes + segments_before_bytes,
            after_bytes: done.after_bytes + self.segment_bytes()?,
        })
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        let running = self.enter()?;
        let handle = self.clone();
        // An erasure is completed even if its caller hangs up.
        let erasing = tokio::spawn(async move {
            let _running = running;
            handle.erase_all(request).await
        });
        erasing.await.map_err(ApiError::internal)?
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        let _running = self.enter()?;
        self.ask(move |writer| writer.confirm(request)).await
    }
}
