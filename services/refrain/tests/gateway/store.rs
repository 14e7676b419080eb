//! The draft store of the scripted mesh, as far as a gateway calls it.

use async_trait::async_trait;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::error::code;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::tenants::{
    TenantChange, TenantChangeReply, TenantRecord, TenantsReply, TenantsRequest, state_part,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{DraftStore, StoreAdmin, UsageReplica};

use crate::mesh::FakeMesh;

/// The tenants in the draft store.
#[derive(Default)]
pub(crate) struct KeptTenants {
    records: Vec<TenantRecord>,
    changes: u64,
    /// Records that gateways were sent.
    pub(crate) sent: usize,
    /// Whether the store answers nothing.
    pub(crate) is_away: bool,
}

impl KeptTenants {
    /// The tenants of a store that answers nothing.
    pub(crate) fn away() -> Self {
        KeptTenants {
            is_away: true,
            ..KeptTenants::default()
        }
    }

    /// Puts a tenant in, as an earlier version would have.
    pub(crate) fn put(&mut self, name: &str, entry: String) {
        self.changes += 1;
        self.records.push(TenantRecord {
            name: name.to_owned(),
            version: self.changes,
            entry,
        });
    }

    fn state(&self) -> u64 {
        let parts = self.records.iter();
        let parts = parts.map(|record| state_part(&record.name, record.version));
        parts.fold(0, |state, part| state ^ part)
    }

    fn check(&self) -> Result<(), ApiError> {
        match self.is_away {
            true => Err(ApiError::new(ErrorKind::Unavailable, "away by script")),
            false => Ok(()),
        }
    }
}

/// A gateway neither writes outputs nor reads them.
fn not_called() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "a gateway makes no such call")
}

#[async_trait]
impl DraftStore for FakeMesh {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(not_called())
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        Err(not_called())
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Err(not_called())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Err(not_called())
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.auth.verify(&request.namespace)?;
        self.log().groups.push(request.group);
        Ok(())
    }

    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError> {
        self.auth.verify(&request.namespace)?;
        self.log().prompts.push(request.prompt);
        Ok(OutputLengths::of(self.script().lengths.clone()))
    }

    async fn tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError> {
        // As over a network, others come between.
        tokio::task::yield_now().await;
        let mut kept = self.tenants.lock().unwrap();
        kept.check()?;
        let state = kept.state();
        let tenants = (request.known != Some(state)).then(|| kept.records.clone());
        kept.sent += tenants.as_ref().map_or(0, Vec::len);
        Ok(TenantsReply { state, tenants })
    }

    async fn change_tenant(&self, change: TenantChange) -> Result<TenantChangeReply, ApiError> {
        tokio::task::yield_now().await;
        let mut kept = self.tenants.lock().unwrap();
        kept.check()?;
        let known = kept.records.iter().find(|known| known.name == change.name);
        if known.map(|known| known.version) != change.expected {
            let error = ApiError::new(ErrorKind::Conflict, "changed by somebody else");
            return Err(error.with_code(code::TENANT_CHANGED));
        }
        kept.changes += 1;
        let version = kept.changes;
        kept.records.retain(|known| known.name != change.name);
        kept.records.extend(change.entry.map(|entry| TenantRecord {
            name: change.name,
            version,
            entry,
        }));
        Ok(TenantChangeReply { version })
    }

    fn usage_replicas(&self) -> Vec<UsageReplica> {
        vec![UsageReplica {
            name: "fake".to_owned(),
            store: self.usage.clone(),
        }]
    }
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
