//! Limits, readiness, metrics and drains.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::mesh::{Bench, Mishap, PATIENCE, chat, config, eventually, tuned};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_tenant_at_its_limit_is_refused_and_others_are_not() {
    let config = refrain_gateway::GatewayConfig {
        tenant_requests_in_flight_max: 1,
        ..config()
    };
    let bench = Bench::with(config).await;
    bench.mesh.mishap(0, Mishap::Hang(1));
    let first = tokio::spawn(bench.post(CHAT, &chat(json!({}))).send());
    bench.mesh.wait_for_streams(1).await;
    let second = bench.post(CHAT, &chat(json!({}))).send().await.unwrap();
    assert_eq!(second.status(), 429);
    assert_eq!(second.headers()["retry-after"], "1");
    let answer: Value = second.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "rate_limit_exceeded");
    let other = bench
        .client
        .post(format!("{}{CHAT}", bench.url))
        .bearer_auth("sk-bolt");
    assert_eq!(
        other.json(&chat(json!({}))).send().await.unwrap().status(),
        200
    );
    assert_eq!(bench.metric("refrain_gateway_requests_in_flight"), 1.0);
    assert_eq!(
        bench.metric("refrain_gateway_rejections_total{limit=\"tenant_requests\"}"),
        1.0
    );
    first.abort();
    bench.mesh.settled().await;
    assert_eq!(bench.chat(json!({})).await.0, 200);
}

#[tokio::test]
async fn a_body_past_its_limit_is_413() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        body_bytes_max: 1000,
        ..config()
    })
    .await;
    let (status, answer) = bench.chat(json!({"padding": "x".repeat(2000)})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (413, &json!("request_too_large"))
    );
    assert_eq!(bench.chat(json!({})).await.0, 200);
}

#[tokio::test]
async fn a_large_body_is_read() {
    let bench = Bench::new().await;
    let (status, _) = bench.chat(json!({"padding": "x".repeat(100_000)})).await;
    assert_eq!(status, 200);
}

/// A body of a surface with one text of this many bytes, and with padding.
fn large_body(path: &str, text: usize, padding: usize) -> Value {
    let text = "x".repeat(text);
    let mut body = match path {
        "/v1/responses" => json!({"model": "tiny", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": text}]},
        ]}),
        "/v1/messages" => json!({"model": "tiny", "max_tokens": 9, "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]}),
        _ => chat(json!({"messages": [{"role": "user", "content": text}]})),
    };
    body["padding"] = "x".repeat(padding).into();
    body
}

#[tokio::test]
async fn large_bodies_take_turns_and_all_are_answered() {
    for path in [CHAT, "/v1/responses", "/v1/messages"] {
        let bench = Bench::with(refrain_gateway::GatewayConfig {
            body_bytes_max: 4 << 20,
            ..tuned(|tuning| tuning.tokenizing_bytes_max = 1 << 20)
        })
        .await;
        let refused = large_body(path, 3_000_000, 0);
        let padded = large_body(path, 5, 600_000);
        let small = large_body(path, 5, 50_000);
        let bodies = [&refused, &padded, &small].repeat(4);
        let sent = bodies.iter().map(|body| bench.post(path, body).send());
        let answers = futures_util::future::join_all(sent).await;
        for (place, answer) in answers.into_iter().enumerate() {
            let answer = answer.unwrap();
            if place % 3 > 0 {
                assert_eq!(answer.status(), 200, "{path}");
                continue;
            }
            assert_eq!(answer.status(), 400, "{path}");
            let answer: Value = answer.json().await.unwrap();
            let message = answer["error"]["message"].as_str().unwrap();
            let words = match path {
                "/v1/messages" => "prompt is too long",
                _ => "at least",
            };
            assert!(message.contains(words), "{path}: {message}");
        }
        let rejections = |limit: &str| {
            bench.metric(&format!(
                "refrain_gateway_rejections_total{{limit=\"{limit}\"}}"
            ))
        };
        assert_eq!(
            (rejections("context"), rejections("tokenizing")),
            (4.0, 0.0),
            "{path}"
        );
        assert_eq!(bench.metric("refrain_gateway_tokenizing_bytes"), 0.0);
        let waiting = bench.metric("refrain_gateway_tokenizing_waiting_bytes");
        assert_eq!(waiting, 0.0);
        let too_large = large_body(path, 5, 5 << 20);
        let refused = bench.post(path, &too_large).send().await.unwrap();
        assert_eq!(refused.status(), 413, "{path}");
    }
}

#[tokio::test]
async fn a_request_has_a_time_limit() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        request_ms_max: 50,
        ..config()
    })
    .await;
    bench.mesh.mishap(0, Mishap::Hang(1));
    let (status, answer) = bench.chat(json!({})).await;
    assert_eq!(
        (status, &answer["error"]["type"]),
        (504, &json!("server_error"))
    );
    bench.mesh.settled().await;
}

