//! The console: its page, what the page asks for, and the orders of operators to the mesh.

use refrain_accounts::{OperatorConfig, OperatorToken};
use refrain_gateway::GatewayConfig;
use refrain_protocol::TenantId;
use refrain_protocol::admin::{ExportCursor, ExportRequest};
use refrain_rpc::encode_bincode;
use refrain_rpc::testing::FakeTenants;
use reqwest::Method;
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::mesh::{Bench, chat, config};

async fn admin() -> Admin {
    let with = GatewayConfig {
        console: Some(true),
        tenants_in_store: true,
        ..config()
    };
    Admin::with(with, FakeTenants::default()).await
}

#[tokio::test]
async fn the_page_needs_no_token_and_may_be_in_no_frame() {
    let admin = admin().await;
    let page = format!("{}/console", admin.operations);
    let page = reqwest::get(page).await.unwrap();
    assert_eq!(page.status(), 200);
    assert!(page.url().path().ends_with('/'));
    let header = |name: &str| page.headers()[name].to_str().unwrap().to_owned();
    assert!(header("content-security-policy").contains("default-src 'none'"));
    assert!(header("content-security-policy").contains("frame-ancestors 'none'"));
    assert_eq!(header("x-frame-options"), "DENY");
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert!(page.headers().get("access-control-allow-origin").is_none());
    assert!(page.text().await.unwrap().contains("main.js"));
    let module = format!("{}/console/main.js", admin.operations);
    let module = reqwest::get(module).await.unwrap();
    let kind = module.headers()["content-type"].to_str().unwrap();
    assert!(kind.starts_with("text/javascript"));
    // Clients' listener has none of it.
    let elsewhere = format!("{}/console", admin.bench.url);
    assert_eq!(reqwest::get(elsewhere).await.unwrap().status(), 404);
}

#[tokio::test]
async fn a_gateway_that_is_not_told_to_has_no_console() {
    let admin = Admin::with(config(), FakeTenants::default()).await;
    let page = format!("{}/console", admin.operations);
    assert_eq!(reqwest::get(page).await.unwrap().status(), 404);
}

#[tokio::test]
async fn figures_are_those_of_the_metrics() {
    let admin = admin().await;
    assert_eq!(admin.bench.chat(json!({})).await.0, 200);
    let (status, figures) = admin.call(Method::GET, "figures", Value::Null).await;
    assert_eq!(status, 200);
    assert_eq!(figures["operator"], "ann");
    assert_eq!(figures["models"], json!(["tiny"]));
    assert_eq!(figures["workers"][0]["worker"], "w0");
    assert_eq!(figures["trouble"], Value::Null);
    let shown = figures["parts"][0]["metrics"].as_str().unwrap();
    let metrics = format!("{}/metrics", admin.operations);
    let metrics = reqwest::get(metrics).await.unwrap().text().await.unwrap();
    let name = "refrain_gateway_requests_total{model=\"tiny\",status=\"200\",tenant=\"acme\"}";
    assert!(shown.contains(&format!("{name} 1\n")), "{shown}");
    for line in shown.lines() {
        assert!(metrics.lines().any(|other| other == line), "{line}");
    }
    assert!(!shown.contains("_bucket") && !shown.contains("# "));
}

