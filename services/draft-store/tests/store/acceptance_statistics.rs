//! Acceptance statistics: kept with the namespace, given to all of its workers, gone when it is erased.

use std::sync::Arc;

use refrain_protocol::ErrorKind;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::error::code;
use refrain_rpc::{HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;
use refrain_speculation::draft::{Candidate, DraftNode, Origin, Scope, Source};
use refrain_speculation::statistics::AcceptanceStatistics;

use super::*;

/// A chain of tokens that stands after a match of this length, each of which has this share.
fn chain_of((source, scope): (Source, Scope), match_len: u32, share: f32, len: u32) -> Candidate {
    let nodes = (0..len).map(|at| DraftNode {
        token: at,
        parent: at.checked_sub(1),
        probability: share.powi(at as i32 + 1),
        count: (1 << ((match_len + (10.0 * share) as u32) % 8)) / 2,
        match_len,
        witnesses: None,
        origin: Origin {
            source,
            scope,
            place: None,
        },
    });
    Candidate::new(nodes.collect(), match_len, source, scope).unwrap()
}

fn chain(match_len: u32, share: f32, len: u32) -> Candidate {
    chain_of((Source::Suffix, Scope::Tenant), match_len, share, len)
}

/// The draft of which the tests ask how likely it is.
fn likely() -> Candidate {
    chain(13, 0.5, 1)
}

/// Observes chains of so many tokens of all kinds, with all shares and many lengths of matches, all accepted
/// to their end. Those of a head are accepted as well.
fn learn(statistics: &mut AcceptanceStatistics, len: u32) {
    let found = Scope::ALL.map(|scope| (Source::Suffix, scope));
    let predicted = (Source::Prediction, Scope::Request);
    let kinds = found.into_iter().chain([predicted]);
    for match_len in (1..40).chain([64, 130, 131, 132, 260, 261, 262]) {
        statistics.observe_head(100 * match_len, len, len);
        for share in 0..10 {
            for kind in kinds.clone() {
                let chain = chain_of(kind, match_len, 0.05 + share as f32 / 10.0, len);
                let emitted: Vec<u32> = chain.tree.tokens().chain([1000]).collect();
                for _ in 0..5 {
                    statistics.observe(&chain, &emitted);
                }
            }
        }
    }
}

async fn exchange(
    client: &dyn DraftStore,
    namespace: SignedNamespace,
    table: u64,
    statistics: Vec<u8>,
) -> Result<AcceptanceStatsReply, ApiError> {
    let request = AcceptanceStatsRequest {
        namespace,
        table,
        statistics,
    };
    client.acceptance_stats(request).await
}

/// Saves statistics that continue a table. Returns the table.
async fn save(
    client: &dyn DraftStore,
    namespace: SignedNamespace,
    table: u64,
    statistics: &AcceptanceStatistics,
) -> u64 {
    let reply = exchange(client, namespace, table, statistics.to_bytes()).await;
    reply.unwrap().table
}

/// The probability of the likely draft that a new worker expects once it has asked the store.
async fn probability(store: &Store, tenant: &str) -> f32 {
    let reply = exchange(&store.handle(), store.sign(tenant), 0, Vec::new()).await;
    let bytes = reply.unwrap().statistics;
    let statistics = match bytes.is_empty() {
        true => AcceptanceStatistics::default(),
        false => AcceptanceStatistics::from_bytes(&bytes).unwrap(),
    };
    statistics.path_probabilities(&likely())[0]
}

#[tokio::test]
async fn acceptance_statistics_survive_a_restart_in_their_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    assert_eq!(probability(&store, "a").await, 0.5);
    let mut learnt = AcceptanceStatistics::default();
    // Enough for more than one record.
    learn(&mut learnt, 20);
    let bytes = learnt.to_bytes().len();
    assert!(bytes > 3_584, "{bytes}");
    let table = save(&store.handle(), store.sign("a"), 0, &learnt).await;
    let known = probability(&store, "a").await;
    assert!(known > 0.8, "{known}");
    assert_eq!(probability(&store, "b").await, 0.5);
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(probability(&store, "a").await, known);
    // A worker goes on with what it knows, and all later ones begin there.
    for _ in 0..500 {
        learnt.observe(&likely(), &[1000]);
    }
    assert_eq!(
        save(&store.handle(), store.sign("a"), table, &learnt).await,
        table
    );
    assert!(probability(&store, "a").await < 0.5);
    assert!(store.handle().verify().await.unwrap().damaged == 0);
    store.stop().await;
}

