//! The erasure of a tenant.

use refrain_protocol::ApiError;
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};

use super::handle::EngineHandle;

impl EngineHandle {
    /// Forgets the sessions of a tenant that are kept or parked, and its blocks in the pool. A request that runs goes
    /// on, and hands nothing to the pool any more.
    ///
    /// # Errors
    /// `Unavailable` after shutdown, and `Internal` if the file of the pool cannot be written. Blocks may be left in
    /// it then, until this is repeated.
    pub async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let ForgetTenant { tenant } = order;
        // Sessions first: from then on none of them brings a block back.
        let (sessions, running) = self.shared.model_thread.forget_tenant(tenant).await?;
        let (memory_blocks, file_blocks) = match self.block_server() {
            Some(server) => server.forget(tenant).await?,
            None => (0, 0),
        };
        tracing::info!(
            sessions,
            running,
            memory_blocks,
            file_blocks,
            "what was computed for a tenant is erased"
        );
        Ok(TenantForgotten {
            sessions: sessions as u64,
            memory_blocks: memory_blocks as u64,
            file_blocks: file_blocks as u64,
            running: running as u64,
        })
    }
}