#[tokio::test]
async fn orders_reach_the_mesh_and_are_in_the_audit_log() {
    let admin = admin().await;
    let order = async |method, path: &str, body| admin.call(method, path, body).await;
    let (status, drained) = order(Method::POST, "workers/w0/drain", Value::Null).await;
    assert_eq!((status, &drained["drains"]), (200, &json!(true)));
    let (status, _) = order(Method::DELETE, "workers/w0/drain", Value::Null).await;
    assert_eq!(status, 200);
    let (status, unknown) = order(Method::POST, "workers/w9/drain", Value::Null).await;
    assert_eq!(status, 404, "{unknown}");
    let erasure = json!({"tenant": "acme"});
    let (status, erased) = order(Method::POST, "erasures", erasure).await;
    assert_eq!((status, &erased["documents"]), (200, &json!(3)));
    assert_eq!(erased["documents_left"], 0);
    assert!(erased.get("engines").is_none() && erased.get("usage").is_none());
    let everything = json!({"tenant": "acme", "everything": true});
    let (status, erased) = order(Method::POST, "erasures", everything).await;
    let engine = json!({"worker": "w0", "sessions": 1, "memory_blocks": 5, "file_blocks": 4, "running": 0,
        "is_unable": false});
    assert_eq!(
        (status, &erased["engines"]),
        (200, &json!({"workers": [engine]}))
    );
    let faulty = json!({"tenant": "acme", "everything": true, "session": "s"});
    let (status, faulty) = order(Method::POST, "erasures", faulty).await;
    assert_eq!(
        (status, &faulty["error"]["param"]),
        (400, &json!("everything"))
    );
    let (status, nobody) = order(Method::POST, "erasures", json!({"session": "s"})).await;
    assert_eq!((status, &nobody["error"]["param"]), (400, &json!("tenant")));
    let (status, compacted) = order(Method::POST, "compactions", Value::Null).await;
    assert_eq!((status, &compacted["after_bytes"]), (200, &json!(4)));
    {
        let log = admin.bench.mesh.log();
        assert_eq!(log.drains, [true, false]);
        assert_eq!(log.erasures.len(), 2);
        assert_eq!(log.erasures[0].tenant.as_deref(), Some("acme"));
        let told: Vec<TenantId> = log.forgotten.iter().map(|(_, tenant)| *tenant).collect();
        assert_eq!(told, [TenantId::of("acme")]);
    }
    let acts: Vec<Value> = admin.audit();
    let done = acts.iter().filter(|line| line["outcome"] == "done");
    let done: Vec<&str> = done.map(|line| line["act"].as_str().unwrap()).collect();
    let expected = [
        "worker w0 drained",
        "worker w0 put back to work",
        "all documents of tenant acme erased",
        "everything of tenant acme erased",
        "draft store compacted",
    ];
    assert_eq!(done, expected);
    assert_eq!(acts.len(), 2 * expected.len());
}

#[tokio::test]
async fn an_operator_who_may_only_look_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let made = OperatorToken::random().unwrap();
    let with = GatewayConfig {
        operations_listen: Some(([127, 0, 0, 1], 0).into()),
        operators: vec![OperatorConfig {
            name: "guest".into(),
            token_sha256: made.sha256,
            read_only: true,
        }],
        audit_file: Some(dir.path().join("audit.jsonl")),
        tenants_in_store: true,
        ..config()
    };
    let bench = Bench::with(with).await;
    let operations = bench.gateway.operations_addr().unwrap();
    let call = async |method, path: &str| {
        let url = format!("http://{operations}/admin/{path}");
        let request = bench.client.request(method, url).bearer_auth(&made.token);
        let answer = request.json(&json!({})).send().await.unwrap();
        (
            answer.status().as_u16(),
            answer.json::<Value>().await.unwrap(),
        )
    };
    let (status, figures) = call(Method::GET, "figures").await;
    assert_eq!((status, &figures["is_read_only"]), (200, &json!(true)));
    for (method, path) in [
        (Method::POST, "tenants"),
        (Method::POST, "workers/w0/drain"),
        (Method::DELETE, "workers/w0/drain"),
        (Method::POST, "compactions"),
        (Method::POST, "try"),
    ] {
        let (status, refused) = call(method, path).await;
        assert_eq!(status, 403, "{path}");
        assert_eq!(refused["error"]["code"], "operator_read_only");
    }
    assert!(bench.mesh.log().drains.is_empty());
}