#[tokio::test]
async fn a_worker_does_not_bring_back_erased_statistics() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let mut learnt = AcceptanceStatistics::default();
    learn(&mut learnt, 5);
    let table = save(&store.handle(), store.sign("a"), 0, &learnt).await;
    let everything = EraseRequest {
        tenant: Some("a".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(everything).await.unwrap();
    let again = exchange(&store.handle(), store.sign("a"), table, learnt.to_bytes()).await;
    let refused = again.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    assert!(refused.has_code(code::STATISTICS_ERASED));
    assert_eq!(probability(&store, "a").await, 0.5);
    store.stop().await;
}

/// It is unknown which counts came from a session or an hour, so every erasure of a tenant takes all of its counts.
#[tokio::test]
async fn an_erasure_removes_the_statistics_of_every_namespace_that_it_may_hit() {
    let of = |tenant: &str| EraseRequest {
        tenant: Some(tenant.into()),
        ..EraseRequest::default()
    };
    let cases = [
        ("a tenant", of("a"), false),
        (
            "a session of the tenant that never was",
            EraseRequest {
                session: Some("s".into()),
                ..of("a")
            },
            false,
        ),
        (
            "a time of the tenant that is long past",
            EraseRequest {
                until_ms: Some(1),
                ..of("a")
            },
            false,
        ),
        (
            "another model of the tenant",
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
    let tell = async |store: &Store, tenant: &str| {
        let mut learnt = AcceptanceStatistics::default();
        learn(&mut learnt, 10);
        save(&store.handle(), store.sign(tenant), 0, &learnt).await;
        probability(store, tenant).await
    };
    let theirs = tell(&store, "b").await;
    assert!(theirs > 0.8);
    for (what, request, stays) in cases {
        let ours = tell(&store, "a").await;
        store.handle().erase(request).await.unwrap();
        for _ in 0..2 {
            let left = probability(&store, "a").await;
            assert_eq!(left, if stays { ours } else { 0.5 }, "{what}");
            assert_eq!(probability(&store, "b").await, theirs, "{what}");
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
        assert_eq!(probability(&store, tenant).await, 0.5);
    }
    store.stop().await;
}

#[tokio::test]
async fn acceptance_statistics_are_salvaged_from_a_damaged_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let mut learnt = AcceptanceStatistics::default();
    learn(&mut learnt, 20);
    save(&store.handle(), store.sign("a"), 0, &learnt).await;
    store.stop().await;
    spoil_log(dir.path(), 5);
    let store = Store::start(config(dir.path())).await;
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 1.0);
    let known = probability(&store, "a").await;
    assert!(
        (known - learnt.path_probabilities(&likely())[0]).abs() < 1e-3,
        "{known}"
    );
    assert!(known > 0.8);
    store.stop().await;
}

#[tokio::test]
async fn invalid_or_unsigned_statistics_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let ask = async |namespace, statistics| {
        let reply = exchange(&store.handle(), namespace, 0, statistics).await;
        reply.map_err(|error| error.kind)
    };
    let mut learnt = AcceptanceStatistics::default();
    learn(&mut learnt, 2);
    let bytes = learnt.to_bytes();
    for wrong in [b"nonsense".to_vec(), bytes[1..].to_vec()] {
        let refused = ask(store.sign("a"), wrong).await;
        assert_eq!(refused, Err(ErrorKind::InvalidRequest));
    }
    let refused = ask(store.sign("a"), vec![0; 1 << 20]).await;
    assert_eq!(refused, Err(ErrorKind::TooLarge));
    let mut forged = store.sign("a");
    Arc::make_mut(&mut forged.namespace).tenant = "b".into();
    assert!(ask(forged, bytes).await.is_err());
    let nothing = ask(store.sign("b"), Vec::new()).await;
    assert_eq!(nothing, Ok(AcceptanceStatsReply::default()));
    store.stop().await;
}

#[tokio::test]
async fn acceptance_statistics_travel_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(DraftStoreConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        ..config(dir.path())
    })
    .await;
    let url = format!("http://{}", store.server.addr().unwrap());
    let client = MeshClient::new(&url, &store.mesh.secret, PATIENCE).unwrap();
    let client = HttpDraftStore::new(client);
    let mut learnt = AcceptanceStatistics::default();
    learn(&mut learnt, 10);
    let table = save(&client, store.sign("a"), 0, &learnt).await;
    let reply = exchange(&client, store.sign("a"), 0, Vec::new())
        .await
        .unwrap();
    assert_eq!((reply.table, reply.statistics), (table, learnt.to_bytes()));
    store.stop().await;
}
