//! A recorder between a client and a server.

use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use super::*;

const GO_ON: &str = r#"{"messages": [{"role": "user", "content": "Go on"}]}"#;

const STREAM: &str = concat!(
    "data: {\"choices\": [{\"delta\": {\"content\": \"Say it\"}}]}\n\n",
    "data: {\"choices\": [{\"delta\": {\"content\": \" again.\"}}]}\n\n",
    "data: [DONE]\n\n",
);

/// A server that says what it was asked. The query names the kind of answer.
async fn upstream(request: HttpRequest, body: Bytes) -> HttpResponse {
    let head = |name: &str| {
        let value = request.headers().get(name);
        value.map(|value| value.to_str().unwrap().to_owned())
    };
    let seen = json!({
        "method": request.method().as_str(), "path": request.path(), "authorization": head("authorization"),
        "accept-encoding": head("accept-encoding"), "length": head("content-length"),
        "body": String::from_utf8_lossy(&body),
        "choices": [{"message": {"role": "assistant", "content": "Say it again."}}],
    });
    let mut answer = match request.query_string() {
        "fail" => HttpResponse::build(StatusCode::IM_A_TEAPOT),
        _ => HttpResponse::Ok(),
    };
    answer.insert_header(("set-cookie", "a=b"));
    let events = |last: Option<actix_web::Error>| {
        let events = STREAM.split_inclusive("\n\n");
        let events = events.map(|event| Ok(Bytes::from_static(event.as_bytes())));
        // The head goes out before the answer breaks off.
        let last = stream::iter(last).then(async |error| {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Err(error)
        });
        stream::iter(events).chain(last)
    };
    match request.query_string() {
        "stream" => answer
            .content_type("text/event-stream")
            .streaming(events(None)),
        "broken" => answer.streaming(events(Some(actix_web::error::ErrorBadGateway("gone")))),
        "gzip" => {
            answer.insert_header(("content-encoding", "gzip"));
            answer.body(gzip(seen.to_string().as_bytes()))
        }
        _ => answer.json(seen),
    }
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn start_upstream() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let server = HttpServer::new(|| App::new().default_service(web::to(upstream)));
    let server = server.workers(1).listen(listener).unwrap();
    actix_web::rt::spawn(server.disable_signals().run());
    url
}

