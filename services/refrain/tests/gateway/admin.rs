//! The admin API, and tenants that the draft store keeps.

use std::path::Path;
use std::time::Duration;

use refrain_accounts::{OperatorConfig, OperatorToken};
use refrain_gateway::GatewayConfig;
use refrain_rpc::testing::FakeTenants;
use reqwest::Method;
use serde_json::{Value, json};

use crate::mesh::{Bench, chat, config, eventually, start_error};

const CHAT: &str = "/v1/chat/completions";

/// A gateway with an operator, whose draft store keeps the tenants.
pub(crate) struct Admin {
    pub(crate) bench: Bench,
    pub(crate) operations: String,
    token: String,
    dir: tempfile::TempDir,
}

pub(crate) fn with_operator(dir: &Path, base: GatewayConfig) -> (GatewayConfig, String) {
    let made = OperatorToken::random().unwrap();
    let config = GatewayConfig {
        operations_listen: Some(([127, 0, 0, 1], 0).into()),
        operators: vec![OperatorConfig {
            name: "ann".into(),
            token_sha256: made.sha256,
            read_only: false,
        }],
        audit_file: Some(dir.join("audit.jsonl")),
        ..base
    };
    (config, made.token)
}

impl Admin {
    async fn new() -> Self {
        let in_store = GatewayConfig {
            tenants_in_store: true,
            ..config()
        };
        Admin::with(in_store, FakeTenants::default()).await
    }

    pub(crate) async fn with(base: GatewayConfig, tenants: FakeTenants) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (config, token) = with_operator(dir.path(), base);
        let bench = Bench::start(config, tenants).await.unwrap();
        let operations = format!("http://{}", bench.gateway.operations_addr().unwrap());
        Admin {
            bench,
            operations,
            token,
            dir,
        }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}/admin/{path}", self.operations);
        self.bench
            .client
            .request(method, url)
            .bearer_auth(&self.token)
    }

    /// A call, its status and its answer.
    pub(crate) async fn call(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let request = self.request(method, path);
        let request = match body.is_null() {
            true => request,
            false => request.json(&body),
        };
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    /// Adds a key of `acme`, and returns its id and the key.
    async fn key(&self, body: Value) -> (String, String) {
        let (status, made) = self.call(Method::POST, "tenants/acme/keys", body).await;
        assert_eq!(status, 201, "{made}");
        let text = |field: &str| made[field].as_str().unwrap().to_owned();
        (text("id"), text("key"))
    }

    async fn status(&self, key: &str) -> u16 {
        let url = format!("{}{CHAT}", self.bench.url);
        let request = self.bench.client.post(url).bearer_auth(key);
        let answer = request.json(&chat(json!({}))).send().await.unwrap();
        answer.status().as_u16()
    }

    async fn until_status(&self, key: &str, wanted: u16) {
        eventually("the key gets the status", async || {
            self.status(key).await == wanted
        })
        .await;
    }

    pub(crate) fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.path().join("audit.jsonl"));
        let text = text.unwrap_or_default();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