/// Sends a chat without the last `left_out` bytes of its body, on a connection with a small receive buffer.
async fn send_chat(bench: &Bench, body: &Value, left_out: usize) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut stream = socket.connect(bench.gateway.addr()).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer sk-acme\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let some = &body.as_bytes()[..body.len() - left_out];
    stream.write_all(some).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_stops_reading_holds_its_request_no_longer_than_the_time_limit() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        request_ms_max: 3_000,
        ..config()
    })
    .await;
    // The answer has tens of megabytes, far more than the buffers on its way.
    bench.mesh.reply(&"word ".repeat(40));
    let fields = json!({"stream": true, "n": 128, "logprobs": true, "top_logprobs": 20});
    let mut stream = send_chat(&bench, &chat(fields), 0).await;
    let requests = |status: &str| {
        bench.metric(&format!(
            "refrain_gateway_requests_total{{status=\"{status}\"}}"
        ))
    };
    let in_flight = || bench.metric("refrain_gateway_requests_in_flight");
    let ended = tokio::time::timeout(PATIENCE, async {
        while requests("504") + requests("499") == 0.0 || in_flight() > 0.0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(ended.await.is_ok(), "the request does not end");
    bench.mesh.settled().await;
    assert_eq!((requests("504"), requests("499")), (1.0, 0.0));
    // Its connection is still open, and it finds the error if it reads on.
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.contains("the request took longer than 3 s"));
    assert!(!answer.contains("[DONE]"));
}

/// The bytes that arrive on a connection until the gateway closes it.
async fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer));
    read.await.expect("the connection is not closed").unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_body_that_does_not_arrive_in_time_is_408() {
    let mut limited = config();
    limited.http.body_ms_max = 50;
    let bench = Bench::with(limited).await;
    let answer = rest(&mut send_chat(&bench, &chat(json!({})), 1).await).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains(r#""code":"body_timeout""#), "{answer}");
    // A body without a length that keeps arriving loses its connection as well.
    let mut stream = TcpStream::connect(bench.gateway.addr()).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer sk-acme\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = stream.split();
    let mut answer = Vec::new();
    let dribble = async {
        while writing.write_all(b"1\r\n{\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        // The connection may be reset, because bytes arrive after it was closed.
        _ = reading.read_to_end(&mut answer) => {}
        () = dribble => {}
        () = tokio::time::sleep(PATIENCE) => panic!("the connection is not closed"),
    }
    assert!(answer.starts_with(b"HTTP/1.1 408 "), "{answer:?}");
    let rejected = bench.metric("refrain_gateway_rejections_total{limit=\"body_time\"}");
    assert_eq!(rejected, 2.0);
    assert_eq!(bench.metric("refrain_gateway_bodies_arriving"), 0.0);
}

#[tokio::test]
async fn a_length_past_the_limit_is_refused_before_the_body_arrives() {
    let bench = Bench::new().await;
    let mut stream = TcpStream::connect(bench.gateway.addr()).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer sk-acme\r\ncontent-length: 100000000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains(r#""code":"request_too_large""#), "{answer}");
}

#[tokio::test]
async fn bodies_that_never_arrive_keep_nobody_out() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        tenant_requests_in_flight_max: 2,
        ..config()
    })
    .await;
    let body = chat(json!({}));
    let mut unfinished = Vec::new();
    for _ in 0..2 {
        unfinished.push(send_chat(&bench, &body, 1).await);
    }
    eventually("two bodies arrive", async || {
        bench.metric("refrain_gateway_bodies_arriving") == 2.0
    })
    .await;
    assert_eq!(bench.metric("refrain_gateway_requests_in_flight"), 0.0);
    // A body that has had its time to arrive is cut off for another one.
    eventually("one gives way", async || {
        bench.chat(json!({})).await.0 == 200
    })
    .await;
    let answer = rest(&mut unfinished[0]).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(bench.metric("refrain_gateway_bodies_arriving"), 1.0);
}

