//! Tenants, keys and limits of a file that changes while the gateway runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use refrain_accounts::tenants::file::{Isolation, StreamShaping};
use refrain_accounts::tenants::file::{
    KeyEndpoint, KeyEntry, LimitsEntry, TenantEntry, TenantsFile, expiry_text,
};
use refrain_accounts::tenants::key::NewKey;
use refrain_gateway::GatewayConfig;
use refrain_protocol::chunk::{DraftRules, Priority, Urgency};
use refrain_protocol::scheduling::{RequestClass, TenantWeight};
use refrain_service_kit::clock;
use serde_json::{Value, json};

use crate::mesh::{Bench, Mishap, chat, config, eventually, start_error};

const CHAT: &str = "/v1/chat/completions";

pub(crate) struct Tenants {
    _dir: tempfile::TempDir,
    path: PathBuf,
    file: TenantsFile,
}

impl Tenants {
    /// A file with the tenant `acme` under these limits.
    pub(crate) fn new(limits: LimitsEntry) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tenants = Tenants {
            path: dir.path().join("tenants.toml"),
            _dir: dir,
            file: TenantsFile {
                tenants: vec![TenantEntry {
                    limits,
                    ..TenantEntry::named("acme".parse().unwrap())
                }],
            },
        };
        tenants.write();
        tenants
    }

    fn write(&self) {
        replace(&self.path, &self.file.to_text().unwrap());
    }

    /// Adds a key of `acme`, and returns it.
    fn add(&mut self, name: &str, entry: KeyEntry) -> String {
        let key = NewKey::random().unwrap();
        self.file.tenants[0].keys.push(KeyEntry {
            name: name.into(),
            id: key.id,
            sha256: key.sha256,
            ..entry
        });
        self.write();
        key.key
    }

    pub(crate) fn config(&self) -> GatewayConfig {
        GatewayConfig {
            tenants_file: Some(self.path.clone()),
            ..config()
        }
    }
}

/// Puts a file in another one's place, as commands and mounted Secrets do.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

impl Bench {
    async fn status(&self, path: &str, body: &Value, key: Option<&str>) -> (u16, Value) {
        let url = format!("{}{path}", self.url);
        let request = match body.is_null() {
            true => self.client.get(url),
            false => self.client.post(url).json(body),
        };
        let request = match key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json().await.unwrap_or_default())
    }

    async fn until_status(&self, key: &str, wanted: u16) {
        eventually("the key gets the status", async || {
            self.status(CHAT, &chat(json!({})), Some(key)).await.0 == wanted
        })
        .await;
    }
}

