//! Calls of the replica that must not wait.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, Namespace};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;

/// A store that cannot be reached.
struct UnreachableStore;

#[async_trait]
impl DraftStore for UnreachableStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("unreachable"))
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        Err(ApiError::internal("unreachable"))
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Err(ApiError::internal("unreachable"))
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Err(ApiError::internal("unreachable"))
    }
}

#[tokio::test]
async fn a_namespace_is_returned_at_once_or_not_at_all() {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let sign = |tenant: &str| {
        let signed = signer.sign(Namespace {
            tenant: tenant.into(),
            model: "model".into(),
            tokenizer: "tokenizer".into(),
        });
        (signed.namespace.id(), signed)
    };
    let metrics = ReplicaMetrics::register(Metrics::new().unwrap().registry()).unwrap();
    let replica = DraftReplica::new(
        ReplicaConfig::default(),
        64,
        Arc::new(UnreachableStore),
        metrics,
    );
    let (first, second) = (sign("first"), sign("second"));
    assert!(replica.try_namespace(first.0, &first.1).is_none());
    let known = replica.namespace(first.0, &first.1);
    replica.namespace(second.0, &second.1);

    let all = replica.registry.namespaces.lock();
    assert!(replica.try_namespace(first.0, &first.1).is_none());
    drop(all);
    // It does not wait for the signature or the index either.
    let (held, index) = (known.signed.lock(), known.write());
    let mut newer = first.1.clone();
    newer.issued_at_s += 1;
    assert!(replica.try_namespace(first.0, &newer).is_some());
    assert_eq!(held.issued_at_s, first.1.issued_at_s);
    drop((held, index));
    assert!(replica.try_namespace(first.0, &newer).is_some());
    assert_eq!(known.signed().issued_at_s, newer.issued_at_s);
    // It is the most recently used one, so another one would be evicted first.
    let order: Vec<NamespaceId> = replica
        .registry
        .namespaces()
        .iter()
        .map(|one| one.id)
        .collect();
    assert_eq!(order, [second.0, first.0]);
}