fn args(to: &str, output: &Path) -> RecordArgs {
    install_crypto_provider();
    RecordArgs {
        to: to.parse().unwrap(),
        listen: "127.0.0.1:0".parse().unwrap(),
        output: output.to_owned(),
        private: false,
        output_tokens: 1000,
        calls: 100,
        bytes_max: 1 << 20,
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[actix_web::test]
async fn calls_pass_through_untouched_and_are_written_down() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    let (told, heard) = std::sync::mpsc::channel();
    let told = move |written: &Written| told.send(written.clone()).unwrap();
    let recording = Recording::start(&args(&start_upstream(), &path), told).unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = |query: &str| format!("http://{}/v1/chat/completions?{query}", recording.address);
    let post = |query: &str, key: &str| {
        let call = client.post(url(query)).bearer_auth(key);
        call.header("session-id", "s1")
            .header("content-type", "application/json")
    };
    let text = GO_ON;

    let answer = post("", "k1").body(text).send().await.unwrap();
    assert_eq!(answer.headers()["set-cookie"], "a=b");
    let seen: Value = answer.json().await.unwrap();
    let expected = json!({
        "method": "POST", "path": "/v1/chat/completions", "authorization": "Bearer k1", "accept-encoding": null,
        "length": "52", "body": text,
        "choices": [{"message": {"role": "assistant", "content": "Say it again."}}],
    });
    assert_eq!(seen, expected);
    let streamed = post("stream", "k2").body(text).send().await.unwrap();
    let streamed = streamed.text().await.unwrap();
    assert_eq!(streamed, STREAM);
    // The request and its answer are compressed all the way, and plain in the file.
    let packed = post("gzip", "k1")
        .header("content-encoding", "gzip")
        .body(gzip(text.as_bytes()));
    let packed = packed.send().await.unwrap();
    assert_eq!(packed.headers()["content-encoding"], "gzip");
    assert!(packed.bytes().await.unwrap().starts_with(&[0x1f, 0x8b]));
    // Errors, breaks and other things pass as well, and are no calls.
    let failed = post("fail", "k1").body(text).send().await.unwrap();
    assert_eq!(failed.status(), 418);
    assert!(
        post("broken", "k1")
            .body(text)
            .send()
            .await
            .unwrap()
            .bytes()
            .await
            .is_err()
    );
    let odd = post("", "k1").body("no JSON").send().await.unwrap();
    assert_eq!(odd.json::<Value>().await.unwrap()["body"], "no JSON");
    let listed = client.get(url("")).send().await.unwrap();
    assert_eq!(listed.json::<Value>().await.unwrap()["length"], Value::Null);

    recording.stop().await.unwrap();
    let written = heard.recv().unwrap();
    let left_out: Vec<_> = written.left_out.into_iter().collect();
    assert_eq!(
        left_out,
        [
            ("a body that is not JSON", 2),
            ("an answer that broke off", 1),
            ("an answer that is an error", 1)
        ]
    );
    let records = lines(&path);
    assert_eq!((written.calls, records.len()), (3, 3));
    let request = json!({"messages": [{"role": "user", "content": "Go on"}]});
    for record in &records {
        assert_eq!(record["request"], request);
        assert_eq!(
            (&record["endpoint"], &record["session"]),
            (&json!("/v1/chat/completions"), &json!("s1"))
        );
        let is_stream = record["response"].is_array();
        assert_eq!(record["first_ms"].is_u64(), is_stream, "{record}");
        assert!(record["first_ms"].as_u64() <= record["duration_ms"].as_u64());
    }
    assert_eq!(records[0]["response"], expected);
    assert_eq!(records[1]["response"].as_array().unwrap().len(), 2);
    assert_eq!((written.output_tokens, written.bytes > 0), (12, true));
    assert!(records[2]["response"]["body"].is_string());
    let tenants: Vec<_> = records.iter().map(|record| &record["tenant"]).collect();
    assert_eq!(tenants, ["key-1", "key-2", "key-1"]);
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // The server repeats the key in its answers; nothing else has it.
    for mut record in records.clone() {
        record["response"].take();
        assert!(!record.to_string().contains("k1"), "{record}");
    }
}

#[actix_web::test]
async fn writing_ends_when_there_is_enough_and_requests_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    let args = RecordArgs {
        calls: 2,
        ..args(&start_upstream(), &path)
    };
    let (told, heard) = std::sync::mpsc::channel();
    let told = move |written: &Written| told.send(written.is_enough).unwrap();
    let recording = Recording::start(&args, told).unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("http://{}/v1/messages", recording.address);
    let is_answered = async || {
        let answer = client.post(&url).body(GO_ON).send().await;
        answer.unwrap().status().is_success()
    };
    assert!(is_answered().await && is_answered().await);
    let is_enough = tokio::task::spawn_blocking(move || heard.recv().unwrap());
    assert!(is_enough.await.unwrap());
    assert!(is_answered().await);
    recording.stop().await.unwrap();
    assert_eq!(lines(&path).len(), 2);
}

#[actix_web::test]
async fn a_private_file_has_tokens_and_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    let args = RecordArgs {
        private: true,
        ..args(&start_upstream(), &path)
    };
    let recording = Recording::start(&args, |_| ()).unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for query in ["", "stream"] {
        let url = format!("http://{}/v1/chat/completions?{query}", recording.address);
        let call = client.post(url).header("session-id", "secret");
        let call = call.body(r#"{"messages": [{"role": "user", "content": "secret"}]}"#);
        assert!(call.send().await.unwrap().bytes().await.is_ok());
    }
    recording.stop().await.unwrap();
    let records = lines(&path);
    assert_eq!(records.len(), 2);
    assert_eq!(
        records[0]["output_token_ids"],
        records[1]["output_token_ids"]
    );
    assert_eq!(records[0]["output_token_ids"].as_array().unwrap().len(), 4);
    assert_eq!(records[0]["session"], records[1]["session"]);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(!text.contains("secret") && !text.contains("again"));
    // The tokens of another run would not go with these.
    assert!(Recording::start(&args, |_| ()).is_err());
}

#[actix_web::test]
async fn a_server_that_is_away_is_an_error_of_the_gateway_kind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    let args = args("http://127.0.0.1:9", &path);
    let recording = Recording::start(&args, |_| ()).unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let answer = client.post(format!("http://{}/v1/messages", recording.address));
    let answer = answer.body(GO_ON).send().await.unwrap();
    assert_eq!(answer.status(), 502);
    let error: Value = answer.json().await.unwrap();
    assert_eq!(
        error["error"]["message"],
        "the server of --to cannot be reached"
    );
    recording.stop().await.unwrap();
}