#[tokio::test]
async fn every_endpoint_checks_the_key_and_what_it_may_do() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let now = clock::unix_s().cast_signed();
    let right = tenants.add("right", KeyEntry::default());
    let expired = KeyEntry {
        expires_at: Some(expiry_text(now - 1).unwrap()),
        ..KeyEntry::default()
    };
    let expired = tenants.add("expired", expired);
    let revoked = tenants.add("revoked", KeyEntry::default());
    tenants.file.tenants[0].keys.pop();
    tenants.write();
    let other_model = KeyEntry {
        models: vec!["other".into()],
        ..KeyEntry::default()
    };
    let other_model = tenants.add("other model", other_model);
    let every = [
        KeyEndpoint::Chat,
        KeyEndpoint::Completions,
        KeyEndpoint::Messages,
        KeyEndpoint::Responses,
        KeyEndpoint::Tokenize,
    ];
    let mut scoped = |but: KeyEndpoint| {
        let endpoints = every.into_iter().filter(|endpoint| *endpoint != but);
        let entry = KeyEntry {
            endpoints: endpoints.collect(),
            ..KeyEntry::default()
        };
        tenants.add(&format!("all but {but:?}"), entry)
    };
    let messages =
        json!({"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    let responses = json!({"model": "tiny", "input": "hi"});
    let text = json!({"model": "tiny", "prompt": "hi"});
    let ids = json!({"model": "tiny", "tokens": [104, 105]});
    // The path, the body, the endpoint of the scope, and the status with the right key and with one of another model.
    let table = [
        (CHAT, chat(json!({})), Some(KeyEndpoint::Chat), 200, 404),
        (
            "/v1/completions",
            text.clone(),
            Some(KeyEndpoint::Completions),
            200,
            404,
        ),
        (
            "/v1/messages",
            messages.clone(),
            Some(KeyEndpoint::Messages),
            200,
            404,
        ),
        (
            "/v1/messages/count_tokens",
            messages,
            Some(KeyEndpoint::Messages),
            200,
            200,
        ),
        (
            "/v1/responses",
            responses.clone(),
            Some(KeyEndpoint::Responses),
            200,
            404,
        ),
        (
            "/v1/responses/input_tokens",
            responses,
            Some(KeyEndpoint::Responses),
            200,
            200,
        ),
        (
            "/v1/responses/resp_0",
            Value::Null,
            Some(KeyEndpoint::Responses),
            404,
            404,
        ),
        ("/tokenize", text, Some(KeyEndpoint::Tokenize), 200, 200),
        ("/detokenize", ids, Some(KeyEndpoint::Tokenize), 200, 200),
        ("/v1/models", Value::Null, None, 200, 200),
        ("/v1/models/tiny", Value::Null, None, 200, 404),
    ];
    let table = table.map(|row| (row.2.map(&mut scoped), row));
    let bench = Bench::with(tenants.config()).await;
    for (out_of_scope, (path, body, _, with_right, with_other_model)) in table {
        let expected = [
            (None, 401),
            (Some("nobody"), 401),
            (Some(&*expired), 401),
            (Some(&*revoked), 401),
            (Some(&*right), with_right),
            (Some(&*other_model), with_other_model),
            // A key of the configuration.
            (Some("sk-acme"), with_right),
        ];
        for (key, wanted) in expected {
            let (status, answer) = bench.status(path, &body, key).await;
            assert_eq!(status, wanted, "{path} with {key:?}: {answer}");
        }
        if let Some(key) = out_of_scope {
            let (status, answer) = bench.status(path, &body, Some(&key)).await;
            assert_eq!(status, 403, "{path}: {answer}");
        }
    }
    let (_, models) = bench
        .status("/v1/models", &Value::Null, Some(&other_model))
        .await;
    assert_eq!(models["data"], json!([]));
}

#[tokio::test]
async fn changes_hold_without_a_restart_and_a_broken_file_changes_nothing() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let first = tenants.add("first", KeyEntry::default());
    let bench = Bench::with(tenants.config()).await;
    bench.until_status(&first, 200).await;
    let second = tenants.add("second", KeyEntry::default());
    bench.until_status(&second, 200).await;
    replace(&tenants.path, "[[tenants]]\nname = \"\"");
    let failed = "refrain_gateway_tenants_read_total{outcome=\"failed\"}";
    while bench.metric(failed) == 0.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    std::fs::remove_file(&tenants.path).unwrap();
    let before = bench.metric(failed);
    while bench.metric(failed) < before + 2.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bench.until_status(&first, 200).await;
    tenants.file.tenants[0].keys.remove(0);
    tenants.write();
    bench.until_status(&first, 401).await;
    bench.until_status(&second, 200).await;
    assert_eq!(bench.metric("refrain_gateway_tenant_keys"), 1.0);
    // At the start a broken file is an error.
    replace(&tenants.path, "[[tenants]]\nname = \"\"");
    let error = start_error(tenants.config()).await;
    assert!(error.contains("line 2: the name of a tenant"), "{error}");
}

