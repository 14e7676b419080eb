//! The administration of the scripted mesh's draft store, as far as a gateway calls it.

use async_trait::async_trait;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::StoreAdmin;

use crate::mesh::FakeMesh;

/// A gateway neither writes outputs nor reads them.
fn not_called() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "a gateway makes no such call")
}

#[async_trait]
impl StoreAdmin for FakeMesh {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        Err(not_called())
    }

    async fn import(&self, _: ImportRequest) -> Result<AppendReply, ApiError> {
        Err(not_called())
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        assert_eq!(request.tenant, "acme");
        Ok(ExportReply::default())
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        Err(not_called())
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        Ok(CompactReply {
            before_bytes: 9,
            after_bytes: 4,
        })
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        self.log().erasures.push(request);
        Ok(EraseReply {
            documents: 3,
            ..EraseReply::default()
        })
    }

    async fn confirm(&self, _: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        Err(not_called())
    }
}