#[tokio::test]
async fn a_key_made_over_the_api_opens_what_it_should_until_it_is_revoked() {
    let admin = Admin::new().await;
    let tenant = json!({"name": "acme", "limits": {"requests_per_minute": 600}});
    let (status, made) = admin.call(Method::POST, "tenants", tenant.clone()).await;
    assert_eq!((status, &made["name"]), (201, &json!("acme")));
    let (status, again) = admin.call(Method::POST, "tenants", tenant).await;
    assert_eq!(
        (status, &again["error"]["code"]),
        (409, &json!("tenant_exists"))
    );
    let (id, key) = admin.key(json!({"name": "ci"})).await;
    let scoped = json!({"name": "small", "endpoints": ["completions"]});
    let (_, scoped) = admin.key(scoped).await;
    admin.until_status(&key, 200).await;
    assert_eq!(admin.status(&scoped).await, 403);

    // Nothing shows the key or its hash again.
    for path in ["tenants", "tenants/acme", "tenants/acme/keys"] {
        let (status, shown) = admin.call(Method::GET, path, Value::Null).await;
        let shown = shown.to_string();
        assert_eq!(status, 200);
        assert!(shown.contains(&id) && shown.contains("\"ci\""), "{shown}");
        assert!(
            !shown.contains(&key) && !shown.contains("sha256"),
            "{shown}"
        );
    }
    let rotate = format!("keys/{id}/rotate");
    let (status, rotated) = admin
        .call(Method::POST, &rotate, json!({"grace_hours": 0}))
        .await;
    assert_eq!(status, 201, "{rotated}");
    let successor = rotated["key"].as_str().unwrap();
    admin.until_status(successor, 200).await;
    assert_eq!(admin.status(&key).await, 401);
    let revoke = format!("keys/{}", rotated["id"].as_str().unwrap());
    assert_eq!(
        admin.call(Method::DELETE, &revoke, Value::Null).await.0,
        200
    );
    admin.until_status(successor, 401).await;
    assert_eq!(
        admin.call(Method::DELETE, &revoke, Value::Null).await.0,
        404
    );
    let (status, _) = admin
        .call(Method::DELETE, "tenants/acme", Value::Null)
        .await;
    assert_eq!(status, 200);
    admin.until_status(&scoped, 401).await;
    // Keys of the configuration were never concerned.
    assert_eq!(admin.status("sk-acme").await, 200);

    let audit = admin.audit();
    let begun = audit
        .iter()
        .filter(|line| line["outcome"] == "begun")
        .count();
    let done = audit
        .iter()
        .filter(|line| line["outcome"] == "done")
        .count();
    // One act was refused because the tenant was there, and one because the key was not.
    assert_eq!((audit.len(), begun, done), (16, 8, 6), "{audit:?}");
    assert!(audit.iter().all(|line| line["operator"] == "ann"));
    assert_eq!(audit[0]["act"], "tenant acme added");
    assert!(audit[0]["at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(audit[0]["number"], audit[1]["number"]);
    let all = json!(audit).to_string();
    assert!(all.contains(&id) && !all.contains(&key));
    let metric = |outcome| {
        let name = format!("refrain_gateway_admin_acts_total{{outcome=\"{outcome}\"}}");
        admin.bench.metric(&name)
    };
    assert_eq!((metric("done"), metric("refused")), (6.0, 2.0));
}

#[tokio::test]
async fn no_route_answers_without_the_token_of_an_operator() {
    let admin = Admin::new().await;
    let (_, key) = {
        admin
            .call(Method::POST, "tenants", json!({"name": "acme"}))
            .await;
        admin.key(json!({"name": "ci"})).await
    };
    let audited = admin.audit().len();
    let wrong = OperatorToken::random().unwrap();
    for (method, path) in [
        (Method::GET, "tenants"),
        (Method::POST, "tenants"),
        (Method::GET, "tenants/acme"),
        (Method::PATCH, "tenants/acme"),
        (Method::DELETE, "tenants/acme"),
        (Method::GET, "tenants/acme/keys"),
        (Method::POST, "tenants/acme/keys"),
        (Method::DELETE, "keys/x"),
        (Method::POST, "keys/x/rotate"),
        (Method::GET, "usage"),
        (Method::GET, "figures"),
        (Method::POST, "workers/w0/drain"),
        (Method::DELETE, "workers/w0/drain"),
        (Method::POST, "erasures"),
        (Method::POST, "compactions"),
        (Method::POST, "try"),
        (Method::GET, "anything/else"),
    ] {
        for token in [None, Some(&wrong.token), Some(&wrong.sha256), Some(&key)] {
            let url = format!("{}/admin/{path}", admin.operations);
            let request = admin.bench.client.request(method.clone(), url);
            let request = match token {
                Some(token) => request.bearer_auth(token),
                None => request,
            };
            let answer = request.body("{").send().await.unwrap();
            assert_eq!(answer.status(), 401, "{method} {path}");
            let body: Value = answer.json().await.unwrap();
            assert_eq!(body["error"]["code"], "invalid_operator_token");
        }
        // Clients' listener has none of it.
        let url = format!("{}/admin/{path}", admin.bench.url);
        let request = admin.bench.client.request(method, url);
        let answer = request.bearer_auth(&admin.token).send().await.unwrap();
        assert_eq!(answer.status(), 404);
    }
    assert_eq!(admin.audit().len(), audited);
    admin.until_status(&key, 200).await;
}

#[tokio::test]
async fn two_operators_do_not_overwrite_each_other() {
    let admin = Admin::new().await;
    let (_, made) = admin
        .call(Method::POST, "tenants", json!({"name": "acme"}))
        .await;
    let first = made["version"].as_u64().unwrap();
    let patch = async |limit: u64, tag: Option<String>| {
        let body = json!({"limits": {"requests_in_flight_max": limit}});
        let mut request = admin.request(Method::PATCH, "tenants/acme").json(&body);
        if let Some(tag) = tag {
            request = request.header("if-match", tag);
        }
        let answer = request.send().await.unwrap();
        let tag = answer
            .headers()
            .get("etag")
            .map(|tag| tag.to_str().unwrap().to_owned());
        (
            answer.status().as_u16(),
            tag,
            answer.json::<Value>().await.unwrap(),
        )
    };
    let (status, tag, changed) = patch(1, Some(format!("\"{first}\""))).await;
    assert_eq!(
        (status, &changed["limits"]["requests_in_flight_max"]),
        (200, &json!(1))
    );
    assert_ne!(tag, Some(format!("\"{first}\"")));
    let (status, _, refused) = patch(2, Some(format!("\"{first}\""))).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (409, &json!("tenant_changed"))
    );
    let (status, _, faulty) = patch(2, Some("no version".into())).await;
    assert_eq!(
        (status, &faulty["error"]["param"]),
        (400, &json!("If-Match"))
    );
    // Without a version the change is made to what there is.
    let (status, ..) = patch(3, None).await;
    assert_eq!(status, 200);
    let late = admin.request(Method::DELETE, "tenants/acme");
    let late = late.header("if-match", tag.unwrap()).send().await.unwrap();
    assert_eq!(late.status(), 409);
    let (_, kept) = admin.call(Method::GET, "tenants/acme", Value::Null).await;
    assert_eq!(kept["limits"]["requests_in_flight_max"], 3);
}

#[tokio::test]
async fn an_act_that_cannot_be_logged_does_not_happen() {
    let dir = tempfile::tempdir().unwrap();
    let in_store = GatewayConfig {
        tenants_in_store: true,
        ..config()
    };
    let (mut config, token) = with_operator(dir.path(), in_store);
    config.audit_file = Some(dir.path().join("no such folder/audit.jsonl"));
    let bench = Bench::with(config).await;
    let url = format!(
        "http://{}/admin/tenants",
        bench.gateway.operations_addr().unwrap()
    );
    let add = bench.client.post(&url).bearer_auth(&token);
    let refused = add.json(&json!({"name": "acme"})).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    let refused: Value = refused.json().await.unwrap();
    assert_eq!(refused["error"]["code"], "audit_unavailable");
    let list = bench
        .client
        .get(&url)
        .bearer_auth(&token)
        .send()
        .await
        .unwrap();
    let list: Value = list.json().await.unwrap();
    assert_eq!(list["data"], json!([]));
}

#[tokio::test]
async fn bodies_with_faults_are_refused_with_their_reason() {
    let admin = Admin::new().await;
    admin
        .call(Method::POST, "tenants", json!({"name": "acme"}))
        .await;
    for (method, path, body, status, part) in [
        (Method::POST, "tenants", json!({"name": " "}), 400, "name"),
        (
            Method::POST,
            "tenants",
            json!({"name": "b", "limit": 1}),
            400,
            "limit",
        ),
        (
            Method::POST,
            "tenants",
            json!({"name": "b", "keys": [{"id": "x"}]}),
            400,
            "keys",
        ),
        (
            Method::PATCH,
            "tenants/acme",
            json!({"limits": {"requests_per_minute": 0}}),
            400,
            "at least 1",
        ),
        (
            Method::PATCH,
            "tenants/acme",
            json!({"keys": []}),
            400,
            "keys",
        ),
        (Method::PATCH, "tenants/nobody", json!({}), 404, "no tenant"),
        (
            Method::POST,
            "tenants/nobody/keys",
            json!({"name": "k"}),
            404,
            "no tenant",
        ),
        (
            Method::POST,
            "tenants/acme/keys",
            json!({"name": "k", "sha256": "00"}),
            400,
            "sha256",
        ),
        (
            Method::POST,
            "tenants/acme/keys",
            json!({"name": "k", "expires_at": "soon"}),
            400,
            "expires_at",
        ),
        (
            Method::POST,
            "tenants/acme/keys",
            json!({"name": "k", "endpoints": ["x"]}),
            400,
            "unknown variant",
        ),
        (
            Method::POST,
            "keys/none/rotate",
            json!({"grace": 1}),
            400,
            "grace",
        ),
        (Method::POST, "keys/none/rotate", Value::Null, 404, "no key"),
        (Method::GET, "tenants/nobody", Value::Null, 404, "no tenant"),
        (Method::PUT, "tenants/acme", json!({}), 405, "method"),
    ] {
        let (got, answer) = admin.call(method.clone(), path, body.clone()).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert_eq!(got, status, "{method} {path} {body}: {answer}");
        assert!(message.contains(part), "{method} {path} {body}: {message}");
    }
    let large = json!({"name": "x".repeat(9 << 20)});
    assert_eq!(admin.call(Method::POST, "tenants", large).await.0, 413);
    let (_, list) = admin.call(Method::GET, "tenants", Value::Null).await;
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn without_operators_there_is_no_admin_api() {
    let mut config = config();
    config.operations_listen = Some(([127, 0, 0, 1], 0).into());
    let bench = Bench::with(config).await;
    let url = format!(
        "http://{}/admin/tenants",
        bench.gateway.operations_addr().unwrap()
    );
    let answer = reqwest::get(&url).await.unwrap();
    assert_eq!(answer.status(), 404);
    let answer: Value = answer.json().await.unwrap();
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("gateway.operators"), "{message}");
}

#[tokio::test]
async fn tenants_in_a_file_can_be_read_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tenants.toml");
    std::fs::write(&path, "[[tenants]]\nname = \"acme\"").unwrap();
    let in_file = GatewayConfig {
        tenants_file: Some(path.clone()),
        ..config()
    };
    let admin = Admin::with(in_file, FakeTenants::default()).await;
    let (status, list) = admin.call(Method::GET, "tenants", Value::Null).await;
    assert_eq!((status, &list["data"][0]["name"]), (200, &json!("acme")));
    let (status, refused) = admin
        .call(Method::DELETE, "tenants/acme", Value::Null)
        .await;
    let message = refused["error"]["message"].as_str().unwrap();
    assert_eq!(status, 409);
    assert!(message.contains("refrain tenants --file"), "{message}");
    assert!(admin.audit().is_empty());
    let nowhere = Admin::with(config(), FakeTenants::default()).await;
    assert_eq!(
        nowhere.call(Method::GET, "tenants", Value::Null).await.0,
        409
    );
}

