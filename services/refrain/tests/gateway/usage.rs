//! Usage for bills, and budgets per day and month.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_accounts::tenants::file::{KeyEntry, LimitsEntry, TenantEntry, TenantsFile};
use refrain_accounts::tenants::key::NewKey;
use refrain_gateway::GatewayConfig;
use refrain_protocol::ErrorKind;
use refrain_protocol::usage::{SpentTokens, UsageCounts, UsageErasure};
use refrain_rpc::testing::FakeTenants;
use refrain_service_kit::clock::unix_ms;
use serde_json::{Value, json};

use crate::admin::with_operator;
use crate::mesh::{Bench, Mishap, chat, config, eventually};
use crate::usage_store::FakeUsage;

const CHAT: &str = "/v1/chat/completions";

fn kept(dir: &Path) -> GatewayConfig {
    GatewayConfig {
        usage_dir: Some(dir.join("usage")),
        ..config()
    }
}

/// A file with the tenant `acme` and one key, which is returned with its id.
fn tenants(
    dir: &Path,
    limits: LimitsEntry,
    key_limits: LimitsEntry,
) -> (GatewayConfig, String, String) {
    let key = NewKey::random().unwrap();
    let file = TenantsFile {
        tenants: vec![TenantEntry {
            limits,
            keys: vec![KeyEntry {
                name: "ci".into(),
                id: key.id.clone(),
                sha256: key.sha256,
                limits: key_limits,
                ..KeyEntry::default()
            }],
            ..TenantEntry::named("acme".parse().unwrap())
        }],
    };
    let path = dir.join("tenants.toml");
    std::fs::write(&path, file.to_text().unwrap()).unwrap();
    let config = GatewayConfig {
        tenants_file: Some(path),
        ..kept(dir)
    };
    (config, key.key, key.id)
}

async fn send(bench: &Bench, key: &str, fields: Value) -> reqwest::Response {
    let url = format!("{}{CHAT}", bench.url);
    let request = bench.client.post(url).bearer_auth(key);
    request.json(&chat(fields)).send().await.unwrap()
}

#[tokio::test]
async fn requests_are_counted_as_their_answers_say_and_by_key() {
    let dir = tempfile::tempdir().unwrap();
    let (config, key, id) = tenants(dir.path(), LimitsEntry::default(), LimitsEntry::default());
    let bench = Bench::with(config).await;
    let mut expected = UsageCounts::default();
    for n in [1, 3] {
        let response = send(&bench, &key, json!({"n": n})).await;
        let body: Value = response.json().await.unwrap();
        let usage = &body["usage"];
        let drafts = &body["metrics"]["speculative_decoding"];
        expected = expected.plus(UsageCounts {
            requests: 1,
            input_tokens: usage["prompt_tokens"].as_u64().unwrap(),
            cached_input_tokens: usage["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .unwrap(),
            output_tokens: usage["completion_tokens"].as_u64().unwrap(),
            reasoning_tokens: 0,
            verified_draft_tokens: drafts["drafted"].as_u64().unwrap(),
            accepted_draft_tokens: drafts["accepted"].as_u64().unwrap(),
        });
    }
    assert!(expected.output_tokens > 30, "{expected:?}");
    let usage = &bench.mesh.usage;
    assert_eq!(
        usage.until("acme", |counts| counts.requests == 2).await,
        expected
    );
    // A request that is refused costs nothing. Callers without a public key are counted apart.
    assert_eq!(
        send(&bench, &key, json!({"temperature": -5}))
            .await
            .status(),
        400
    );
    assert_eq!(bench.chat(json!({})).await.0, 200);
    usage.until("acme", |counts| counts.requests == 3).await;
    let rows = usage.rows.lock().unwrap();
    let keys: Vec<&str> = rows.keys().map(|id| &*id.key).collect();
    assert!(keys.contains(&"") && keys.contains(&&*id), "{keys:?}");
    assert!(rows.keys().all(|row| row.model == "tiny"));
}

#[tokio::test]
async fn a_request_whose_client_leaves_or_that_fails_is_counted_for_what_was_made() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::with(kept(dir.path())).await;
    bench.mesh.script().step_pause = Duration::from_millis(300);
    let mut response = bench
        .post(CHAT, &chat(json!({"stream": true})))
        .send()
        .await
        .unwrap();
    for _ in 0..3 {
        response.chunk().await.unwrap();
    }
    drop(response);
    bench.mesh.settled().await;
    let usage = &bench.mesh.usage;
    let left = usage.until("acme", |counts| counts.requests == 1).await;
    assert!(left.output_tokens >= 3 && left.input_tokens > 0, "{left:?}");
    assert!(
        left.output_tokens < bench.mesh.script().reply.len() as u64,
        "{left:?}"
    );
    // One that fails for good after some steps.
    for lease in 1..20 {
        bench
            .mesh
            .mishap(lease, Mishap::Fail(2, ErrorKind::InvalidRequest));
    }
    bench.mesh.script().step_pause = Duration::ZERO;
    let (status, _) = bench.chat(json!({})).await;
    assert_ne!(status, 200);
    let failed = usage
        .until("acme", |counts| counts.requests == 2)
        .await
        .minus(left);
    assert!(failed.output_tokens >= 3, "{failed:?}");
}

