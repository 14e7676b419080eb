//! Calls of the replica that must not wait, and what it forgets.

use std::time::Duration;

use refrain_protocol::Namespace;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_rpc::testing::FakeStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

use super::*;
use crate::config::UploaderConfig;
use crate::metrics::UploaderMetrics;

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
        Arc::new(FakeStore::default()),
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

#[tokio::test(start_paused = true)]
async fn an_output_that_was_erased_before_its_upload_is_forgotten() {
    let metrics = Metrics::new().unwrap();
    let store = Arc::new(FakeStore::default());
    store.content().erased.insert(DocumentId(13));
    let replica = DraftReplica::new(
        ReplicaConfig::default(),
        64,
        store.clone(),
        ReplicaMetrics::register(metrics.registry()).unwrap(),
    );
    let uploads = UploaderMetrics::register(metrics.registry()).unwrap();
    let uploader = Uploader::start(UploaderConfig::default(), store, uploads);
    replica.forget_erased_of(&uploader);
    let signed = SignedNamespace::unsigned(Namespace {
        tenant: "tenant".into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    });
    let id = signed.namespace.id();
    let namespace = replica.namespace(id, &signed);
    let [kept, erased] = [12, 13].map(|document| {
        let update = DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: 0,
            tokens: vec![1, 2, 3],
            head: DocumentHead::default(),
            finish: Some(FinishReason::Stop),
        };
        let member = replica.join_group(id, "g", update.document).unwrap();
        namespace.merge((&update).into());
        member.group().merge((&update).into());
        uploader.push(id, &signed, (&update).into());
        (update.document, member)
    });
    assert!(uploader.drain(Duration::from_secs(60)).await);
    let lens = |(document, member): &(DocumentId, GroupMembership)| {
        let of_group = member.group().read().len_of(*document);
        (namespace.read().len_of(*document), of_group)
    };
    assert_eq!(lens(&kept), (Some(3), Some(3)));
    assert_eq!(lens(&erased), (None, None));
}
