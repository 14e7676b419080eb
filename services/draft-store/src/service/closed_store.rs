//! Read-only access to a data directory that no process uses.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_protocol::usage::{
    EraseUsageReply, EraseUsageRequest, RecordUsageReply, RecordUsageRequest, UsageRowsReply,
    UsageRowsRequest,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{StoreAdmin, UsageStore};

use crate::catalog::ExportLimits;
use crate::config::DraftStoreConfig;
use crate::directory::{self, DirectoryLock, OpenedDirectory};
use crate::reading::{export, usage, verify};
use crate::shared_store::{OpenStore, SharedStore};

/// A data directory, opened for reading. It may be on a read-only disk. Its journal is read into memory. Nothing in
/// it is written, repaired or moved; that is up to [`crate::start`].
pub struct ClosedStore {
    shared: Arc<SharedStore>,
    /// Unreadable parts of the journal, as text.
    damage: Vec<String>,
    dir: PathBuf,
    _hold: Option<DirectoryLock>,
}

impl ClosedStore {
    /// Opens the store in `dir`.
    ///
    /// # Errors
    /// There is no store, another process uses it, or it cannot be read in full.
    pub fn open(dir: PathBuf) -> anyhow::Result<Self> {
        anyhow::ensure!(dir.is_dir(), "{}: no such directory", dir.display());
        let hold = DirectoryLock::acquire_existing(&dir)?;
        let cache_bytes = DraftStoreConfig::default().cache_bytes;
        let OpenedDirectory {
            log,
            loaded,
            damage,
            ..
        } = directory::inspect(&dir, cache_bytes, hold.is_some())?;
        let totals = loaded.catalog.totals();
        let shared = SharedStore::default();
        shared.set_stats(StoreStats {
            documents: totals.documents,
            tokens: totals.tokens,
            logical_bytes: totals.bytes,
            log_bytes: log.disk_bytes(),
            segment_bytes: loaded.catalog.segments().bytes(),
            disk_bytes: directory::disk_bytes(&dir),
            namespaces: totals.namespaces,
            evicted_documents: 0,
        });
        shared.set_open(Some(OpenStore {
            catalog: loaded.catalog,
            log,
        }));
        Ok(ClosedStore {
            shared: Arc::new(shared),
            damage,
            dir,
            _hold: hold,
        })
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&SharedStore) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let shared = self.shared.clone();
        tokio::task::spawn_blocking(move || read(&shared))
            .await
            .map_err(ApiError::internal)?
    }
}

fn read_only<T>() -> Result<T, ApiError> {
    Err(ApiError::new(
        ErrorKind::InvalidRequest,
        "the directory is open for reading only; start the store to change it",
    ))
}

#[async_trait]
impl StoreAdmin for ClosedStore {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        Ok(self.shared.stats())
    }

    async fn import(&self, _request: ImportRequest) -> Result<AppendReply, ApiError> {
        read_only()
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        let tokens_max = request.max_tokens as usize;
        let page = move |shared: &SharedStore| {
            export::page(shared, &request, tokens_max, ExportLimits::NONE)
                .map_err(|refused| *refused.error)
        };
        self.read(page).await
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        let (damage, dir) = (self.damage.clone(), self.dir.clone());
        self.read(move |shared| {
            let mut reply = verify::verify(shared)?;
            for what in damage {
                verify::note(&mut reply, what, "no readable record");
            }
            reply.quarantines = directory::count_quarantines(&dir);
            Ok(reply)
        })
        .await
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        read_only()
    }

    async fn erase(&self, _request: EraseRequest) -> Result<EraseReply, ApiError> {
        read_only()
    }

    async fn confirm(&self, _request: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        read_only()
    }
}

#[async_trait]
impl UsageStore for ClosedStore {
    async fn record_usage(
        &self,
        _request: RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        read_only()
    }

    async fn usage_rows(&self, request: UsageRowsRequest) -> Result<UsageRowsReply, ApiError> {
        self.read(move |shared| usage::page(shared, &request)).await
    }

    async fn erase_usage(&self, _request: EraseUsageRequest) -> Result<EraseUsageReply, ApiError> {
        read_only()
    }
}