#[tokio::test]
async fn limits_are_told_in_headers_and_end_with_429() {
    let mut tenants = Tenants::new(LimitsEntry {
        tokens_per_minute: Some(6_000),
        ..LimitsEntry::default()
    });
    let limited = KeyEntry {
        limits: LimitsEntry {
            requests_per_minute: Some(3),
            ..LimitsEntry::default()
        },
        ..KeyEntry::default()
    };
    let key = tenants.add("limited", limited);
    let bench = Bench::with(tenants.config()).await;
    let ask = |max_tokens: u32| {
        let body = chat(json!({"max_tokens": max_tokens}));
        let url = format!("{}{CHAT}", bench.url);
        bench.client.post(url).bearer_auth(&key).json(&body).send()
    };
    let number = |response: &reqwest::Response, name: &str| -> u64 {
        let value = response.headers().get(name);
        let value = value.unwrap_or_else(|| panic!("no {name}"));
        value.to_str().unwrap().parse().unwrap()
    };
    let first = ask(5).await.unwrap();
    assert_eq!(first.status(), 200);
    assert_eq!(number(&first, "x-ratelimit-limit-requests"), 3);
    assert_eq!(number(&first, "x-ratelimit-remaining-requests"), 2);
    assert_eq!(number(&first, "x-ratelimit-limit-tokens"), 6_000);
    let left = number(&first, "x-ratelimit-remaining-tokens");
    // It had a short prompt and five tokens.
    assert!((5_900..5_999).contains(&left), "{left}");
    assert!(first.headers().contains_key("x-ratelimit-reset-tokens"));
    assert_eq!(ask(5).await.unwrap().status(), 200);
    assert_eq!(ask(5).await.unwrap().status(), 200);
    let refused = ask(5).await.unwrap();
    assert_eq!(refused.status(), 429);
    let wait = number(&refused, "retry-after");
    assert!((1..=20).contains(&wait), "{wait}");
    assert_eq!(number(&refused, "x-ratelimit-remaining-requests"), 0);
    let answer: Value = refused.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "rate_limit_exceeded");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("3 requests per minute"), "{message}");
    let counted = "refrain_gateway_rejections_total{limit=\"requests_per_minute\"}";
    assert_eq!(bench.metric(counted), 1.0);
    // The limit on tokens is the tenant's, and so for all of its keys. Anthropic's clients read other headers.
    let body =
        json!({"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
    let answer = bench.post("/v1/messages", &body).send().await.unwrap();
    assert_eq!(number(&answer, "anthropic-ratelimit-tokens-limit"), 6_000);
    let reset = answer.headers()["anthropic-ratelimit-tokens-reset"]
        .to_str()
        .unwrap();
    assert!(reset.ends_with('Z'), "{reset}");
    // Without limits there are no such headers.
    let url = format!("{}{CHAT}", bench.url);
    let free = bench
        .client
        .post(url)
        .bearer_auth("sk-bolt")
        .json(&chat(json!({})));
    let free = free.send().await.unwrap();
    assert!(
        !free
            .headers()
            .keys()
            .any(|name| name.as_str().contains("ratelimit"))
    );
}

#[tokio::test]
async fn a_client_that_leaves_pays_for_what_was_made() {
    let tenants = Tenants::new(LimitsEntry {
        output_tokens_per_minute: Some(120),
        requests_in_flight_max: Some(1),
        ..LimitsEntry::default()
    });
    let bench = Bench::with(tenants.config()).await;
    let remaining = async || {
        let answer = bench
            .post(CHAT, &chat(json!({"max_tokens": 1})))
            .send()
            .await
            .unwrap();
        let left = answer
            .headers()
            .get("x-ratelimit-remaining-output-tokens")
            .unwrap();
        (
            answer.status().as_u16(),
            left.to_str().unwrap().parse::<u64>().unwrap(),
        )
    };
    // The first chunk hangs after some tokens. Two tokens a second come back to the limit meanwhile.
    let began = Instant::now();
    let comes_back = || 2 * began.elapsed().as_secs() + 2;
    bench.mesh.mishap(0, Mishap::Hang(2));
    let body = chat(json!({"max_tokens": 100, "stream": true}));
    let hanging = bench.post(CHAT, &body).send().await.unwrap();
    assert_eq!(hanging.status(), 200);
    bench.mesh.wait_for_streams(1).await;
    // Its tokens are reserved for it, and nothing else may run.
    let (status, left) = remaining().await;
    assert_eq!(status, 429);
    assert!(left >= 20 && left < 20 + comes_back(), "{left}");
    drop(hanging);
    bench.mesh.settled().await;
    let mut after = remaining().await;
    eventually("its place is free", async || {
        if after.0 != 200 {
            after = remaining().await;
        }
        after.0 == 200
    })
    .await;
    let unsettled = 20 + comes_back();
    let is_settled = after.1 > unsettled || unsettled >= 110;
    assert!(is_settled, "the reservation was not settled: {}", after.1);
}

#[tokio::test]
async fn the_standing_of_a_tenant_goes_with_its_requests() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let key = tenants.add("ci", KeyEntry::default());
    tenants.file.tenants[0] = TenantEntry {
        weight: TenantWeight::try_from(2.5).unwrap(),
        class_max: RequestClass::Rollout,
        urgent_percent_max: Some(0),
        alpha: Some(2.5),
        max_spec_tokens: Some(16),
        ..tenants.file.tenants[0].clone()
    };
    tenants.write();
    let bench = Bench::with(tenants.config()).await;
    let body = chat(json!({"class": "interactive", "priority": "high", "tpot_ms": 20}));
    for key in [&*key, "sk-bolt"] {
        let (status, body) = bench.status(CHAT, &body, Some(key)).await;
        assert_eq!(status, 200, "{body}");
    }
    bench.mesh.settled().await;
    let log = bench.mesh.log();
    let [held, free] = &log.leases[..] else {
        panic!("{:?}", log.leases);
    };
    assert_eq!(f64::from(held.weight), 2.5);
    assert_eq!(held.class, RequestClass::Rollout);
    assert_eq!(log.chunks[0].urgency, Urgency::default());
    let drafts = DraftRules {
        alpha: Some(2.5),
        min_token_prob: None,
        max_spec_tokens: Some(16),
    };
    assert_eq!(log.chunks[0].drafts, drafts);
    // Another tenant has what everybody has.
    assert!(free.weight.is_default());
    assert_eq!(free.class, RequestClass::Interactive);
    assert_eq!(log.chunks[1].urgency.priority, Priority::High);
    assert!(log.chunks[1].drafts.is_empty());
    // Drafts that the engine accepted and rejected are told. Each step of the test's worker drafts 4, and adds a
    // token of its own.
    let emitted = log.finishes[0].emitted_tokens;
    let steps = emitted.div_ceil(bench.mesh.script().step_tokens as u32);
    assert_eq!(log.finishes[0].accepted_tokens, emitted - steps);
    assert_eq!(log.finishes[0].rejected_tokens, 5 * steps - emitted);
    drop(log);
    let declined = bench.metric("refrain_gateway_urgency_declined_total");
    assert_eq!(declined, 1.0);
}

