//! Usage: rows of gateways, merged, kept, read page by page and erased.

use refrain_protocol::usage::{
    EraseUsageRequest, RecordUsageReply, RecordUsageRequest, Spender, UsageCounts, UsageErasure,
    UsageRow, UsageRowId, UsageRowsRequest, UsageTotal, hour_of,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{StoreAdmin as _, UsageStore as _};
use refrain_service_kit::clock::unix_s;

use super::*;

fn row(hours_ago: u32, tenant: &str, key: &str, gateway: u128, tokens: u64) -> UsageRow {
    UsageRow {
        id: UsageRowId {
            hour: hour_of(unix_s()) - hours_ago,
            tenant: tenant.into(),
            key: key.into(),
            model: "m".into(),
            gateway,
        },
        total: UsageTotal {
            began_ms: 1_000,
            counts: UsageCounts {
                requests: 1,
                output_tokens: tokens,
                ..UsageCounts::default()
            },
        },
    }
}

async fn record(store: &Store, rows: Vec<UsageRow>) -> Result<RecordUsageReply, ApiError> {
    let request = RecordUsageRequest {
        gateway: 1,
        rows,
        ..RecordUsageRequest::default()
    };
    store.handle().record_usage(request).await
}

/// All rows of a tenant, or of everybody, by pages of two.
async fn rows(store: &Store, tenant: Option<&str>) -> Vec<UsageRow> {
    let mut request = UsageRowsRequest {
        until_hour: u32::MAX,
        tenant: tenant.map(str::to_owned),
        rows_max: 2,
        ..UsageRowsRequest::default()
    };
    let mut all = Vec::new();
    loop {
        let page = store.handle().usage_rows(request.clone()).await.unwrap();
        assert!(page.rows.len() <= 2);
        all.extend(page.rows);
        let Some(next) = page.next else { return all };
        request.after = Some(next);
    }
}

#[tokio::test]
async fn rows_are_merged_by_their_greatest_values_and_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let (first, later) = (row(0, "a", "k", 1, 10), row(0, "a", "k", 1, 25));
    let others = [
        row(0, "a", "k", 2, 7),
        row(1, "b", "", 1, 3),
        row(2, "a", "l", 1, 9),
    ];
    record(&store, vec![first.clone()]).await.unwrap();
    record(&store, vec![later.clone(), others[0].clone()])
        .await
        .unwrap();
    // Late and repeated messages change nothing.
    record(&store, vec![first, others[1].clone(), later.clone()])
        .await
        .unwrap();
    record(&store, vec![others[2].clone()]).await.unwrap();
    let mut expected = vec![later];
    expected.extend(others);
    expected.sort_by(|left, right| left.id.cmp(&right.id));
    assert_eq!(rows(&store, None).await, expected);
    assert_eq!(rows(&store, Some("b")).await.len(), 1);
    assert!(store.handle().verify().await.unwrap().damaged == 0);
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(rows(&store, None).await, expected);
    store.handle().compact().await.unwrap();
    assert_eq!(rows(&store, None).await, expected);
    assert_eq!(store.metric("refrain_draft_store_usage_rows"), 4.0);
    store.stop().await;
}

#[tokio::test]
async fn a_gateway_is_told_what_others_have_counted_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::start(config(dir.path())).await;
    let sent = vec![
        row(0, "a", "k", 1, 10),
        row(0, "a", "l", 2, 30),
        row(0, "a", "k", 2, 5),
    ];
    let hour = sent[0].id.hour;
    record(&store, sent).await.unwrap();
    record(&store, vec![row(0, "a", "k", 2, 6)]).await.unwrap();
    for _ in 0..2 {
        let spender = |key: Option<&str>| Spender {
            tenant: "a".into(),
            key: key.map(str::to_owned),
        };
        let request = RecordUsageRequest {
            gateway: 1,
            spenders: vec![spender(None), spender(Some("k")), spender(Some("x"))],
            day: refrain_protocol::usage::Period::Day.number(hour),
            month: refrain_protocol::usage::Period::Month.number(hour),
            ..RecordUsageRequest::default()
        };
        let spent = store.handle().record_usage(request).await.unwrap().spent;
        let tokens = spent
            .iter()
            .map(|of| of.iter().map(|one| one.day_tokens).sum::<u64>());
        assert_eq!(tokens.collect::<Vec<_>>(), [36, 6, 0]);
        assert_eq!(spent[0][0].gateway, 2);
        assert_eq!(spent[0][0].month_tokens, 36);
        store.stop().await;
        store = Store::start(config(dir.path())).await;
    }
}

