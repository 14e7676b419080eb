//! The listener for trainers: who gets in, and what bodies may have.

use refrain_gateway::{GatewayConfig, ModelConfig, TrainerConfig};
use refrain_protocol::scheduling::RequestClass;
use reqwest::Method;
use serde_json::{Value, json};

use crate::mesh::{Bench, config, eventually, start_error};

/// A gateway with a listener for trainers.
pub(crate) struct Lab {
    pub(crate) bench: Bench,
    /// The URL of that listener.
    pub(crate) url: String,
}

/// The usual configuration with such a listener.
pub(crate) fn lab_config() -> GatewayConfig {
    GatewayConfig {
        trainer: TrainerConfig {
            listen: Some(([127, 0, 0, 1], 0).into()),
            tenant: Some("acme".parse().unwrap()),
            ..TrainerConfig::default()
        },
        ..config()
    }
}

impl Lab {
    pub(crate) async fn new() -> Self {
        Lab::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let mut config = lab_config();
        change(&mut config);
        let bench = Box::pin(Bench::with(config)).await;
        let url = format!("http://{}", bench.gateway.trainer_addr().unwrap());
        Lab { bench, url }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let url = format!("{}{path}", self.url);
        self.bench.client.request(method, url)
    }

    /// Posts and reads JSON.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.request(Method::POST, path).json(body).send().await;
        read(response.unwrap()).await
    }

    /// Gets JSON.
    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.request(Method::GET, path).send().await;
        read(response.unwrap()).await
    }

    /// Posts in the background.
    pub(crate) fn sent(&self, path: &str, body: &Value) -> tokio::task::JoinHandle<(u16, Value)> {
        let request = self.request(Method::POST, path).json(body);
        tokio::spawn(async move { read(request.send().await.unwrap()).await })
    }

    /// The token ids of a text.
    pub(crate) fn ids(&self, text: &str) -> Vec<u32> {
        self.bench.mesh.tokenizer().encode(text).unwrap()
    }

    /// The events of a stream, and whether `[DONE]` came last.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> (Vec<Value>, bool) {
        let response = self.request(Method::POST, path).json(body).send().await;
        let response = response.unwrap();
        assert_eq!(response.status(), 200);
        let text = response.text().await.unwrap();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let data: Vec<&str> = data.collect();
        let events = data.iter().filter(|data| **data != "[DONE]");
        let events = events.map(|data| serde_json::from_str(data).unwrap());
        (events.collect(), data.last() == Some(&"[DONE]"))
    }

    /// Waits until so many requests of the listener are held back.
    pub(crate) async fn wait_for_held(&self, count: f64) {
        eventually("so many requests are held back", async || {
            self.bench.metric("refrain_gateway_trainer_requests_held") == count
        })
        .await;
    }
}

async fn read(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    let body = match text.is_empty() {
        true => Value::Null,
        false => serde_json::from_str(&text).unwrap(),
    };
    (status, body)
}

#[tokio::test]
async fn callers_need_no_key_and_their_requests_are_rollouts_of_the_tenant() {
    let lab = Lab::new().await;
    let body = json!({"input_ids": lab.ids("abc"), "sampling_params": {"max_new_tokens": 4}});
    for bearer in [None, Some("sk-acme"), Some("of somebody else")] {
        let request = lab.request(Method::POST, "/generate").json(&body);
        let request = match bearer {
            None => request,
            Some(key) => request.bearer_auth(key),
        };
        let request = request
            .header("X-SMG-Routing-Key", "k")
            .header("X-Session-ID", "s");
        assert_eq!(request.send().await.unwrap().status(), 200);
    }
    let log = lab.bench.mesh.log();
    assert_eq!(log.leases.len(), 3);
    for lease in &log.leases {
        assert_eq!(lease.class, RequestClass::Rollout);
        assert_eq!(lease.namespace.namespace.tenant, "acme");
    }
    // Equal prompts are one group, by which drafts are shared.
    let groups: Vec<_> = log.chunks.iter().map(|chunk| chunk.group.clone()).collect();
    assert!(groups[1].is_some() && groups[1] == groups[2], "{groups:?}");
    // Only a trainer knows how long it pauses.
    assert!(
        log.chunks
            .iter()
            .all(|chunk| chunk.budget.time_left_ms.is_none())
    );
}

#[tokio::test]
async fn the_listener_has_its_own_routes_and_the_others_have_none_of_them() {
    let lab = Lab::new().await;
    for path in ["/admin/tenants", "/tokenize"] {
        assert_eq!(lab.post(path, &json!({})).await.0, 404, "{path}");
    }
    for path in [
        "/sessions",
        "/generate",
        "/pause",
        "/abort_request",
        "/update_weights",
    ] {
        assert_eq!(lab.bench.json(path, &json!({})).await.0, 404, "{path}");
    }
    assert_eq!(
        lab.request(Method::GET, "/generate")
            .send()
            .await
            .unwrap()
            .status(),
        405
    );
    for (method, path) in [(Method::POST, "/workers"), (Method::DELETE, "/workers/w0")] {
        let refused = lab.request(method, path).body("{}").send().await.unwrap();
        assert_eq!(refused.status(), 404, "{path}");
        let error: Value = refused.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("worker.adoption"), "{message}");
    }
}