#[tokio::test]
async fn a_gateway_goes_on_with_what_it_knows_while_the_store_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("tenants.json");
    let in_store = GatewayConfig {
        tenants_in_store: true,
        tenants_cache_file: Some(cache.clone()),
        ..config()
    };
    let admin = Admin::with(in_store.clone(), FakeTenants::default()).await;
    admin
        .call(Method::POST, "tenants", json!({"name": "acme"}))
        .await;
    let (_, key) = admin.key(json!({"name": "ci"})).await;
    admin.until_status(&key, 200).await;
    admin.bench.mesh.store.content().tenants.is_away = true;
    let failed = || {
        let name = "refrain_gateway_tenants_read_total{outcome=\"failed\"}";
        admin.bench.metric(name)
    };
    while failed() < 2.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(admin.status(&key).await, 200);
    assert_eq!(admin.call(Method::GET, "tenants", Value::Null).await.0, 503);

    // Another gateway starts with the cache, and knows the same.
    let second = Admin::with(in_store.clone(), FakeTenants::away()).await;
    assert_eq!(second.status(&key).await, 200);

    // One without a cache, or with one that is damaged, is not ready, and refuses everybody for the time being.
    let damaged = cache.with_extension("damaged");
    std::fs::write(&damaged, r#"{"tenants": [{"name": "none"}]}"#).unwrap();
    for cache in [None, Some(damaged)] {
        let without = GatewayConfig {
            tenants_cache_file: cache,
            ..in_store.clone()
        };
        let third = Admin::with(without, FakeTenants::away()).await;
        let ready = async || {
            let answer = reqwest::get(format!("{}/readyz", third.operations))
                .await
                .unwrap();
            answer.status().as_u16()
        };
        assert_eq!(ready().await, 503);
        assert_eq!(
            (third.status(&key).await, third.status("sk-acme").await),
            (503, 503)
        );
        third.bench.mesh.store.content().tenants.is_away = false;
        third.until_status("sk-acme", 200).await;
        assert_eq!((third.status(&key).await, ready().await), (401, 200));
    }
}

