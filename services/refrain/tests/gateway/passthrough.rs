//! Routes of other servers behind the gateway.

use std::net::TcpListener;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use refrain_gateway::{GatewayConfig, PassthroughConfig};
use serde_json::{Value, json};

use crate::mesh::{Bench, config};

/// A server that answers with what it was asked, as a whole or as a stream, and with its usage.
async fn upstream(request: HttpRequest, body: Bytes) -> HttpResponse {
    let head = |name: &str| {
        let value = request.headers().get(name);
        value.map(|value| value.to_str().unwrap().to_owned())
    };
    let usage = json!({"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9});
    let seen = json!({
        "method": request.method().as_str(), "path": request.path(), "query": request.query_string(),
        "authorization": head("authorization"), "x-api-key": head("x-api-key"), "cookie": head("cookie"),
        "x-own": head("x-own"), "body": String::from_utf8_lossy(&body), "usage": usage,
    });
    if request.query_string() == "fail" {
        return HttpResponse::build(StatusCode::IM_A_TEAPOT).json(seen);
    }
    let broken = async {
        // The beginning is on its way by then.
        tokio::time::sleep(Duration::from_millis(300)).await;
        Err(actix_web::error::ErrorInternalServerError("gone"))
    };
    if ["break", "endless"].contains(&request.query_string()) {
        let begin = stream::iter([Ok(Bytes::from_static(b"data: {}\n\n"))]);
        return match request.query_string() {
            "break" => HttpResponse::Ok().streaming(begin.chain(stream::once(broken))),
            _ => HttpResponse::Ok().streaming(begin.chain(stream::pending())),
        };
    }
    if request.query_string() != "stream" {
        return HttpResponse::Ok()
            .insert_header(("x-theirs", "yes"))
            .insert_header(("set-cookie", "a=b"))
            .json(seen);
    }
    let events = [
        "data: {\"a\": 1}\n\n".to_owned(),
        format!("data: {seen}\n\n"),
    ];
    let events = stream::iter(events.map(|event| Ok::<_, actix_web::Error>(Bytes::from(event))));
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .streaming(events)
}

/// Starts the server, and returns its URL.
fn start() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = HttpServer::new(|| App::new().default_service(web::to(upstream)));
    let server = server
        .workers(1)
        .listen(listener)
        .unwrap()
        .disable_signals();
    tokio::spawn(server.run());
    url
}

fn with(url: &str) -> GatewayConfig {
    let mut config = config();
    let key = tempfile::NamedTempFile::new()
        .unwrap()
        .into_temp_path()
        .keep()
        .unwrap();
    std::fs::write(&key, "their-key\n").unwrap();
    config.passthrough = vec![PassthroughConfig {
        url: url.to_owned(),
        routes: vec!["/v1/embeddings".into(), "/v1/files".into()],
        models: vec!["bge".into()],
        api_key_file: Some(key),
        ..PassthroughConfig::default()
    }];
    config.passthrough.push(PassthroughConfig {
        url: url.to_owned(),
        routes: vec!["/v1/files".into()],
        ..PassthroughConfig::default()
    });
    config
}

#[tokio::test]
async fn a_request_goes_to_the_other_server_as_it_is_and_its_usage_is_counted() {
    let bench = Bench::with(with(&start())).await;
    let body = json!({"model": "bge", "input": "hi"});
    let request = bench.post("/v1/embeddings?deep=1", &body);
    let request = request.header("x-own", "mine").header("cookie", "c=d");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-theirs"], "yes");
    assert_eq!(response.headers().get("set-cookie"), None);
    let seen: Value = response.json().await.unwrap();
    assert_eq!(seen["authorization"], "Bearer their-key");
    assert_eq!(
        (&seen["x-api-key"], &seen["cookie"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(
        (&seen["x-own"], &seen["query"]),
        (&json!("mine"), &json!("deep=1"))
    );
    assert_eq!(seen["body"], body.to_string());
    let url = format!("{}/v1/embeddings?stream", bench.url);
    let request = bench.client.post(url).bearer_auth("sk-acme").json(&body);
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert!(
        response
            .text()
            .await
            .unwrap()
            .starts_with("data: {\"a\": 1}\n\ndata: ")
    );
    let served = "refrain_gateway_requests_total{tenant=\"acme\",model=\"bge\",status=\"200\"}";
    assert_eq!(bench.metric(served), 2.0, "{}", bench.gateway.addr());
}

#[tokio::test]
async fn other_methods_paths_and_failures_come_through() {
    let bench = Bench::with(with(&start())).await;
    let call = |method: reqwest::Method, path: &str| {
        let url = format!("{}{path}", bench.url);
        bench.client.request(method, url).bearer_auth("sk-acme")
    };
    let request = call(reqwest::Method::DELETE, "/v1/files/7?a=b");
    let seen: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!(
        (&seen["method"], &seen["path"]),
        (&json!("DELETE"), &json!("/v1/files/7"))
    );
    assert_eq!(seen["authorization"], Value::Null);
    let failed = call(reqwest::Method::GET, "/v1/files?fail")
        .send()
        .await
        .unwrap();
    assert_eq!(failed.status(), 418);
    let (status, _) = bench
        .json("/v1/embeddings", &json!({"model": "other", "input": "a"}))
        .await;
    assert_eq!(status, 404);
    let (status, _) = bench.json("/v1/filesystem", &json!({})).await;
    assert_eq!(status, 404);
    let url = format!("{}/v1/embeddings", bench.url);
    let refused = bench
        .client
        .post(url)
        .json(&json!({"model": "bge"}))
        .send()
        .await
        .unwrap();
    assert_eq!(refused.status(), 401);
    let models = call(reqwest::Method::GET, "/v1/models")
        .send()
        .await
        .unwrap();
    let models: Value = models.json().await.unwrap();
    let ids: Vec<_> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|card| &card["id"])
        .collect();
    assert_eq!(ids, ["tiny", "bge"]);
}

#[tokio::test]
async fn answers_that_do_not_come_to_their_end_are_counted() {
    let bench = Bench::with(with(&start())).await;
    let ask = async |query: &str| {
        let url = format!("{}/v1/embeddings?{query}", bench.url);
        let request = bench.client.post(url).bearer_auth("sk-acme");
        let mut answer = request.json(&json!({"model": "bge"})).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.chunk().await.unwrap().unwrap(), "data: {}\n\n");
        answer
    };
    let counted = async |status: u16| {
        let labels = format!("tenant=\"acme\",model=\"bge\",status=\"{status}\"");
        let line = format!("refrain_gateway_requests_total{{{labels}}}");
        let until = std::time::Instant::now() + Duration::from_secs(30);
        while bench.metric(&line) < 1.0 && std::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(bench.metric(&line), 1.0, "{line}");
    };
    let mut broken = ask("break").await;
    assert!(broken.chunk().await.is_err());
    counted(502).await;
    // This caller leaves.
    drop(ask("endless").await);
    counted(499).await;
}

#[tokio::test]
async fn a_server_that_is_away_is_a_503_without_its_address() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let bench = Bench::with(with(&url)).await;
    let body = json!({"model": "bge", "input": "hi"});
    let asked = tokio::time::timeout(Duration::from_secs(60), bench.json("/v1/embeddings", &body));
    let (status, answer) = asked.await.unwrap();
    assert_eq!(status, 503);
    assert!(!answer.to_string().contains("127.0.0.1"), "{answer}");
}
