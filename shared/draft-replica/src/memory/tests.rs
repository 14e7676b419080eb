//! Who must not wait for the memory.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, Namespace};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;

/// A store that is away.
struct Away;

#[async_trait]
impl DraftStore for Away {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("away"))
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        Err(ApiError::internal("away"))
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Err(ApiError::internal("away"))
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Err(ApiError::internal("away"))
    }
}

#[tokio::test]
async fn a_namespace_is_had_at_once_or_not() {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let sign = |tenant: &str| {
        let signed = signer.sign(Namespace {
            tenant: tenant.into(),
            model: "model".into(),
            tokenizer: "tokenizer".into(),
        });
        (signed.namespace.id(), signed)
    };
    let metrics = MemoryMetrics::new(&Metrics::new().unwrap()).unwrap();
    let memory = Memory::new(MemoryConfig::default(), 64, Arc::new(Away), metrics);
    let (first, second) = (sign("first"), sign("second"));
    assert!(memory.try_namespace(first.0, &first.1).is_none());
    let known = memory.namespace(first.0, &first.1);
    memory.namespace(second.0, &second.1);

    let all = memory.space.lock();
    assert!(memory.try_namespace(first.0, &first.1).is_none());
    drop(all);
    // Nor is the signature waited for, and the drafts are another matter.
    let (grant, drafts) = (known.grant.lock().unwrap(), known.lock());
    let mut newer = first.1.clone();
    newer.issued_at_s += 1;
    assert!(memory.try_namespace(first.0, &newer).is_some());
    assert_eq!(grant.issued_at_s, first.1.issued_at_s);
    drop((grant, drafts));
    assert!(memory.try_namespace(first.0, &newer).is_some());
    assert_eq!(known.grant().issued_at_s, newer.issued_at_s);
    // It is the one used last: another one would have to go first.
    let order: Vec<NamespaceId> = memory.space.namespaces().iter().map(|one| one.id).collect();
    assert_eq!(order, [second.0, first.0]);
}