#[tokio::test]
async fn an_unavailable_service_tells_when_to_retry() {
    let bench = Bench::new().await;
    for lease in 0..8 {
        let refused = Mishap::Refuse(refrain_protocol::ErrorKind::Unavailable);
        bench.mesh.mishap(lease, refused);
    }
    let refused = bench.post(CHAT, &chat(json!({}))).send().await.unwrap();
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["retry-after"], "1");
}

#[tokio::test]
async fn a_request_counts_as_many_times_as_it_has_choices() {
    let bench = Bench::with(refrain_gateway::GatewayConfig {
        tenant_requests_in_flight_max: 4,
        ..config()
    })
    .await;
    for lease in 0..3 {
        bench.mesh.mishap(lease, Mishap::Hang(1));
    }
    let first = tokio::spawn(bench.post(CHAT, &chat(json!({"n": 3}))).send());
    bench.mesh.wait_for_streams(3).await;
    assert_eq!(bench.metric("refrain_gateway_requests_in_flight"), 3.0);
    assert_eq!(bench.chat(json!({"n": 2})).await.0, 429);
    assert_eq!(bench.chat(json!({"n": 1})).await.0, 200);
    first.abort();
    bench.mesh.settled().await;
    // A request alone may have more choices.
    assert_eq!(bench.chat(json!({"n": 5})).await.0, 200);
}

#[tokio::test]
async fn methods_that_a_route_does_not_take_are_405() {
    let bench = Bench::new().await;
    for (method, path, allowed) in [
        ("GET", CHAT, "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/models/tiny", "GET"),
    ] {
        let url = format!("{}{path}", bench.url);
        let response = bench
            .client
            .request(method.parse().unwrap(), url)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 405, "{method} {path}");
        assert_eq!(response.headers()["allow"], allowed);
        let answer: Value = response.json().await.unwrap();
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        assert_eq!(answer["error"]["code"], "method_not_allowed");
    }
}

#[tokio::test]
async fn an_address_has_a_limit_on_connections_unless_it_is_a_proxy() {
    let one = |proxies| refrain_gateway::GatewayConfig {
        address_connections_max: 1,
        proxies,
        ..config()
    };
    for (proxies, status) in [(vec![], 429), (vec!["127.0.0.1".to_owned()], 200)] {
        let bench = Bench::with(one(proxies)).await;
        bench.mesh.mishap(0, Mishap::Hang(1));
        let first = tokio::spawn(bench.post(CHAT, &chat(json!({}))).send());
        bench.mesh.wait_for_streams(1).await;
        assert_eq!(bench.chat(json!({})).await.0, status);
        first.abort();
    }
}

#[tokio::test]
async fn the_gateway_is_ready_while_workers_serve_a_model() {
    let bench = Bench::new().await;
    let get = async |path: &str| {
        bench
            .client
            .get(format!("{}{path}", bench.url))
            .send()
            .await
            .unwrap()
            .status()
            .as_u16()
    };
    assert_eq!((get("/healthz").await, get("/readyz").await), (200, 200));
    let mut other = config();
    other.models[0].id = "unserved".into();
    let unserved = Bench::with(other).await;
    let response = unserved
        .client
        .get(format!("{}/readyz", unserved.url))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
}

