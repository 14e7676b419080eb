//! Calls of gateways that keep their tenants here.

use refrain_protocol::tenants::{TenantChange, TenantChangeReply, TenantsReply, TenantsRequest};
use refrain_protocol::{ApiError, ErrorKind, TenantName};

use crate::catalog::TENANT_BYTES_MAX;
use crate::handle::DraftStoreHandle;

impl DraftStoreHandle {
    /// Replicas do not tell each other of tenants, so each would have others.
    fn check_keeps_tenants(&self) -> Result<(), ApiError> {
        if self.inner.config.feed.is_none() {
            return Ok(());
        }
        let message = "a draft store with a feed keeps no tenants: use a file of tenants (gateway.tenants_file) in \
                       place of gateway.tenants_in_store";
        Err(ApiError::new(ErrorKind::InvalidRequest, message))
    }

    /// All tenants as they are on disk. It waits for no commit.
    pub(super) fn list_tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError> {
        self.check_keeps_tenants()?;
        self.inner.shared.read_tenants(|tenants| {
            let state = tenants.state();
            let is_known = request.known == Some(state);
            TenantsReply {
                state,
                tenants: (!is_known).then(|| tenants.records()),
            }
        })
    }

    /// Carries out a change, which is durable then.
    pub(super) async fn set_tenant(
        &self,
        change: TenantChange,
    ) -> Result<TenantChangeReply, ApiError> {
        self.check_keeps_tenants()?;
        self.check_name("name", &change.name)?;
        // One that was stored before there were these rules can be removed.
        if let (Some(_), Err(fault)) = (&change.entry, change.name.parse::<TenantName>()) {
            return Err(ApiError::invalid("name", format!("name: {fault}")));
        }
        let bytes = change.entry.as_ref().map_or(1, String::len);
        if bytes == 0 || bytes > TENANT_BYTES_MAX {
            let message = format!("entry: must have 1 to {TENANT_BYTES_MAX} bytes");
            return Err(ApiError::invalid("entry", message));
        }
        let version = self.ask(move |writer| writer.change_tenant(&change));
        Ok(TenantChangeReply {
            version: version.await?,
        })
    }
}