#[tokio::test]
async fn neutral_values_are_accepted_and_others_refused_with_parameters_that_nobody_knows() {
    let lab = Lab::with(|config| config.strict_fields = true).await;
    let ids = lab.ids("abc");
    let neutral = json!({
        "input_ids": ids, "stream": false, "return_logprob": false, "rid": null, "text": null,
        "image_data": null, "lora_path": null, "return_routed_experts": false, "return_indexer_topk": false,
        "custom_logit_processor": "", "session_params": {}, "routed_experts_dtype": "uint8", "bootstrap_room": null,
        "sampling_params": {
            "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 3, "stop": null,
            "stop_token_ids": null, "skip_special_tokens": true, "no_stop_trim": true, "ignore_eos": false,
            "spaces_between_special_tokens": false, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1, "json_schema": null, "regex": null,
            "custom_params": null, "sampling_seed": null, "stop_regex": null, "flat_logprobs": false,
        },
    });
    let (status, answer) = lab.post("/generate", &neutral).await;
    assert_eq!(status, 200, "{answer}");
    let with = |at: &str, value: Value| {
        let mut body = neutral.clone();
        match at.strip_prefix("sampling_params.") {
            Some(name) => body["sampling_params"][name] = value,
            None => body[at] = value,
        }
        body
    };
    let before = lab.bench.mesh.log().lease_calls;
    for (field, value) in [
        ("lora_path", json!("adapter")),
        ("image_data", json!(["data:"])),
        ("return_routed_experts", json!(true)),
        ("logprob_start_len", json!("x")),
        ("rid", json!(7)),
        (
            "sampling_params.custom_params",
            json!({"return_top_p_token_ids": true}),
        ),
        ("sampling_params.top_k", json!("many")),
        ("sampling_params.stop_regex", json!("a+")),
        ("sampling_params.max_new_tokens", json!(-1)),
        ("sampling_params.max_new_token", json!(3)),
    ] {
        let (status, answer) = lab.post("/generate", &with(field, value)).await;
        assert_eq!(status, 400, "{field}: {answer}");
        let param = answer["error"]["param"].as_str().unwrap();
        assert!(
            param.ends_with(field.rsplit('.').next().unwrap()) || param.contains("max_tokens"),
            "{field}: {answer}"
        );
    }
    for body in [
        json!({}),
        json!({"input_ids": []}),
        json!([]),
        with("text", json!("two")),
    ] {
        let (status, answer) = lab.post("/generate", &body).await;
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].is_string());
    }
    assert_eq!(lab.bench.mesh.log().lease_calls, before);
    let refused = "refrain_gateway_trainer_requests_total{route=\"/generate\",outcome=\"refused\"}";
    assert_eq!(lab.bench.metric(refused), 14.0);
    // Elsewhere their names are logged, and nothing else happens.
    let lenient = Lab::with(|_| {}).await;
    let typo = with("sampling_params.max_new_token", json!(3));
    assert_eq!(lenient.post("/generate", &typo).await.0, 200);
}

#[tokio::test]
async fn a_faulty_section_is_named_and_several_models_need_a_choice() {
    let two_models = || {
        let mut config = lab_config();
        config.models.push(ModelConfig {
            id: "other".into(),
            ..config.models[0].clone()
        });
        config
    };
    let error = start_error(two_models()).await;
    assert!(error.contains("trainer.model"), "{error}");
    let mut chosen = two_models();
    chosen.trainer.model = Some("tiny".into());
    assert!(Bench::with(chosen).await.gateway.trainer_addr().is_some());
    let mut open = lab_config();
    open.trainer.listen = Some(([0, 0, 0, 0], 0).into());
    let error = start_error(open).await;
    assert!(error.contains("allows_other_machines"), "{error}");
    let without = Bench::new().await;
    assert!(without.gateway.trainer_addr().is_none());
}

#[tokio::test]
async fn a_page_in_a_browser_cannot_give_orders() {
    let lab = Lab::new().await;
    for (method, path, header, value, code) in [
        (
            Method::POST,
            "/pause",
            "origin",
            "http://page.example",
            "origin_refused",
        ),
        (
            Method::POST,
            "/flush_cache",
            "sec-fetch-site",
            "cross-site",
            "origin_refused",
        ),
        (
            Method::GET,
            "/server_info",
            "sec-fetch-site",
            "same-site",
            "origin_refused",
        ),
        (
            Method::GET,
            "/server_info",
            "host",
            "page.example",
            "host_refused",
        ),
        (
            Method::GET,
            "/healthz",
            "host",
            "page.example:8091",
            "host_refused",
        ),
    ] {
        let call = lab.request(method, path).header(header, value);
        let refused = call.send().await.unwrap();
        assert_eq!(refused.status(), 403, "{path} {header}");
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["code"], code, "{path} {header}");
    }
    // An image of a page is a GET that some browsers send without any mark, so no GET changes anything.
    for path in [
        "/flush_cache",
        "/pause",
        "/update_weights_from_disk",
        "/release_memory_occupation",
        "/init_weights_update_group?master_address=page.example",
        "/unload_lora_adapter?lora_name=x",
        "/add_worker?url=http://page.example",
    ] {
        let answer = lab.request(Method::GET, path).send().await.unwrap();
        assert_eq!(answer.status(), 405, "{path}");
    }
    assert!(lab.bench.mesh.fleet.take_orders().is_empty());
    // The name by which trainers reach it is no page's.
    let named = Lab::with(|config| config.allowed_hosts = vec!["trainer.lab.svc".into()]).await;
    let call = named
        .request(Method::GET, "/is_paused")
        .header("host", "trainer.lab.svc:8091");
    assert_eq!(call.send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_tenant_that_does_not_exist_is_named_in_the_answer() {
    let lab = Lab::with(|config| config.trainer.tenant = "nobody".parse().ok()).await;
    let (status, answer) = lab.post("/generate", &json!({"input_ids": [1]})).await;
    assert_eq!(status, 403, "{answer}");
    assert_eq!(answer["error"]["code"], "unknown_tenant");
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("gateway.trainer.tenant")
    );
}