#[tokio::test]
async fn isolation_decides_which_part_of_a_tenant_a_request_stays_in() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let keys = ["one", "other"].map(|name| tenants.add(name, KeyEntry::default()));
    tenants.file.tenants[0].isolation = Isolation::User;
    tenants.write();
    let bench = Bench::with(tenants.config()).await;
    let messages = json!({"model": "tiny", "max_tokens": 9, "metadata": {"user_id": "ann"},
        "messages": [{"role": "user", "content": "hi"}]});
    let responses = json!({"model": "tiny", "input": "hi", "safety_identifier": "ann"});
    let calls = [
        (0, CHAT, chat(json!({}))),
        (1, CHAT, chat(json!({}))),
        (0, CHAT, chat(json!({"user": "ann"}))),
        (
            1,
            CHAT,
            chat(json!({"user": "bob", "safety_identifier": "ann"})),
        ),
        (0, CHAT, chat(json!({"user": "bob"}))),
        (1, "/v1/messages", messages),
        (0, "/v1/responses", responses),
    ];
    for (key, path, body) in calls {
        let (status, answer) = bench.status(path, &body, Some(&keys[key])).await;
        assert_eq!(status, 200, "{path}: {answer}");
    }
    let log = bench.mesh.log();
    let of_leases: Vec<_> = log
        .leases
        .iter()
        .map(|lease| &lease.namespace.namespace)
        .collect();
    assert!(
        of_leases
            .iter()
            .all(|namespace| namespace.tenant_name() == "acme")
    );
    let parts: Vec<&str> = of_leases
        .iter()
        .map(|namespace| &*namespace.tenant)
        .collect();
    let [one, other, ann, same, bob, by_messages, by_responses] = parts[..] else {
        panic!("{parts:?}");
    };
    assert!(one != other && one.contains("key:") && ann.contains("user:") && ann != bob);
    assert_eq!([same, by_messages, by_responses], [ann; 3]);
    assert!(!parts.concat().contains("ann"), "{parts:?}");
}