#[tokio::test]
async fn keys_that_contradict_each_other_are_faults_at_the_start() {
    let operator = OperatorConfig {
        name: "ann".into(),
        token_sha256: "00".repeat(32),
        read_only: false,
    };
    for (config, part) in [
        (
            GatewayConfig {
                tenants_in_store: true,
                tenants_file: Some("tenants.toml".into()),
                ..config()
            },
            "not together with tenants_file",
        ),
        (
            GatewayConfig {
                tenants_cache_file: Some("cache.json".into()),
                ..config()
            },
            "tenants_cache_file",
        ),
        (
            GatewayConfig {
                operators: vec![operator.clone()],
                audit_file: Some("audit.jsonl".into()),
                ..config()
            },
            "operations_listen",
        ),
        (
            GatewayConfig {
                operators: vec![operator],
                operations_listen: Some(([127, 0, 0, 1], 0).into()),
                ..config()
            },
            "audit_file",
        ),
    ] {
        let error = start_error(config).await;
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[tokio::test]
async fn acts_at_once_on_one_tenant_all_succeed() {
    let admin = Admin::new().await;
    let tenant = json!({"name": "acme"});
    assert_eq!(admin.call(Method::POST, "tenants", tenant).await.0, 201);
    let patches = (1..=50).map(|limit| {
        let body = json!({"limits": {"requests_in_flight_max": limit}});
        admin.call(Method::PATCH, "tenants/acme", body)
    });
    let answers = futures_util::future::join_all(patches).await;
    let failed = answers.iter().filter(|(status, _)| *status != 200);
    assert_eq!(failed.count(), 0, "{answers:?}");
    // Each of them was a change of its own.
    let versions = answers
        .iter()
        .map(|(_, changed)| changed["version"].as_u64());
    assert_eq!(versions.collect::<std::collections::HashSet<_>>().len(), 50);
}

#[tokio::test]
async fn an_act_reads_no_other_tenant() {
    let mut kept = FakeTenants::default();
    for number in 0..300 {
        let name = format!("tenant-{number}");
        kept.put(&name, json!({ "name": name }).to_string());
    }
    let in_store = GatewayConfig {
        tenants_in_store: true,
        ..config()
    };
    let admin = Admin::with(in_store, kept).await;
    let sent = || admin.bench.mesh.store.content().tenants.sent;
    assert_eq!(sent(), 300);
    let (status, _) = admin
        .call(Method::POST, "tenants", json!({"name": "acme"}))
        .await;
    assert_eq!(status, 201);
    let (id, key) = admin.key(json!({"name": "ci"})).await;
    let patch = json!({"limits": {"requests_in_flight_max": 3}});
    assert_eq!(
        admin.call(Method::PATCH, "tenants/acme", patch).await.0,
        200
    );
    assert_eq!(
        admin.call(Method::GET, "tenants/acme", Value::Null).await.0,
        200
    );
    let rotate = format!("keys/{id}/rotate");
    assert_eq!(admin.call(Method::POST, &rotate, Value::Null).await.0, 201);
    admin.until_status(&key, 200).await;
    assert_eq!(
        admin
            .call(Method::DELETE, &format!("keys/{id}"), Value::Null)
            .await
            .0,
        200
    );
    admin.until_status(&key, 401).await;
    assert_eq!(
        admin
            .call(Method::DELETE, "tenants/acme", Value::Null)
            .await
            .0,
        200
    );
    assert_eq!(sent(), 300);
    // The act sees changes of another gateway that matter to it.
    admin
        .bench
        .mesh
        .store
        .content()
        .tenants
        .put("bolt-2", json!({"name": "bolt-2"}).to_string());
    let (status, _) = admin
        .call(Method::DELETE, "tenants/bolt-2", Value::Null)
        .await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_tenant_of_earlier_times_whose_name_is_not_allowed_any_more_can_be_removed() {
    let mut kept = FakeTenants::default();
    let good = json!({"name": "acme", "limits": {"requests_in_flight_max": 3}});
    kept.put("acme", good.to_string());
    kept.put("other", json!({"name": "other"}).to_string());
    let in_store = GatewayConfig {
        tenants_in_store: true,
        ..config()
    };
    let admin = Admin::with(in_store, kept).await;
    // The others are served.
    let (status, all) = admin.call(Method::GET, "tenants", Value::Null).await;
    assert_eq!(
        (status, all["data"].as_array().unwrap().len()),
        (200, 1),
        "{all}"
    );
    let (_, key) = admin.key(json!({"name": "ci"})).await;
    admin.until_status(&key, 200).await;
    let failed = "refrain_gateway_tenants_read_total{outcome=\"failed\"}";
    assert!(admin.bench.metric(failed) >= 1.0);
    // It cannot be read, changed or added, but removed.
    for (method, path, body, wanted) in [
        (Method::GET, "tenants/other", Value::Null, 409),
        (Method::POST, "tenants", json!({"name": "other"}), 400),
        (Method::DELETE, "tenants/other", Value::Null, 200),
        (Method::DELETE, "tenants/other", Value::Null, 404),
    ] {
        let (status, answer) = admin.call(method.clone(), path, body).await;
        assert_eq!(status, wanted, "{method}: {answer}");
    }
}

#[tokio::test]
async fn a_page_of_somebody_else_cannot_call_the_operations_listener() {
    let admin = Admin::new().await;
    let own = admin.operations.clone();
    let host = own.trim_start_matches("http://");
    for (header, value, status) in [
        ("host", "page.example", 403),
        ("origin", "http://page.example", 403),
        ("sec-fetch-site", "cross-site", 403),
        ("sec-fetch-site", "same-origin", 200),
        ("origin", &*own, 200),
        ("host", host, 200),
    ] {
        let call = admin.request(Method::GET, "tenants").header(header, value);
        let answer = call.send().await.unwrap();
        assert_eq!(answer.status(), status, "{header}: {value}");
        let metrics = admin.bench.client.get(format!("{own}/metrics"));
        let answer = metrics.header(header, value).send().await.unwrap();
        assert_eq!(answer.status(), status, "{header}: {value}");
    }
    // No GET changes anything.
    for path in [
        "erasures",
        "compactions",
        "workers/w0/drain",
        "keys/x",
        "keys/x/rotate",
    ] {
        let (status, _) = admin.call(Method::GET, path, Value::Null).await;
        assert_eq!(status, 405, "{path}");
    }
}