/// Sends a chat as the page does.
async fn try_chat(admin: &Admin, key: Option<&str>, fields: Value) -> (u16, Value) {
    let request = admin.request(Method::POST, "try").json(&chat(fields));
    let request = match key {
        Some(key) => request.header("x-refrain-key", key),
        None => request,
    };
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

#[tokio::test]
async fn a_chat_from_the_page_is_one_of_its_key_and_tells_its_steps() {
    let admin = admin().await;
    let trace = json!({"step_trace": true});
    // The operator's token is no key of a tenant.
    assert_eq!(try_chat(&admin, None, trace.clone()).await.0, 401);
    assert_eq!(try_chat(&admin, Some("wrong"), trace.clone()).await.0, 401);
    let (status, answer) = try_chat(&admin, Some("sk-acme"), trace.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let steps = answer["metrics"]["step_trace"]["steps"].as_array().unwrap();
    let tokens: Vec<&str> = steps
        .iter()
        .flat_map(|step| step["tokens"].as_array().unwrap())
        .map(|token| token.as_str().unwrap())
        .collect();
    let counted = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(tokens.len() as u64, counted);
    assert_eq!(tokens.concat(), answer["choices"][0]["message"]["content"]);
    let told = &answer["metrics"]["speculative_decoding"]["steps"];
    assert_eq!(told.as_u64(), Some(steps.len() as u64));
    let name =
        "gen_ai_client_token_usage_count{model=\"tiny\",tenant=\"acme\",token_type=\"output\"}";
    assert!((admin.bench.metric(name) - 1.0).abs() < 1e-9);
    // Other requests have no steps in their answers.
    let (_, plain) = try_chat(&admin, Some("sk-acme"), json!({})).await;
    assert!(plain["metrics"].get("step_trace").is_none());
    let several = json!({"step_trace": true, "n": 2});
    let (status, refused) = try_chat(&admin, Some("sk-acme"), several).await;
    assert_eq!(
        (status, &refused["error"]["param"]),
        (400, &json!("step_trace"))
    );
}

#[tokio::test]
async fn a_tenant_that_hides_what_drafts_bring_gets_no_steps() {
    let admin = admin().await;
    for (name, field) in [
        ("quiet", json!({"hides_metrics": true})),
        ("shaped", json!({"stream_shaping": "size"})),
    ] {
        let mut tenant = field;
        tenant["name"] = name.into();
        let (status, made) = admin.call(Method::POST, "tenants", tenant).await;
        assert_eq!(status, 201, "{made}");
        let path = format!("tenants/{name}/keys");
        let (_, made) = admin.call(Method::POST, &path, json!({"name": "k"})).await;
        let key = made["key"].as_str().unwrap();
        let mut status = 401;
        let mut refused = Value::Null;
        while status == 401 {
            (status, refused) = try_chat(&admin, Some(key), json!({"step_trace": true})).await;
        }
        assert_eq!(
            (status, &refused["error"]["param"]),
            (400, &json!("step_trace"))
        );
        assert_eq!(try_chat(&admin, Some(key), json!({})).await.0, 200);
    }
}

#[tokio::test]
async fn each_page_of_an_export_is_in_the_audit_log() {
    let admin = admin().await;
    // The store takes the last one for a first page.
    for (page, after) in [(1, (0, 0)), (2, (7, 3)), (3, (0, 3))] {
        let (snapshot, sequence) = after;
        let request = ExportRequest {
            tenant: "acme".into(),
            model: None,
            after: ExportCursor {
                snapshot,
                sequence,
                ..ExportCursor::default()
            },
            max_tokens: 1,
        };
        let body = encode_bincode(&request).unwrap();
        let answer = admin.request(Method::POST, "v1/export").body(body);
        assert_eq!(answer.send().await.unwrap().status(), 200);
        let audit = admin.audit();
        let lines = audit.iter();
        let exported = lines.filter(|line| line["act"] == "documents of tenant acme exported");
        // One line when it begins, and one when it has ended.
        assert_eq!(exported.count(), 2 * page);
    }
}