#[tokio::test]
async fn usage_waits_for_a_store_that_is_away_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let first = Bench::with(kept(dir.path())).await;
    first.mesh.usage.is_away.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(first.chat(json!({})).await.0, 200);
    }
    first.mesh.usage.next_calls().await;
    // The gauge is set once a second.
    eventually("rows of usage wait", async || {
        first.metric("refrain_gateway_usage_unsent_rows") >= 1.0
    })
    .await;
    assert!(first.metric("refrain_gateway_usage_sends_total{outcome=\"failed\"}") >= 1.0);
    assert_eq!(first.mesh.usage.of("acme").requests, 0);
    first.gateway.drain(Duration::from_secs(5)).await;
    let second = Bench::with(kept(dir.path())).await;
    assert_eq!(second.chat(json!({})).await.0, 200);
    let usage = &second.mesh.usage;
    usage.until("acme", |counts| counts.requests == 3).await;
    // It is the same gateway.
    let rows = usage.rows.lock().unwrap();
    let mut gateways: Vec<u128> = rows.keys().map(|id| id.gateway).collect();
    gateways.dedup();
    assert_eq!(gateways.len(), 1);
}

#[tokio::test]
async fn a_tenant_whose_budget_is_spent_gets_a_quota_error_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let limits = LimitsEntry {
        tokens_per_month: Some(100),
        ..LimitsEntry::default()
    };
    let (config, key, _) = tenants(dir.path(), limits, LimitsEntry::default());
    let bench = Bench::with(config.clone()).await;
    let fields = || json!({"max_tokens": 40});
    let mut answers = 0;
    let refused = loop {
        let response = send(&bench, &key, fields()).await;
        if response.status() != 200 {
            break response;
        }
        answers += 1;
        assert!(answers < 20);
    };
    assert!(answers >= 1);
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["x-should-retry"], "false");
    assert!(!refused.headers().contains_key("retry-after"));
    let body: Value = refused.json().await.unwrap();
    assert_eq!(body["error"]["code"], "insufficient_quota");
    assert_eq!(body["error"]["type"], "insufficient_quota");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("100 tokens per month"), "{message}");
    bench.gateway.drain(Duration::from_secs(5)).await;
    let again = Bench::with(config).await;
    assert_eq!(send(&again, &key, fields()).await.status(), 429);
    let refused = again.metric("refrain_gateway_rejections_total{limit=\"tokens_per_month\"}");
    assert_eq!(refused, 1.0);
}

fn spent_elsewhere(tokens: u64) -> SpentTokens {
    SpentTokens {
        gateway: 7,
        day_tokens: tokens,
        month_tokens: tokens,
    }
}

fn daily(tokens: u64) -> LimitsEntry {
    LimitsEntry {
        tokens_per_day: Some(tokens),
        ..LimitsEntry::default()
    }
}

/// The folder of a gateway is lost with its machine, and what it had counted is that of another gateway now.
#[tokio::test]
async fn a_spent_budget_stays_spent_at_a_gateway_that_starts_without_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let (config, key, _) = tenants(dir.path(), daily(4_000), LimitsEntry::default());
    let usage = FakeUsage::default();
    *usage.others.lock().unwrap() = vec![spent_elsewhere(4_000)];
    let bench = Bench::beside(config, FakeTenants::default(), usage);
    let bench = bench.await.unwrap();
    let first = futures_util::future::join_all((0..20).map(|_| send(&bench, &key, json!({}))));
    let first = first.await;
    assert!(first.iter().all(|answer| answer.status() != 200));
    eventually("the budget is spent", async || {
        let status = send(&bench, &key, json!({})).await.status().as_u16();
        assert!([429, 503].contains(&status), "{status}");
        status == 429
    })
    .await;
    assert_eq!(bench.mesh.usage.of("acme").requests, 0);
}

#[tokio::test]
async fn while_the_store_is_away_tenants_with_budgets_wait_and_others_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, key, _) = tenants(dir.path(), LimitsEntry::default(), daily(10_000));
    config.tuning.usage_wait = Duration::MAX;
    let usage = FakeUsage::default();
    usage.is_away.store(true, Ordering::SeqCst);
    let bench = Bench::beside(config, FakeTenants::default(), usage);
    let bench = bench.await.unwrap();
    let ready = async || {
        let answer = reqwest::get(format!("{}/readyz", bench.url)).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let (status, reason) = ready().await;
    assert_eq!(status, 503);
    assert!(reason.contains("budgets"), "{reason}");
    assert_eq!(bench.chat(json!({})).await.0, 200);
    let refused = send(&bench, &key, json!({})).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    let body: Value = refused.json().await.unwrap();
    assert_eq!(body["error"]["code"], "usage_unknown");
    let refusals = bench.metric("refrain_gateway_rejections_total{limit=\"usage_unknown\"}");
    assert_eq!(refusals, 1.0);
    bench.mesh.usage.is_away.store(false, Ordering::SeqCst);
    eventually("the budget is known", async || {
        send(&bench, &key, json!({})).await.status() == 200
    })
    .await;
    assert_eq!(ready().await.0, 200);
}