#[tokio::test]
async fn streams_in_shape_have_events_of_equal_sizes_and_hidden_metrics_are_absent() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let key = tenants.add("ci", KeyEntry::default());
    let reply = "abcdefghijklmnopqrstuvwxyz";
    let mut seen = Vec::new();
    for shaping in [StreamShaping::Off, StreamShaping::Size, StreamShaping::Pace] {
        let tenant = &mut tenants.file.tenants[0];
        tenant.stream_shaping = shaping;
        tenant.stream_pace_ms = Some(1);
        tenant.hides_metrics = shaping != StreamShaping::Off;
        tenants.write();
        for step_tokens in [1, 5] {
            let bench = Bench::with(tenants.config()).await;
            bench.mesh.reply(reply);
            bench.mesh.script().step_tokens = step_tokens;
            let options = json!({"stream": true, "stream_options": {"include_usage": true}});
            let request = bench.client.post(format!("{}{CHAT}", bench.url));
            let request = request.bearer_auth(&key).json(&chat(options));
            let text = request.send().await.unwrap().text().await.unwrap();
            let data = text.lines().filter_map(|line| line.strip_prefix("data: {"));
            let events: Vec<Value> = data
                .map(|data| serde_json::from_str(&format!("{{{data}")).unwrap())
                .collect();
            let pieces: Vec<&str> = events
                .iter()
                .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
                .filter(|piece| !piece.is_empty())
                .collect();
            assert_eq!(pieces.concat(), reply);
            let has_metrics = events.iter().any(|event| event["metrics"].is_object());
            assert_eq!(has_metrics, shaping == StreamShaping::Off);
            seen.push(pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>());
            let (_, whole) = bench.status(CHAT, &chat(json!({})), Some(&key)).await;
            assert_eq!(whole["choices"][0]["message"]["content"], reply);
            assert_eq!(whole["metrics"].is_object(), shaping == StreamShaping::Off);
        }
    }
    let whole = vec![8, 8, 8, 2];
    assert_eq!(
        seen[2..],
        [whole.clone(), whole.clone(), whole.clone(), whole]
    );
}

#[tokio::test]
async fn numbers_that_tell_of_drafts_name_no_tenant_that_hides_them() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let key = tenants.add("ci", KeyEntry::default());
    for hides_metrics in [false, true] {
        tenants.file.tenants[0].hides_metrics = hides_metrics;
        tenants.write();
        let bench = Bench::with(tenants.config()).await;
        bench.mesh.script().step_tokens = 5;
        let (status, _) = bench.status(CHAT, &chat(json!({})), Some(&key)).await;
        assert_eq!(status, 200);
        let of = |name: &str, tenant: &str| {
            bench.metric(&format!("refrain_gateway_{name},tenant=\"{tenant}\"}}"))
        };
        for kind in ["verified_draft", "accepted_draft"] {
            let series = format!("tokens_total{{kind=\"{kind}\",model=\"tiny\"");
            let (shown, hidden) = (of(&series, "acme"), of(&series, "hidden"));
            assert_eq!((shown > 0.0, hidden > 0.0), (!hides_metrics, hides_metrics));
        }
        let gaps = "step_gap_seconds_count{model=\"tiny\"";
        assert_eq!(of(gaps, "acme") > 0.0, !hides_metrics);
        assert!(of("tokens_total{kind=\"output\",model=\"tiny\"", "acme") > 0.0);
    }
}

#[tokio::test]
async fn the_next_end_of_a_key_is_shown_for_its_tenant() {
    let mut tenants = Tenants::new(LimitsEntry::default());
    let end = "2096-10-02T07:06:40Z".to_owned();
    let ends = |entry: KeyEntry| KeyEntry {
        expires_at: Some(end.clone()),
        ..entry
    };
    tenants.add("ci", ends(KeyEntry::default()));
    tenants.add("forever", KeyEntry::default());
    tenants.write();
    let bench = Bench::with(tenants.config()).await;
    let shown = bench.metric("refrain_gateway_key_expiry_seconds{tenant=\"acme\"}");
    assert_eq!(shown, 4_000_000_000.0);
}
