//! Tenants that gateways keep in the store: durable, compared and set, and bounded.

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::ImportRequest;
use refrain_protocol::error::code;
use refrain_protocol::tenants::{TenantChange, TenantRecord, TenantsRequest};
use refrain_rpc::{HttpDraftStore, StoreAdmin as _};
use refrain_service_kit::http::MeshClient;

use super::*;

fn change(name: &str, expected: Option<u64>, entry: Option<&str>) -> TenantChange {
    TenantChange {
        name: name.into(),
        expected,
        entry: entry.map(str::to_owned),
    }
}

async fn put(store: &dyn DraftStore, name: &str, expected: Option<u64>, entry: &str) -> u64 {
    let reply = store
        .change_tenant(change(name, expected, Some(entry)))
        .await;
    reply.unwrap().version
}

async fn all(store: &dyn DraftStore) -> Vec<TenantRecord> {
    let reply = store.tenants(TenantsRequest { known: None }).await;
    reply.unwrap().tenants.unwrap()
}

#[tokio::test]
async fn tenants_survive_a_restart_and_a_rewrite_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let handle = store.handle();
    assert_eq!(all(&handle).await, []);
    // Enough for several records, and then for fewer.
    let long = format!("{{\"a\": \"{}\"}}", "0123456789".repeat(2_000));
    let first = put(&handle, "acme", None, &long).await;
    let bolt = put(&handle, "bolt", None, "{}").await;
    let shorter = format!("{{\"a\": \"{}\"}}", "9876543210".repeat(400));
    let second = put(&handle, "acme", Some(first), &shorter).await;
    assert!(second > bolt && bolt > first);
    let kept = all(&handle).await;
    let names: Vec<&str> = kept.iter().map(|tenant| &*tenant.name).collect();
    assert_eq!(names, ["acme", "bolt"]);
    assert_eq!((kept[0].version, &kept[0].entry), (second, &shorter));
    assert_eq!(store.metric("refrain_draft_store_tenant_records"), 2.0);
    handle.compact().await.unwrap();
    assert_eq!(handle.verify().await.unwrap().damaged, 0);
    store.stop().await;

    let store = Store::start(config(dir.path())).await;
    assert_eq!(all(&store.handle()).await, kept);
    let removal = change("acme", Some(second), None);
    store.handle().change_tenant(removal).await.unwrap();
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(all(&store.handle()).await, kept[1..]);
    store.stop().await;
}

#[tokio::test]
async fn a_change_from_an_old_version_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let handle = store.handle();
    let first = put(&handle, "acme", None, "{}").await;
    let second = put(&handle, "acme", Some(first), "[]").await;
    for late in [
        change("acme", Some(first), Some("1")),
        change("acme", Some(first), None),
        change("acme", None, Some("1")),
        change("bolt", Some(second), Some("1")),
        change("bolt", Some(second), None),
    ] {
        let error = handle.change_tenant(late).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.has_code(code::TENANT_CHANGED));
    }
    let kept = all(&handle).await;
    assert_eq!((kept.len(), &*kept[0].entry), (1, "[]"));
    store.stop().await;
}

#[tokio::test]
async fn a_caller_who_knows_the_tenants_is_sent_none_also_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let config = DraftStoreConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        ..config(dir.path())
    };
    let store = Store::start(config).await;
    let url = format!("http://{}", store.server.addr().unwrap());
    let client = MeshClient::new(&url, &store.mesh.secret, PATIENCE).unwrap();
    let client = HttpDraftStore::new(client);
    let ask = async |known| client.tenants(TenantsRequest { known }).await.unwrap();
    let empty = ask(None).await;
    assert_eq!(empty.tenants, Some(Vec::new()));
    assert_eq!(ask(Some(empty.state)).await.tenants, None);
    let version = put(&client, "acme", None, "{}").await;
    let one = ask(Some(empty.state)).await;
    assert_eq!(one.tenants.unwrap().len(), 1);
    assert_eq!(ask(Some(one.state)).await.tenants, None);
    client
        .change_tenant(change("acme", Some(version), None))
        .await
        .unwrap();
    assert_eq!(ask(Some(one.state)).await.tenants, Some(Vec::new()));
    store.stop().await;
}

#[tokio::test]
async fn there_is_room_for_so_many_tenants_and_an_erasure_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = DraftStoreConfig {
        tuning: StoreTuning {
            tenant_records_max: 1,
            ..tuning()
        },
        ..config(dir.path())
    };
    let store = Store::start(config).await;
    let handle = store.handle();
    let version = put(&handle, "acme", None, "{}").await;
    let error = handle.change_tenant(change("bolt", None, Some("{}"))).await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::TooLarge);
    let rejections = "refrain_draft_store_rejections_total{limit=\"tenant_records_max\"}";
    assert_eq!(store.metric(rejections), 1.0);
    let erase = refrain_protocol::admin::EraseRequest {
        tenant: Some("acme".into()),
        ..Default::default()
    };
    handle.erase(erase).await.unwrap();
    assert_eq!(all(&handle).await[0].version, version);
    for (entry, kind) in [
        ("", ErrorKind::InvalidRequest),
        (&*"x".repeat((1 << 20) + 1), ErrorKind::InvalidRequest),
    ] {
        let refused = handle
            .change_tenant(change("acme", Some(version), Some(entry)))
            .await;
        assert_eq!(refused.unwrap_err().kind, kind);
    }
    store.stop().await;
}

#[tokio::test]
async fn nothing_new_is_stored_under_a_name_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let handle = store.handle();
    for name in ["other", "a\u{1b}b", "acme\u{1f}key:1f", " "] {
        let new = change(name, None, Some("{}"));
        let error = handle.change_tenant(new).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{name:?}");
        // One of earlier times could be removed.
        let removal = change(name, Some(1), None);
        let error = handle.change_tenant(removal).await.unwrap_err();
        assert!(error.has_code(code::TENANT_CHANGED), "{name:?}");
    }
    let import = async |tenant: &str| {
        let request = ImportRequest {
            namespace: Namespace {
                tenant: tenant.into(),
                model: "m".into(),
                tokenizer: "t".into(),
            },
            updates: vec![update(1, 0, &[1, 2, 3])],
            is_static: false,
        };
        handle.import(request).await
    };
    let error = import("none").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    // An export names a part of a tenant in this way.
    import("acme\u{1f}key:1f").await.unwrap();
    store.stop().await;
}