#[tokio::test]
async fn requests_and_tokens_are_counted() {
    let bench = Bench::new().await;
    bench.chat(json!({})).await;
    let labels = "{model=\"tiny\",tenant=\"acme\"";
    for name in [
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
    ] {
        assert_eq!(
            bench.metric(&format!("{name}_count{labels}}}")),
            1.0,
            "{name}"
        );
    }
    let tokens = bench.mesh.script().reply.len() as f64;
    let usage = format!("gen_ai_client_token_usage_sum{labels},token_type=\"output\"}}");
    assert_eq!(bench.metric(&usage), tokens);
    for (series, value) in [
        (
            "requests_total{model=\"tiny\",status=\"200\",tenant=\"acme\"}",
            1.0,
        ),
        (
            "choices_total{finish_reason=\"stop\",model=\"tiny\",tenant=\"acme\"}",
            1.0,
        ),
        (
            "tokens_total{kind=\"output\",model=\"tiny\",tenant=\"acme\"}",
            tokens,
        ),
        ("phase_seconds_count{model=\"tiny\",phase=\"decode\"}", 1.0),
    ] {
        assert_eq!(
            bench.metric(&format!("refrain_gateway_{series}")),
            value,
            "{series}"
        );
    }
    let stranger = bench.client.post(format!("{}{CHAT}", bench.url));
    let refused = stranger.bearer_auth("unknown").send().await.unwrap();
    assert_eq!(refused.status(), 401);
    let unknown = "refrain_gateway_requests_total{model=\"none\",status=\"401\",tenant=\"none\"}";
    assert_eq!(bench.metric(unknown), 1.0);
    let text = bench
        .client
        .get(format!("{}/metrics", bench.url))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    assert!(text.contains("gen_ai_client_token_usage_bucket"));
}

#[tokio::test]
async fn a_drain_lets_streams_end_and_takes_nothing_new() {
    let bench = Bench::new().await;
    // The stream lasts longer than the beginning of the drain.
    bench.mesh.script().step_pause = Duration::from_millis(300);
    let url = format!("{}{CHAT}", bench.url);
    let running = tokio::spawn(bench.post(CHAT, &chat(json!({"stream": true}))).send());
    bench.mesh.wait_for_streams(1).await;
    let response = running.await.unwrap().unwrap();
    let drain = tokio::spawn(bench.gateway.drain(PATIENCE));
    let late = async || {
        let late = bench.client.post(&url).bearer_auth("sk-acme");
        late.json(&chat(json!({}))).send().await.unwrap()
    };
    // The drain begins in a task of its own, so the first ones may come before it.
    let mut refused = late().await;
    eventually("the drain begins", async || {
        if refused.status() == 200 {
            refused = late().await;
        }
        refused.status() != 200
    })
    .await;
    let late = refused;
    assert_eq!(late.status(), 503);
    assert!(late.headers().contains_key("retry-after"));
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(drain.await.unwrap(), 0);
}

#[tokio::test]
async fn requests_that_outlast_a_drain_are_cut_off_with_an_error() {
    let bench = Bench::new().await;
    for lease in 0..2 {
        bench.mesh.mishap(lease, Mishap::Hang(1));
    }
    let stream = bench.post(CHAT, &chat(json!({"stream": true})));
    let stream = stream.send().await.unwrap();
    let plain = tokio::spawn(bench.post(CHAT, &chat(json!({}))).send());
    bench.mesh.wait_for_streams(2).await;
    let Bench { mesh, gateway, .. } = bench;
    assert_eq!(gateway.drain(Duration::from_millis(50)).await, 2);
    mesh.settled().await;

    let events = stream.text().await.unwrap();
    let last = events.trim_end().lines().last().unwrap();
    let last: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "server_is_draining");
    assert_eq!(last["error"]["type"], "server_error");

    let plain = plain.await.unwrap().unwrap();
    assert_eq!(plain.status(), 503);
    assert_eq!(plain.headers()["retry-after"], "1");
    let answer: Value = plain.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "server_is_draining");
}
