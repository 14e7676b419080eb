//! The draft store of the scripted mesh, as far as a gateway calls it.

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{DraftStore, UsageReplica};

use crate::mesh::FakeMesh;

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

    fn usage_replicas(&self) -> Vec<UsageReplica> {
        vec![UsageReplica {
            name: "fake".to_owned(),
            store: self.usage.clone(),
        }]
    }
}
