//! Acceptance statistics: kept with the namespace, sent to all of its workers, gone when it is erased.

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::chances::ChancesRequest;
use refrain_rpc::{HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;
use refrain_speculation::{Calibration, NodeFeatures, Scope, Source};

use super::*;

fn node(position: u32, share: f32) -> NodeFeatures {
    NodeFeatures {
        source: Source::Suffix,
        scope: Scope::Tenant,
        match_len: 1 + position * 3,
        position,
        count: 2,
        share,
    }
}

/// Observes nodes of so many positions and all shares, accepted by parity.
fn learn(calibration: &mut Calibration, positions: u32) {
    for position in 1..=positions {
        for share in 0..10 {
            let node = node(position, 0.05 + share as f32 / 10.0);
            for _ in 0..20 {
                calibration.learn(&node, position % 2 == 0);
            }
        }
    }
}

/// Reports what was observed to a store, and adopts the tables that it returns.
async fn exchange(client: &dyn DraftStore, namespace: SignedNamespace, with: &mut Calibration) {
    let observed = with.take_observed();
    let request = ChancesRequest {
        namespace,
        observed: match observed.is_empty() {
            true => Vec::new(),
            false => observed.to_bytes(),
        },
    };
    let tables = client.chances(request).await.unwrap().tables;
    if !tables.is_empty() {
        with.rebase(Calibration::from_bytes(&tables).unwrap());
    }
}

/// The chance of a node that a new worker expects once it has asked the store.
async fn chance(store: &Store, tenant: &str, node: &NodeFeatures) -> f32 {
    let mut calibration = Calibration::new();
    exchange(&store.handle(), store.sign(tenant), &mut calibration).await;
    calibration.chance(node)
}

#[tokio::test]
async fn acceptance_statistics_are_shared_and_survive_a_restart_in_their_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let likely = node(4, 0.5);
    assert_eq!(chance(&store, "a", &likely).await, 0.5);
    let (mut one, mut other) = (Calibration::new(), Calibration::new());
    // Enough for more than one record.
    learn(&mut one, 100);
    learn(&mut other, 3);
    exchange(&store.handle(), store.sign("a"), &mut one).await;
    exchange(&store.handle(), store.sign("a"), &mut other).await;
    let known = other.chance(&likely);
    assert!(known > 0.8, "{known}");
    assert_eq!(chance(&store, "a", &likely).await, known);
    assert_eq!(chance(&store, "b", &likely).await, 0.5);
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(chance(&store, "a", &likely).await, known);
    // Observations are added to what was kept before the restart.
    let mut third = Calibration::new();
    learn(&mut third, 5);
    exchange(&store.handle(), store.sign("a"), &mut third).await;
    let unlikely = node(3, 0.5);
    assert!(third.chance(&unlikely) < 0.2);
    assert!(store.handle().verify().await.unwrap().damaged == 0);
    store.stop().await;
}

/// Nobody can tell which counts came from a session or an hour, so every erasure of a tenant takes all of its counts.
#[tokio::test]
async fn an_erasure_removes_the_statistics_of_every_namespace_that_it_may_hit() {
    let of = |tenant: &str| EraseRequest {
        tenant: Some(tenant.into()),
        ..EraseRequest::default()
    };
    let cases = [
        ("a tenant", of("a"), false),
        (
            "a session of his, which was never heard of",
            EraseRequest {
                session: Some("s".into()),
                ..of("a")
            },
            false,
        ),
        (
            "a time of his, long past",
            EraseRequest {
                until_ms: Some(1),
                ..of("a")
            },
            false,
        ),
        (
            "another model of his",
            EraseRequest {
                model: Some("another".into()),
                ..of("a")
            },
            true,
        ),
        ("another tenant", of("c"), true),
        (
            "a session of another tenant",
            EraseRequest {
                session: Some("s".into()),
                ..of("c")
            },
            true,
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::start(config(dir.path())).await;
    let likely = node(4, 0.5);
    let tell = async |store: &Store, tenant: &str| {
        let mut calibration = Calibration::new();
        learn(&mut calibration, 10);
        exchange(&store.handle(), store.sign(tenant), &mut calibration).await;
        chance(store, tenant, &likely).await
    };
    let theirs = tell(&store, "b").await;
    assert!(theirs > 0.8);
    for (what, request, stays) in cases {
        let ours = tell(&store, "a").await;
        store.handle().erase(request).await.unwrap();
        for _ in 0..2 {
            let left = chance(&store, "a", &likely).await;
            assert_eq!(left, if stays { ours } else { 0.5 }, "{what}");
            assert_eq!(chance(&store, "b", &likely).await, theirs, "{what}");
            store.stop().await;
            store = Store::start(config(dir.path())).await;
        }
    }
    tell(&store, "a").await;
    let everybody = EraseRequest {
        until_ms: Some(1),
        ..EraseRequest::default()
    };
    store.handle().erase(everybody).await.unwrap();
    for tenant in ["a", "b"] {
        assert_eq!(chance(&store, tenant, &likely).await, 0.5);
    }
    store.stop().await;
}

#[tokio::test]
async fn acceptance_statistics_are_salvaged_from_a_damaged_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let likely = node(4, 0.5);
    let mut calibration = Calibration::new();
    learn(&mut calibration, 60);
    exchange(&store.handle(), store.sign("a"), &mut calibration).await;
    store.stop().await;
    spoil_log(dir.path(), 5);
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 1.0);
    let known = chance(&store, "a", &likely).await;
    assert_eq!(known, calibration.chance(&likely));
    assert!(known > 0.8);
    store.stop().await;
}

#[tokio::test]
async fn invalid_or_unsigned_observations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let ask = |namespace, observed| {
        let handle = store.handle();
        async move {
            let request = ChancesRequest {
                namespace,
                observed,
            };
            handle.chances(request).await.map_err(|error| error.kind)
        }
    };
    let mut calibration = Calibration::new();
    learn(&mut calibration, 2);
    let tables = calibration.to_bytes();
    let observed = calibration.take_observed().to_bytes();
    for wrong in [b"nonsense".to_vec(), tables, observed[1..].to_vec()] {
        let refused = ask(store.sign("a"), wrong).await;
        assert_eq!(refused, Err(ErrorKind::InvalidRequest));
    }
    let refused = ask(store.sign("a"), vec![0; 1 << 20]).await;
    assert_eq!(refused, Err(ErrorKind::TooLarge));
    let mut forged = store.sign("a");
    forged.namespace.tenant = "b".into();
    assert!(ask(forged, observed.clone()).await.is_err());
    assert_eq!(
        ask(store.sign("b"), Vec::new())
            .await
            .map(|of| of.tables.len()),
        Ok(0)
    );
    store.stop().await;
}

#[tokio::test]
async fn the_same_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        ..config(dir.path())
    })
    .await;
    let url = format!("http://{}", store.server.addr().unwrap());
    let client = MeshClient::new(&url, &store.mesh.secret, Duration::from_secs(5)).unwrap();
    let client = HttpDraftStore::new(client);
    let mut calibration = Calibration::new();
    learn(&mut calibration, 10);
    exchange(&client, store.sign("a"), &mut calibration).await;
    let likely = node(4, 0.5);
    assert_eq!(
        chance(&store, "a", &likely).await,
        calibration.chance(&likely)
    );
    store.stop().await;
}