#[tokio::test]
async fn rows_leave_when_they_are_too_old_and_are_refused_past_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let config = DraftStoreConfig {
        usage_retention_days: 2,
        usage_rows_max: 3,
        ..config(dir.path())
    };
    let store = Store::start(config.clone()).await;
    record(
        &store,
        vec![row(47, "a", "k", 1, 1), row(49, "a", "k", 1, 1)],
    )
    .await
    .unwrap();
    assert_eq!(
        rows(&store, None).await.len(),
        1,
        "one was too old when it came"
    );
    let three = vec![
        row(1, "a", "k", 1, 1),
        row(2, "a", "k", 1, 1),
        row(3, "a", "k", 1, 1),
    ];
    let error = record(&store, three).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert_eq!(rows(&store, None).await.len(), 3);
    // Known rows may still grow.
    record(&store, vec![row(1, "a", "k", 1, 2)]).await.unwrap();
    store.stop().await;
    // A shorter retention removes what is older.
    let old = Store::start(DraftStoreConfig {
        usage_rows_max: 10,
        usage_retention_days: 400,
        ..config.clone()
    })
    .await;
    record(&old, vec![row(60, "a", "k", 1, 1)]).await.unwrap();
    assert_eq!(rows(&old, None).await.len(), 4);
    old.stop().await;
    let store = Store::start(config).await;
    eventually(async || rows(&store, None).await.len() == 3).await;
    assert_eq!(store.metric("refrain_draft_store_usage_rows"), 3.0);
    store.stop().await;
}

#[tokio::test]
async fn erased_usage_is_gone_from_all_files_and_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let planted = "planted-key-of-acme";
    let sent = vec![
        row(0, "acme", planted, 1, 10),
        row(5, "acme", planted, 1, 4),
        row(0, "bolt", "k", 1, 8),
    ];
    record(&store, sent.clone()).await.unwrap();
    assert!(holds(&dir.path().join("data"), planted));
    let request = EraseUsageRequest {
        tenant: "acme".into(),
    };
    let reply = store.handle().erase_usage(request.clone()).await.unwrap();
    assert_eq!(reply.rows, 2);
    assert!(!holds(&dir.path().join("data"), planted));
    // The gateway does not know yet. Then it learns, and what it counts from then on is kept.
    let answer = record(&store, sent).await.unwrap();
    let erasure = UsageErasure {
        tenant: "acme".into(),
        at_ms: reply.erased_at_ms,
    };
    assert_eq!(answer.erasures, [erasure]);
    assert_eq!(rows(&store, Some("acme")).await, []);
    let mut anew = row(0, "acme", "k", 1, 3);
    anew.total.began_ms = reply.erased_at_ms + 1;
    record(&store, vec![anew.clone()]).await.unwrap();
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    record(&store, vec![row(0, "acme", "k", 1, 900)])
        .await
        .unwrap();
    assert_eq!(rows(&store, Some("acme")).await, [anew]);
    assert_eq!(rows(&store, None).await.len(), 2);
    let again = store.handle().erase_usage(request).await.unwrap();
    assert_eq!(again.rows, 1);
    store.stop().await;
}

/// Whether any file below a folder has a text.
fn holds(dir: &Path, text: &str) -> bool {
    std::fs::read_dir(dir).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return holds(&path, text);
        }
        let bytes = std::fs::read(&path).unwrap_or_default();
        let text = text.as_bytes();
        bytes.windows(text.len()).any(|window| window == text)
    })
}

#[tokio::test]
async fn names_that_cannot_be_stored_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    for (tenant, key) in [("a\0b", "k"), ("a", "k\0"), (&*"x".repeat(513), "k")] {
        let error = record(&store, vec![row(0, tenant, key, 1, 1)])
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{error}");
    }
    let too_many = vec![row(0, "a", "k", 1, 1); 5_000];
    assert_eq!(
        record(&store, too_many).await.unwrap_err().kind,
        ErrorKind::TooLarge
    );
    store.stop().await;
}