/// A write to `/dev/full` gets the answer of a full disk.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_gateway_starts_on_a_full_disk_and_writes_once_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let first = Bench::with(kept(dir.path())).await;
    assert_eq!(first.chat(json!({})).await.0, 200);
    first.gateway.drain(Duration::from_secs(60)).await;
    let new = dir.path().join("usage/journal.new");
    std::os::unix::fs::symlink("/dev/full", &new).unwrap();
    let second = Bench::with(kept(dir.path())).await;
    assert_eq!(second.chat(json!({})).await.0, 200);
    let usage = second.mesh.usage.clone();
    usage.until("acme", |counts| counts.requests == 2).await;
    assert!(second.metric("refrain_gateway_usage_write_failures_total") >= 1.0);
    std::fs::remove_file(&new).unwrap();
    while second.metric("refrain_gateway_usage_journal_bytes") == 0.0 {
        usage.next_calls().await;
    }
    second.gateway.drain(Duration::from_secs(60)).await;
    let third = Bench::with(kept(dir.path())).await;
    let usage = &third.mesh.usage;
    usage.until("acme", |counts| counts.requests == 2).await;
}

#[tokio::test]
async fn what_other_gateways_have_counted_is_part_of_a_budget() {
    let dir = tempfile::tempdir().unwrap();
    let of_key = LimitsEntry {
        tokens_per_day: Some(10_000),
        ..LimitsEntry::default()
    };
    let (config, key, _) = tenants(dir.path(), LimitsEntry::default(), of_key);
    let bench = Bench::with(config).await;
    assert_eq!(send(&bench, &key, json!({})).await.status(), 200);
    *bench.mesh.usage.others.lock().unwrap() = vec![spent_elsewhere(9_990)];
    bench.mesh.usage.next_calls().await;
    assert_eq!(send(&bench, &key, json!({})).await.status(), 429);
    // The tenant's other callers have no budget.
    assert_eq!(bench.chat(json!({})).await.0, 200);
}

#[tokio::test]
async fn operators_read_usage_and_erased_usage_does_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = kept(dir.path());
    let (config, token) = with_operator(dir.path(), config);
    let bench = Bench::with(config.clone()).await;
    assert_eq!(bench.chat(json!({})).await.0, 200);
    let usage = bench.mesh.usage.clone();
    let counts = usage.until("acme", |counts| counts.requests == 1).await;
    let operations = bench.gateway.operations_addr().unwrap();
    let url = format!("http://{operations}/admin/usage");
    let read = async |query: &str| {
        let request = bench.client.get(format!("{url}{query}"));
        let response = request.bearer_auth(&token).send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json::<Value>().await.unwrap())
    };
    assert_eq!(reqwest::get(&url).await.unwrap().status(), 401);
    let (status, report) = read("?group_by=month,tenant").await;
    assert_eq!(status, 200);
    assert_eq!(report["data"][0]["tenant"], "acme");
    assert_eq!(report["data"][0]["output_tokens"], counts.output_tokens);
    assert_eq!(reqwest::get(&url).await.unwrap().status(), 401, "no token");
    let (status, fault) = read("?group_by=colour").await;
    assert_eq!(
        (status, &fault["error"]["param"]),
        (400, &"group_by".into())
    );
    assert_eq!(
        reqwest::get(format!("{}/admin/usage", bench.url))
            .await
            .unwrap()
            .status(),
        404
    );

    let journal = dir.path().join("usage/journal");
    let names_acme = || {
        let bytes = std::fs::read(&journal).unwrap();
        bytes.windows(4).filter(|window| *window == b"tiny").count()
    };
    assert!(names_acme() >= 1);
    let erasure = UsageErasure {
        tenant: "acme".into(),
        at_ms: unix_ms(),
    };
    usage.rows.lock().unwrap().clear();
    usage.erasures.lock().unwrap().push(erasure);
    usage.next_calls().await;
    assert_eq!(names_acme(), 0, "the rows have gone from the journal");
    assert_eq!(bench.chat(json!({})).await.0, 200);
    let again = usage.until("acme", |counts| counts.requests >= 1).await;
    assert_eq!(again.requests, 1);
    bench.gateway.drain(Duration::from_secs(5)).await;
    let second = Bench::with(config).await;
    second.mesh.usage.next_calls().await;
    assert_eq!(second.mesh.usage.of("acme").requests, 1);
}
